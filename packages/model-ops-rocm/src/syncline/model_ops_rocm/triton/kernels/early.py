"""What a kernel of sm_90 does while it waits for the one ahead, so that less is left for later.

Unit: one warp, or one thread's values. A tile's first request waits until the tensor memory
accelerator (TMA) has its descriptor, which lies among the launch's parameters: `fetch_descriptor`
asks for it ahead, and `fetch_tiles` for it and for tiles, into L2. Addresses are known before what
is read or stored there: `kept` has them computed at once, where a compiler would wait until they
are used, to keep fewer registers. In PTX, for which Triton has no words.

A parameter of the kernel that runs is named as PTX does, by its number among those, where a
descriptor of a tile with two axes counts as five.

Source: PTX ISA, prefetch.tensormap and cp.async.bulk.prefetch.tensor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# How many parameters a descriptor is: itself, its shape and its strides.
OF_DESCRIPTOR = gl.constexpr(5)


@gluon.constexpr_function
def _fetch_descriptor(kernel, parameter):
    """PTX: one lane of the warp asks for the descriptor that is the kernel's `parameter`."""
    return f"""
    {{
    .reg .pred is_first;
    .reg .b32 lane;
    .reg .b64 at;
    mov.u32 lane, %laneid;
    setp.eq.u32 is_first, lane, 0;
    mov.b64 at, {kernel}_param_{parameter};
    cvta.param.u64 at, at;
    @is_first prefetch.tensormap [at];
    mov.u32 $0, lane;
    }}
    """


@gluon.constexpr_function
def _fetch_tile(kernel, parameter):
    """PTX: asks L2 for the tile at row $1 and column $2, if $3 is not 0."""
    return f"""
    {{
    .reg .pred is_wanted;
    .reg .b64 at;
    setp.ne.s32 is_wanted, $3, 0;
    mov.b64 at, {kernel}_param_{parameter};
    cvta.param.u64 at, at;
    @is_wanted cp.async.bulk.prefetch.tensor.2d.L2.global.tile [at, {{$2, $1}}];
    mov.u32 $0, 0;
    }}
    """


@gluon.jit
def fetch_descriptor(KERNEL: gl.constexpr, PARAMETER: gl.constexpr):
    """Asks for the descriptor that this kernel, whose name is KERNEL, has as its PARAMETER."""
    gl.inline_asm_elementwise(
        _fetch_descriptor(KERNEL, PARAMETER),
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fetch_tiles(KERNEL: gl.constexpr, PARAMETER: gl.constexpr, rows, columns, are_wanted):
    """Asks L2 for tiles of that descriptor; what lies beyond an edge is not read."""
    gl.inline_asm_elementwise(
        _fetch_tile(KERNEL, PARAMETER),
        "=r,r,r,r",
        [rows, columns, are_wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def kept(ptr, places, are_wanted):
    """Addresses of the elements of ptr at `places`, 0 where not wanted, computed here."""
    at = gl.where(are_wanted, (ptr + places).to(gl.int64), 0)
    return gl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [at], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def store_kept(ptr, addresses, values):
    """Stores at what `kept` gave of ptr. Of a cluster the first program does."""
    gl.store(addresses.to(ptr.dtype), values.to(ptr.dtype.element_ty), mask=addresses != 0)
