"""Programs of a cluster on sm_90: which this is, their barrier, and room for what they send.

Unit: one program. What a program is sent (st.async) lies in its shared memory, and a barrier there
counts the bytes. Triton has no words for that: it is PTX, between braces, so that the names and
labels of one copy are its own, however often a compiler writes it.

The barrier of a cluster counts all threads that have not ended. It is passed once: to arrive there
says that this program's room is ready, to wait, that the others' are, too. Every thread does both,
none waits before all have arrived, and what has passed it waits for no other cluster.

Nobody sends to a program that has ended, for each waits for what it is sent. One may end while what
it sent is under way, which was in registers and needs nothing of it. Nothing outlives a launch: the
barriers are made anew in each.

Source: PTX ISA, st.async, mbarrier and barrier.cluster.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

_THREADS = 128  # of each program that send and are sent to
THREADS = gl.constexpr(_THREADS)
# Triton 3.7 has a barrier for each program of a cluster in an axis of its own, 3.6 without one.
_HAS_BARRIER_AXIS = "allocate_mbarrier" in mbarrier.__all__
# Behind a room: its barrier, and what keeps at a multiple of 1,024 bytes the shared memory that
# Triton lays out, which begins where this ends.
_TAIL_BYTES = 1_024


@gluon.constexpr_function
def each_whole(num_ctas, num_axes):
    """What a layout says where each program of a cluster has a whole tile."""
    return [[0] * num_axes] * (num_ctas.bit_length() - 1)


@gluon.constexpr_function
def sums_layout(num_warps, width, num_ctas):
    """Each program has a whole tile of sums, of a product that is `width` wide."""
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps, 1],
        instr_shape=[16, width, 16],
        cga_layout=each_whole(num_ctas, 2),
    )


@gluon.constexpr_function
def num_barriers(num_ctas):
    """Along the axis in which the programs' barriers lie."""
    return num_ctas if _HAS_BARRIER_AXIS else 1


@gluon.constexpr_function
def barrier_layout(num_ctas):
    """Of barriers that each program has for itself."""
    bits = range(num_ctas.bit_length() - 1)
    return mbarrier.MBarrierLayout([[1 << bit if _HAS_BARRIER_AXIS else 0] for bit in bits])


@gluon.constexpr_function
def _room(num_bytes):
    """PTX: $0 becomes the address of room for `num_bytes`, and all threads arrive.

    Bytes may come before they are expected: the barrier's phase ends after both.
    """
    num_held = -(-num_bytes // _TAIL_BYTES) * _TAIL_BYTES
    return f"""
    {{
    .shared .align 1024 .b8 room[{num_held + _TAIL_BYTES}];
    .reg .pred is_first;
    mov.u32 $0, %tid.x;
    setp.eq.u32 is_first, $0, 0;
    mov.u32 $0, room;
    @is_first mbarrier.init.shared::cta.b64 [$0+{num_bytes}], 1;
    @is_first fence.mbarrier_init.release.cluster;
    @is_first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{num_bytes}], {num_bytes};
    barrier.cluster.arrive.relaxed;
    }}
    """


@gluon.constexpr_function
def own_place(room):
    """PTX: `own` becomes the address of this thread's first 16 bytes in the room at `room`.

    A thread's lie there beside those of the same place of the other threads.
    """
    return [
        ".reg .b32 own;",
        "mov.u32 own, %tid.x;",
        "shl.b32 own, own, 4;",
        f"add.u32 own, own, {room};",
    ]


@gluon.constexpr_function
def send_vector(at, values, full):
    """PTX: sends four 32-bit `values` to `at`, of which the barrier `full` is told."""
    return (
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        f"[{at}], {{{', '.join(values)}}}, [{full}];"
    )


@gluon.constexpr_function
def wait_until(full):
    """PTX: until the barrier `full` has been told of all that its program is sent."""
    return [
        ".reg .pred is_full;",
        "WAIT:",
        f"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_full, [{full}], 0;",
        "@!is_full bra WAIT;",
    ]


@gluon.jit
def _run(PTX: gl.constexpr, OPERANDS: gl.constexpr, IS_PURE: gl.constexpr):
    """What each thread has in $0 after it."""
    return gl.inline_asm_elementwise(
        PTX, OPERANDS, [gl.program_id(0)], dtype=gl.int32, is_pure=IS_PURE, pack=1
    )


@gluon.jit
def rank_in_cluster():
    """This program's, from 0."""
    return _run("mov.u32 $0, %cluster_ctarank;", "=r,r", True)


@gluon.jit
def make_room(NUM_BYTES: gl.constexpr):
    """The address of room for as many bytes, all of which are sent; the THREADS arrive."""
    return _run(_room(NUM_BYTES), "=&r,r", False)


@gluon.jit
def arrive():
    """What another warp owes the cluster's barrier, and `leave` before it ends."""
    _run("barrier.cluster.arrive.relaxed; mov.u32 $0, $1;", "=r,r", False)


@gluon.jit
def leave():
    _run("barrier.cluster.wait.acquire; mov.u32 $0, $1;", "=r,r", False)


@gluon.jit
def make_up():
    """Of a warp that is there to make up the four that Triton starts."""
    arrive()
    leave()
