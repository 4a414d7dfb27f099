"""Tiles of a matrix product: which tile a program has, and how it reads stored weights.

Unit: one tile. Knows orders of storage and narrow types, no op. Source: `layouts.shuffle` for the
16x16 order, `quant.minifloat` for the types; grouped order as in Triton's own tutorial on products.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def grouped_tile(program, num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M: tl.constexpr):
    """(row tile, column tile): GROUP_M row tiles share a column tile before the next one's turn."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    if GROUP_M == 1:
        return program % tiles_m, program // tiles_m
    in_group = GROUP_M * tiles_n
    first = program // in_group * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    return first + program % in_group % size, program % in_group // size


@triton.jit
def load_rows(
    ptr, first_row, num_rows, first_column, num_columns, row_stride, last_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_ROWS, BLOCK_COLUMNS] of a strided matrix; zeros beyond its edges."""
    rows, columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    corner = ptr + first_row.to(tl.int64) * row_stride + first_column.to(tl.int64) * last_stride
    at = corner + (rows[:, None] * row_stride + columns[None, :] * last_stride)
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(at)
    inside = (rows < num_rows - first_row)[:, None]
    if not EVEN_COLUMNS:
        inside = inside & (columns < num_columns - first_column)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_shuffled(
    ptr, first_row, num_rows, first_column, num_columns,  # as stored, with padding
    CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same of a 16x16-shuffled matrix: runs of 16 rows x CHUNK columns, in row-major order."""
    groups, run = tl.arange(0, BLOCK_ROWS // 16), tl.arange(0, BLOCK_COLUMNS * 16)
    corner = ptr + first_row.to(tl.int64) * num_columns + first_column.to(tl.int64) * 16
    at = corner + (groups[:, None] * (num_columns * 16) + run[None, :])
    if EVEN_ROWS and EVEN_COLUMNS:
        stored = tl.load(at)
    else:
        inside = (groups * 16 < num_rows - first_row)[:, None]
        inside = inside & (run < (num_columns - first_column) * 16)[None, :]
        stored = tl.load(at, mask=inside, other=0.0)
    split = stored.reshape(BLOCK_ROWS // 16, BLOCK_COLUMNS // CHUNK, 16, CHUNK)
    return split.permute(0, 2, 1, 3).reshape(BLOCK_ROWS, BLOCK_COLUMNS)


@triton.jit
def load_weight(
    ptr, first_row, num_rows, first_column, num_columns, row_stride, last_stride,
    CHUNK: tl.constexpr,  # of a 16x16-shuffled matrix; 0: strided
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_ROWS, BLOCK_COLUMNS] of a stored weight; zeros beyond its edges."""
    if CHUNK:
        return load_shuffled(
            *(ptr, first_row, num_rows, first_column, num_columns),
            *(CHUNK, BLOCK_ROWS, BLOCK_COLUMNS, EVEN_ROWS, EVEN_COLUMNS),
        )
    return load_rows(
        *(ptr, first_row, num_rows, first_column, num_columns, row_stride, last_stride),
        *(BLOCK_ROWS, BLOCK_COLUMNS, EVEN_ROWS, EVEN_COLUMNS),
    )


@triton.jit
def load_head(
    ptr, first_row, first_column, row_stride, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """[BLOCK_ROWS, BLOCK_COLUMNS] inside a row-major weight, read once: no cache need keep it.

    Before a wait it reads what kernels before the last have written: none of them that writes a
    weight may let the next begin early.
    """
    rows, columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    corner = ptr + first_row.to(tl.int64) * row_stride + first_column
    at = corner + (rows[:, None] * row_stride + columns[None, :])
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def await_kernel_before(
    ptr, first_row, first_column, last_column, num_columns, row_stride,
    CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """CUDA: ask L2 for the first PREFETCH columns of a weight's tile, then wait.

    What is asked for arrives while the kernel before this one ends. L2 is where all memory is one,
    so that a weight which that kernel still writes is read as it will be. Rows must be whole tiles;
    of a row-major weight PREFETCH is a power of two, and lines of 128 bytes.
    """
    if PREFETCH > 0 and CHUNK:
        columns = tl.maximum(tl.minimum(last_column - first_column, PREFETCH), 0)
        rows = tl.arange(0, BLOCK_ROWS // 16)
        at = ptr + first_row.to(tl.int64) * num_columns + first_column * 16
        at += rows * num_columns * 16
        num_bytes = columns * 16 * (ptr.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [at.to(tl.uint64, bitcast=True), num_bytes + tl.zeros_like(rows)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif PREFETCH > 0:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        lines = tl.arange(0, PREFETCH // LINE) * LINE
        lines = tl.minimum(lines, tl.maximum(last_column - first_column - 1, 0))
        corner = ptr + first_row.to(tl.int64) * row_stride + first_column
        at = corner + (tl.arange(0, BLOCK_ROWS)[:, None] * row_stride + lines[None, :])
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at.to(tl.uint64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    gdc_wait()


@triton.jit
def release_kernel_after(block, last_block):
    """CUDA: when every program is at `last_block`, the kernel after this one may be launched."""
    tl.inline_asm_elementwise(
        "{ .reg .pred at; setp.eq.s32 at, $1, $2; @at griddepcontrol.launch_dependents;"
        " mov.u32 $0, 0; }",
        "=r,r,r",
        [block, last_block],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def e4m3_to_float(raw, FNUZ: tl.constexpr):
    """Bytes of e4m3fn, or of e4m3fnuz, as float32, exactly, by integer operations."""
    # The same digits as a float16: exponents of another bias, subnormals at the same place.
    digits = ((raw & 0x80).to(tl.uint16) << 8) | ((raw & 0x7F).to(tl.uint16) << 7)
    value = digits.to(tl.float16, bitcast=True).to(tl.float32)
    if FNUZ:
        return tl.where(raw == 0x80, float("nan"), value * 128.0)
    return tl.where((raw & 0x7F) == 0x7F, float("nan"), value * 256.0)


@triton.jit
def e2m1_to_float(packed):
    """[R, C] bytes of two e2m1 codes, the even one low, as float32 [R, 2 C], exactly."""
    codes = tl.join(packed & 0xF, packed >> 4).reshape(packed.shape[0], packed.shape[1] * 2)
    digits = ((codes & 0x8).to(tl.uint16) << 12) | ((codes & 0x7).to(tl.uint16) << 9)
    return digits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def as_scale(stored, E8M0: tl.constexpr):
    """What a stored scale, float32 or the byte of e8m0, multiplies by, in float32."""
    if not E8M0:
        return stored
    byte = stored.to(tl.int32)
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)
