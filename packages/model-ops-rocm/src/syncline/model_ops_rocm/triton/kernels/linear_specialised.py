"""Linear of few rows in 16 bits on sm_90: one warp feeds, four multiply.

Unit: a tile of the result. Tiles of x and of a row-major weight come into stages of shared memory
by the tensor memory accelerator (TMA), which the feeding warp asks as soon as a stage is free:
barriers in shared memory say which are full and which are free. Nothing that the others do delays a
load, and the weight's first tiles, which depend on no kernel ahead, are asked for before those have
ended. Beyond the edges TMA gives zeros. With SWAP the weight is the left operand, so that a few
rows of x are the narrow side of an instruction.

In Gluon, Triton's language of layouts and barriers, which no interpreter runs. Source of the
division of labour: the warp-specialised main loops of CUTLASS 3.
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


@gluon.jit
def _feed(
    x_desc,
    weight_desc,
    ring,
    first_n,
    count,
    NUM_BYTES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Asks for the `count` tiles of K, each when its stage is free."""
    x_stages, weight_stages, full, free = ring
    for index in gl.static_range(STAGES):
        if index < count:
            k = index * BLOCK_K
            mbarrier.expect(full.index(index), NUM_BYTES)
            tma.async_copy_global_to_shared(
                weight_desc, [first_n, k], full.index(index), weight_stages.index(index)
            )
    if OVERLAP:
        gdc_wait()
    for index in gl.static_range(STAGES):
        if index < count:
            k = index * BLOCK_K
            tma.async_copy_global_to_shared(
                x_desc, [0, k], full.index(index), x_stages.index(index)
            )
    for index in range(STAGES, count):
        stage = index % STAGES
        k = index * BLOCK_K
        mbarrier.wait(free.index(stage), (index // STAGES - 1) & 1)
        mbarrier.expect(full.index(stage), NUM_BYTES)
        tma.async_copy_global_to_shared(
            weight_desc, [first_n, k], full.index(stage), weight_stages.index(stage)
        )
        tma.async_copy_global_to_shared(x_desc, [0, k], full.index(stage), x_stages.index(stage))


@gluon.jit
def _multiply(
    ring,
    count,
    layout: gl.constexpr,
    NUM_LEFT: gl.constexpr,
    NUM_RIGHT: gl.constexpr,
    SWAP: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """The sums of all tiles, float32 [NUM_LEFT, NUM_RIGHT]."""
    x_stages, weight_stages, full, free = ring
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if SWAP:
        left, right = weight_stages, x_stages
    else:
        left, right = x_stages, weight_stages
    acc = gl.zeros([NUM_LEFT, NUM_RIGHT], gl.float32, layout)
    for index in range(count):
        stage = index % STAGES
        mbarrier.wait(full.index(stage), (index // STAGES) & 1)
        a, b = left.index(stage), right.index(stage).permute([1, 0])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
    return (acc,)


@gluon.jit(do_not_specialize=["num_rows"])
def specialised_linear_kernel(
    x_desc,  # [M, K], tiles of [BLOCK_M, BLOCK_K]
    weight_desc,  # [N, K], tiles of [BLOCK_N, BLOCK_K]
    bias_ptr,
    out_ptr,
    num_rows,  # at most BLOCK_M
    num_columns,
    depth,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: gl.constexpr,
    SWAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,  # launched while the kernel before it ends
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = weight_desc.dtype
    NUM_BYTES: gl.constexpr = (BLOCK_N + BLOCK_M) * BLOCK_K * 2
    weight_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    x_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(free.index(index), count=1)
    fence_async_shared()
    first_n = gl.program_id(0) * BLOCK_N
    count = gl.cdiv(depth, BLOCK_K)
    NUM_LEFT: gl.constexpr = BLOCK_N if SWAP else BLOCK_M
    NUM_RIGHT: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps, 1],
        instr_shape=[16, NUM_RIGHT, 16],
    )
    ring = (x_stages, weight_stages, full, free)
    sums = gl.warp_specialize(
        [
            (_multiply, (ring, count, layout, NUM_LEFT, NUM_RIGHT, SWAP, STAGES, OVERLAP)),
            (
                _feed,
                (x_desc, weight_desc, ring, first_n, count, NUM_BYTES, BLOCK_K, STAGES, OVERLAP),
            ),
        ],
        [1],
        [40],
    )
    acc = sums[0]
    M_AXIS: gl.constexpr = 1 if SWAP else 0
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1 - M_AXIS, layout)).to(gl.int64)
    n = first_n.to(gl.int64) + gl.arange(0, BLOCK_N, gl.SliceLayout(M_AXIS, layout))
    m_inside, n_inside = m < num_rows, n < num_columns
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n * bias_stride, mask=n_inside, other=0.0).to(gl.float32)
        acc += gl.expand_dims(bias, M_AXIS)
    at = gl.expand_dims(m * out_stride, 1 - M_AXIS) + gl.expand_dims(n * out_last, M_AXIS)
    inside = gl.expand_dims(m_inside, 1 - M_AXIS) & gl.expand_dims(n_inside, M_AXIS)
    gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
