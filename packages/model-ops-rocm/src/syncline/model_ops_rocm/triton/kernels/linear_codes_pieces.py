"""What surrounds the products of `linear_codes_specialised`: scales, and storing the result.

Unit: a piece of the result, [PIECE_M, BLOCK_N], in the layout of four warps' matrix instruction.
All of a piece's rows are there; its columns may reach beyond the last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from syncline.model_ops_rocm.triton.kernels.linear_quantised import K_BLOCK

PIECE_M = gl.constexpr(64)  # rows of a matrix instruction of four warps


@gluon.jit
def _row_scales(ptr, m, stride, layout: gl.constexpr):
    """[PIECE_M] scales of the rows from m."""
    rows = m + gl.arange(0, PIECE_M, gl.SliceLayout(1, layout))
    return gl.load(ptr + rows.to(gl.int64) * stride)


@gluon.jit
def stage_scales(
    scales, stage, m, n, num_blocks, BLOCKS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """For each of a stage's BLOCKS of K, a vector of x's scales and the piece's one of the weight.

    Of blocks beyond the last, whose products are zeros, those of the last.
    """
    x_ptr, x_row, weight_ptr, weight_row = scales
    of_x: gl.tuple = ()
    of_weight: gl.tuple = ()
    for block in gl.static_range(BLOCKS):
        at = gl.minimum(stage * BLOCKS + block, num_blocks - 1)
        of_x += (_row_scales(x_ptr + at, m, x_row, layout),)
        of_weight += (gl.load(weight_ptr + (n // K_BLOCK).to(gl.int64) * weight_row + at),)
    return of_x, of_weight


@gluon.jit
def _store(
    acc, outs, split, m, num_rows, n, num_columns, HAS_BIAS: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Stores a piece with the bias; of SPLITS, its part."""
    out_ptr, parts_ptr, bias_ptr, out_stride, out_last, bias_stride = outs
    if HAS_BIAS:
        columns = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        at = bias_ptr + columns.to(gl.int64) * bias_stride
        bias = gl.load(at, mask=columns < num_columns, other=0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 0)
    if SPLITS > 1:
        target = parts_ptr + split.to(gl.int64) * num_rows * num_columns
        stride, last = num_columns, 1
        tile = acc
    else:
        target, stride, last = out_ptr, out_stride, out_last
        tile = acc.to(out_ptr.dtype.element_ty)
    # A thread of the sums' layout has two neighbours of a row, four threads 32 bytes of float32;
    # of 16-bit numbers the other has 16 bytes a thread.
    ACROSS: gl.constexpr = BLOCK_N // 8
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    stored: gl.constexpr = wide if tile.dtype.primitive_bitwidth == 16 else layout
    tile = gl.convert_layout(tile, stored)
    rows = m + gl.arange(0, PIECE_M, gl.SliceLayout(1, stored))
    columns = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    at = gl.expand_dims(rows.to(gl.int64) * stride, 1)
    at = at + gl.expand_dims(columns.to(gl.int64) * last, 0)
    gl.store(target + at, tile, mask=gl.expand_dims(columns < num_columns, 0))


@gluon.jit
def finish(
    sums, scales, outs, split, m, num_rows, n, num_columns, HAS_BIAS: gl.constexpr,
    SCALES_OF_BLOCKS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Stores COLUMNS pieces side by side, scaled by rows of x and of the weight or already."""
    x_ptr, x_row, weight_ptr, weight_row = scales
    of_weight: gl.tuple = ()
    if not SCALES_OF_BLOCKS:  # all are asked for before the first is used
        of_x = _row_scales(x_ptr, m, x_row, layout)
        for column in gl.static_range(COLUMNS):
            columns = n + column * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
            at = weight_ptr + columns.to(gl.int64) * weight_row
            of_weight += (gl.load(at, columns < num_columns, 0.0),)
    for column in gl.static_range(COLUMNS):
        acc = sums[column]
        if not SCALES_OF_BLOCKS:
            acc = acc * gl.expand_dims(of_x, 1) * gl.expand_dims(of_weight[column], 0)
        _store(
            acc, outs, split, m, num_rows, n + column * BLOCK_N, num_columns,
            HAS_BIAS, SPLITS, BLOCK_N, layout,
        )  # fmt: skip
