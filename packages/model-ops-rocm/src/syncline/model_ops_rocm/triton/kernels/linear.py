"""Linear of unquantised weights: one kernel for every layout, and the sum of split parts.

Unit: one tile of the result. With SWAP the weight is the left operand, so that a few tokens are the
narrow side of a matrix instruction. Knows no model.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from syncline.model_ops_rocm.triton.kernels.arrival import arrive, load_part
from syncline.model_ops_rocm.triton.kernels.tiles import (
    await_kernel_before,
    grouped_tile,
    load_head,
    load_rows,
    load_weight,
    release_kernel_after,
)


@triton.jit
def _places(
    first_m, num_rows, first_n, num_columns, stride, last_stride,
    SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(offsets, whether inside) of a tile of a [num_rows, num_columns], transposed with SWAP."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m_inside, n_inside = m < num_rows - first_m, n < num_columns - first_n
    corner = first_m.to(tl.int64) * stride + first_n.to(tl.int64) * last_stride
    rows = m.to(tl.int64) * stride
    if SWAP:
        at, inside = n[:, None] * last_stride + rows[None, :], n_inside[:, None] & m_inside[None, :]
    else:
        at = rows[:, None] + n[None, :] * last_stride
        inside = m_inside[:, None] & n_inside[None, :]
    return corner + at, inside


@triton.jit
def store_tile(
    acc, out_ptr, bias_ptr, first_m, num_rows, first_n, num_columns, out_stride, out_last,
    bias_stride, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the bias to float32 sums, [BLOCK_N, BLOCK_M] with SWAP, round once, store."""
    if HAS_BIAS:
        n = tl.arange(0, BLOCK_N)
        at = bias_ptr + (first_n.to(tl.int64) + n) * bias_stride
        bias = tl.load(at, mask=n < num_columns - first_n, other=0.0).to(tl.float32)
        acc += bias[:, None] if SWAP else bias[None, :]
    at, inside = _places(
        first_m, num_rows, first_n, num_columns, out_stride, out_last, SWAP, BLOCK_M, BLOCK_N
    )
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_product(
    acc, out_ptr, parts_ptr, counters_ptr, bias_ptr, first_m, num_rows, first_n, num_columns,
    out_stride, out_last, bias_stride, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr,
    MERGES: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile, or with SPLITS this program's part of it; of MERGES the last adds the parts."""
    if SPLITS == 1:
        store_tile(
            *(acc, out_ptr, bias_ptr, first_m, num_rows, first_n, num_columns),
            *(out_stride, out_last, bias_stride, HAS_BIAS, SWAP, BLOCK_M, BLOCK_N),
        )
    else:
        at, inside = _places(
            first_m, num_rows, first_n, num_columns, num_columns, 1, SWAP, BLOCK_M, BLOCK_N
        )
        step = tl.full((), num_columns, tl.int64) * num_rows
        tl.store(parts_ptr + tl.program_id(1) * step + at, acc, mask=inside)
        if MERGES:
            is_last, is_astray = arrive(counters_ptr + tl.program_id(0), SPLITS)
            if is_last | is_astray:
                total = tl.zeros_like(acc)
                for split in tl.static_range(SPLITS):
                    total += load_part(parts_ptr + split * step + at, inside)
                store_tile(
                    tl.where(is_astray, float("nan"), total),
                    *(out_ptr, bias_ptr, first_m, num_rows, first_n, num_columns),
                    *(out_stride, out_last, bias_stride, HAS_BIAS, SWAP, BLOCK_M, BLOCK_N),
                )


@triton.jit
def _multiplied(x, weight, acc, SWAP: tl.constexpr):
    """acc plus x times the weight's tile; with SWAP all are transposed."""
    if SWAP:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,  # with SPLITS > 1 float32 [SPLITS, num_rows, num_columns]
    counters_ptr,  # with MERGES int32, one for each tile
    num_rows,
    num_columns,
    depth,
    x_stride,
    x_last,
    weight_stride,
    weight_last,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,  # of a 16x16-shuffled weight; 0: row-major
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGES: tl.constexpr,  # whether the last program of a tile adds its parts
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,  # of K, with OVERLAP, where rows are whole tiles
    RELEASE: tl.constexpr,  # eighths of the blocks after which the next kernel may begin
    OVERLAP: tl.constexpr,  # CUDA: launched while the kernel before it ends
    HEAD: tl.constexpr,  # of K, whole blocks: read before the wait, and added last
):
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M
    )
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    num_blocks = tl.cdiv(depth, BLOCK_K)
    split = tl.program_id(1)
    per_split = tl.cdiv(num_blocks, SPLITS)
    start = split * per_split
    stop = tl.minimum(start + per_split, num_blocks)
    HEAD_BLOCKS: tl.constexpr = HEAD // BLOCK_K
    if OVERLAP and RELEASE < 0:
        gdc_launch_dependents()
    if HEAD:
        head = load_head(weight_ptr, first_n, start * BLOCK_K, weight_stride, BLOCK_N, HEAD)
    if OVERLAP:
        await_kernel_before(
            *(weight_ptr, first_n, (start + HEAD_BLOCKS) * BLOCK_K, stop * BLOCK_K, depth),
            *(weight_stride, CHUNK, BLOCK_N, PREFETCH),
        )
    if HEAD:
        x_head = load_rows(
            *(x_ptr, first_m, num_rows, start * BLOCK_K, depth, x_stride, x_last),
            *(BLOCK_M, HEAD, False, True),
        )
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(start + HEAD_BLOCKS, stop):
        if OVERLAP and RELEASE >= 0:
            release_kernel_after(block, start + (stop - start) * RELEASE // 8)
        k = block * BLOCK_K
        x = load_rows(
            *(x_ptr, first_m, num_rows, k, depth, x_stride, x_last),
            *(BLOCK_M, BLOCK_K, False, EVEN_K),
        )
        weight = load_weight(
            *(weight_ptr, first_n, num_columns, k, depth, weight_stride, weight_last),
            *(CHUNK, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K),
        )
        acc = _multiplied(x, weight, acc, SWAP)
    if HEAD:
        acc = _multiplied(x_head, head, acc, SWAP)
    store_product(
        *(acc, out_ptr, parts_ptr, counters_ptr, bias_ptr, first_m, num_rows),
        *(first_n, num_columns, out_stride, out_last, bias_stride),
        *(HAS_BIAS, SPLITS, MERGES, SWAP, BLOCK_M, BLOCK_N),
    )


@triton.jit(do_not_specialize=["num_rows"])
def sum_splits_kernel(
    parts_ptr,  # float32 [SPLITS, num_rows, num_columns]
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The parts of every sum in their order, whichever was finished first."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row, first_n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    inside = n < num_columns
    at = parts_ptr + row * num_columns + n
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        step = tl.full((), split, tl.int64) * num_rows * num_columns
        acc += tl.load(at + step, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n * bias_stride, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + row * out_stride + n.to(tl.int64) * out_last
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside)
