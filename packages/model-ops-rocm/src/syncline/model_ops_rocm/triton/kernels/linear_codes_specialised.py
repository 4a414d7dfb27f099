"""Linear of fp8 codes by fp8 codes on sm_90: one warp feeds, two groups of four multiply.

Unit: a tile of the result, of COLUMNS pieces of 64 x BLOCK_N for each group; a program takes one
tile after another, and the feeding warp runs ahead into the next. Tiles of x and of a row-major
weight come into a ring of stages, of BLOCK_K of K, by the tensor memory accelerator (TMA); barriers
in shared memory say which are full and which are free. The weight's first tiles, which depend on no
kernel ahead, are asked for before those have ended. Beyond the edges TMA gives zeros.

The tensor core sums 128 products of a piece into registers of their own, which are then added to
the float32 sums: it keeps fewer digits. While one group adds, the other multiplies, and a group
adds one product while its next one of the stage is under way. Scales of rows multiply the sums at
the end, those of 128 of K their part of the sum.

In Gluon, Triton's language of layouts and barriers, which no interpreter runs. Source of the
division of labour: the warp-specialised main loops of CUTLASS 3 and of DeepGEMM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from syncline.model_ops_rocm.triton.kernels.linear_codes_pieces import (
    PIECE_M,
    finish,
    stage_scales,
)
from syncline.model_ops_rocm.triton.kernels.linear_quantised import K_BLOCK

GROUPS = gl.constexpr(2)  # of four warps that multiply
# Of each thread; the feeding warp's, which counts as four, and the others' are all there are.
WORKER_REGISTERS = gl.constexpr(232)
FEED_REGISTERS = gl.constexpr(40)


@gluon.jit
def _place(item, tiles_m, tiles_n, SPLITS: gl.constexpr, GROUP_M: gl.constexpr):
    """(row tile, column tile, split) of an item; GROUP_M row tiles share a column tile in turn."""
    tile, split = item // SPLITS, item % SPLITS
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    size = gl.minimum(tiles_m - first, GROUP_M)
    return first + tile % in_group % size, tile % in_group // size, split


@gluon.jit
def _first_row(tile_m, GROUP: gl.constexpr, num_rows):
    """Of a group's piece, which has no rows beyond the last: some are then computed twice.

    They are stored twice with the same bits. TMA takes longer over rows beyond an edge than to read
    as many.
    """
    return gl.minimum((tile_m * GROUPS + GROUP) * PIECE_M, num_rows - PIECE_M)


@gluon.jit
def _ask_x(desc, stages, bar, stage, tile_m, num_rows, k, BLOCKS: gl.constexpr):
    """Asks for x's part of a stage: of each block of K, the rows of each group."""
    for block in gl.static_range(BLOCKS):
        for group in gl.static_range(GROUPS):
            place = stages.index((stage * BLOCKS + block) * GROUPS + group)
            at = [_first_row(tile_m, group, num_rows), k + block * K_BLOCK]
            tma.async_copy_global_to_shared(desc, at, bar, place)


@gluon.jit
def _ask_weight(
    desc, stages, bar, stage, tile_n, k, BLOCKS: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """Asks for the weight's: of each block of K, the rows of each piece."""
    BLOCK_N: gl.constexpr = desc.block_type.shape[0]
    for block in gl.static_range(BLOCKS):
        for column in gl.static_range(COLUMNS):
            place = stages.index((stage * BLOCKS + block) * COLUMNS + column)
            at = [(tile_n * COLUMNS + column) * BLOCK_N, k + block * K_BLOCK]
            tma.async_copy_global_to_shared(desc, at, bar, place)


@gluon.jit
def _feed(
    x_desc,
    weight_desc,
    ring,
    sizes,
    num_rows,
    COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Asks for all stages of all items of this program, each when its stage is free."""
    x_stages, weight_stages, full, free = ring
    num_items, tiles_m, tiles_n, num_stages = sizes
    BLOCKS: gl.constexpr = BLOCK_K // K_BLOCK
    NUM_BYTES: gl.constexpr = (GROUPS * PIECE_M + COLUMNS * BLOCK_N) * BLOCK_K
    first, step = gl.program_id(0), gl.num_programs(0)
    count = gl.cdiv(num_items - first, step) * num_stages
    # Those of the first item alone, which has at least so many.
    tile_m, tile_n, split = _place(first, tiles_m, tiles_n, SPLITS, GROUP_M)
    for index in gl.static_range(STAGES):
        k, bar = (split * num_stages + index) * BLOCK_K, full.index(index)
        mbarrier.expect(bar, NUM_BYTES)
        _ask_weight(weight_desc, weight_stages, bar, index, tile_n, k, BLOCKS, COLUMNS)
    gdc_wait()
    for index in gl.static_range(STAGES):
        k, bar = (split * num_stages + index) * BLOCK_K, full.index(index)
        _ask_x(x_desc, x_stages, bar, index, tile_m, num_rows, k, BLOCKS)
    for index in range(STAGES, count):
        stage = index % STAGES
        item = first + index // num_stages * step
        tile_m, tile_n, split = _place(item, tiles_m, tiles_n, SPLITS, GROUP_M)
        k = (split * num_stages + index % num_stages) * BLOCK_K
        mbarrier.wait(free.index(stage), (index // STAGES - 1) & 1)
        bar = full.index(stage)
        mbarrier.expect(bar, NUM_BYTES)
        _ask_weight(weight_desc, weight_stages, bar, stage, tile_n, k, BLOCKS, COLUMNS)
        _ask_x(x_desc, x_stages, bar, stage, tile_m, num_rows, k, BLOCKS)


@gluon.jit
def _start(
    ring, stage, GROUP: gl.constexpr, INDEX: gl.constexpr, BLOCKS: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The product of a stage's block INDEX // COLUMNS and piece INDEX % COLUMNS, under way."""
    x_stages, weight_stages, _, _ = ring
    at = stage * BLOCKS + INDEX // COLUMNS
    x = x_stages.index(at * GROUPS + GROUP)
    weight = weight_stages.index(at * COLUMNS + INDEX % COLUMNS)
    none = gl.zeros([PIECE_M, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(x, weight.permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def _added(
    sums, part, of_x, of_weight, INDEX: gl.constexpr, COLUMNS: gl.constexpr,
    SCALES_OF_BLOCKS: gl.constexpr,
):  # fmt: skip
    """The sums of all pieces with the product INDEX."""
    if SCALES_OF_BLOCKS:
        part = part * gl.expand_dims(of_x[INDEX] * of_weight[INDEX], 1)
    after: gl.tuple = ()
    for piece in gl.static_range(COLUMNS):
        if piece == INDEX % COLUMNS:
            after += (sums[piece] + part,)
        else:
            after += (sums[piece],)
    return after


@gluon.jit
def _add_stage(
    sums, ring, stage, of_x, of_weight, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr, SCALES_OF_BLOCKS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The sums of the group's pieces with a stage, which is free afterwards."""
    _, _, _, free = ring
    LAST: gl.constexpr = BLOCKS * COLUMNS - 1
    part = _start(ring, stage, GROUP, 0, BLOCKS, COLUMNS, BLOCK_N, layout)
    for index in gl.static_range(LAST):
        following = _start(ring, stage, GROUP, index + 1, BLOCKS, COLUMNS, BLOCK_N, layout)
        part = warpgroup_mma_wait(num_outstanding=1, deps=(part,))
        sums = _added(sums, part, of_x, of_weight, index, COLUMNS, SCALES_OF_BLOCKS)
        part = following
    part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
    mbarrier.arrive(free.index(stage), count=1)
    return _added(sums, part, of_x, of_weight, LAST, COLUMNS, SCALES_OF_BLOCKS)


@gluon.jit
def _multiply(
    ring,
    sizes,
    shape,
    scales,
    outs,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SCALES_OF_BLOCKS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """The pieces of one group of each item of this program."""
    _, _, full, _ = ring
    num_items, tiles_m, tiles_n, num_stages = sizes
    num_rows, num_columns, num_blocks = shape
    BLOCKS: gl.constexpr = BLOCK_K // K_BLOCK
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    gdc_launch_dependents()
    gdc_wait()
    stage, phase = 0, 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile_m, tile_n, split = _place(item, tiles_m, tiles_n, SPLITS, GROUP_M)
        m, n = _first_row(tile_m, GROUP, num_rows), tile_n * (COLUMNS * BLOCK_N)
        sums: gl.tuple = ()
        for _column in gl.static_range(COLUMNS):
            sums += (gl.zeros([PIECE_M, BLOCK_N], gl.float32, layout),)
        start = split * num_stages
        of_x, of_weight = (), ()
        if SCALES_OF_BLOCKS:
            of_x, of_weight = stage_scales(scales, start, m, n, num_blocks, BLOCKS, layout)
        for index in range(start, start + num_stages):
            if SCALES_OF_BLOCKS:  # the next stage's are under way while this one is multiplied
                next_of_x, next_of_weight = stage_scales(
                    scales, index + 1, m, n, num_blocks, BLOCKS, layout
                )
            mbarrier.wait(full.index(stage), phase)
            sums = _add_stage(
                sums, ring, stage, of_x, of_weight,
                GROUP, BLOCKS, COLUMNS, BLOCK_N, SCALES_OF_BLOCKS, layout,
            )  # fmt: skip
            if SCALES_OF_BLOCKS:
                of_x, of_weight = next_of_x, next_of_weight
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        finish(
            sums, scales, outs, split, m, num_rows, n, num_columns,
            HAS_BIAS, SCALES_OF_BLOCKS, COLUMNS, BLOCK_N, SPLITS, layout,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def specialised_codes_kernel(
    x_desc,  # [M, K], tiles of [PIECE_M, K_BLOCK]
    weight_desc,  # [N, K], tiles of [BLOCK_N, K_BLOCK]
    x_scale_ptr,  # float32, as are the weight's: [M or 1] or, of blocks, [M, blocks of K]
    weight_scale_ptr,  # [N or 1] or, of blocks, [blocks of N, blocks of K]
    bias_ptr,
    out_ptr,
    parts_ptr,  # with SPLITS > 1 float32 [SPLITS, num_rows, num_columns], added by another kernel
    num_rows,  # at least PIECE_M
    num_columns,
    depth,  # so much that each of SPLITS has at least STAGES times BLOCK_K
    x_scale_row,  # strides of scales: 0 where one serves all
    weight_scale_row,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: gl.constexpr,  # adds it: with SPLITS > 1 the other kernel does
    SCALES_OF_BLOCKS: gl.constexpr,  # of 128 of K, and of the weight's rows; then COLUMNS is 1
    COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,  # of a stage
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,  # 4
):
    gl.static_assert(COLUMNS == 1 or not SCALES_OF_BLOCKS)
    BLOCKS: gl.constexpr = BLOCK_K // K_BLOCK
    dtype: gl.constexpr = weight_desc.dtype
    x_stages = gl.allocate_shared_memory(
        dtype, [STAGES * BLOCKS * GROUPS, PIECE_M, K_BLOCK], x_desc.layout
    )
    weight_stages = gl.allocate_shared_memory(
        dtype, [STAGES * BLOCKS * COLUMNS, BLOCK_N, K_BLOCK], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(free.index(index), count=GROUPS)
    fence_async_shared()
    tiles_m = gl.cdiv(num_rows, GROUPS * PIECE_M)
    tiles_n = gl.cdiv(num_columns, COLUMNS * BLOCK_N)
    ring = (x_stages, weight_stages, full, free)
    sizes = (tiles_m * tiles_n * SPLITS, tiles_m, tiles_n, gl.cdiv(depth, BLOCK_K * SPLITS))
    shape = (num_rows, num_columns, gl.cdiv(depth, K_BLOCK))
    scales = (x_scale_ptr, x_scale_row, weight_scale_ptr, weight_scale_row)
    outs = (out_ptr, parts_ptr, bias_ptr, out_stride, out_last, bias_stride)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, sizes, shape, scales, outs, 0, HAS_BIAS, SCALES_OF_BLOCKS,
                COLUMNS, BLOCK_N, BLOCK_K, STAGES, SPLITS, GROUP_M,
            )),
            (_multiply, (
                ring, sizes, shape, scales, outs, 1, HAS_BIAS, SCALES_OF_BLOCKS,
                COLUMNS, BLOCK_N, BLOCK_K, STAGES, SPLITS, GROUP_M,
            )),
            (_feed, (
                x_desc, weight_desc, ring, sizes, num_rows,
                COLUMNS, BLOCK_N, BLOCK_K, STAGES, SPLITS, GROUP_M,
            )),
        ],
        [4, 1],
        [WORKER_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip
