"""Linear of few rows on sm_90, in 16 bits or fp8 by fp8: two warps feed, four multiply.

Unit: a tile of the result. Tiles of x and of a row-major weight come into two rings of shared
memory by the tensor memory accelerator (TMA), each asked for by a warp of its own as soon as a
place is free: barriers in shared memory say which are full and which are free. Nothing that the
others do delays a load. The weight depends on no kernel ahead, so its first tiles are asked for
before those have ended, AHEAD of them at a time: more would take the memory's rate from what the
kernel ahead still reads. For the same reason the next kernel may begin only RELEASE tiles before
the last. Beyond the edges TMA gives zeros. With SWAP the weight is the left operand, so that a few
rows of x are the narrow side of an instruction.

Sums of fp8 products are promoted to float32 every 128 of K, as a tensor core keeps fewer digits of
them; the four sums of a tile are multiplied side by side, so that none waits for another.

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

from syncline.model_ops_rocm.triton.kernels.linear_quantised import K_BLOCK


@gluon.jit
def _ask(desc, row, index, ring, place, NUM_BYTES: gl.constexpr, PARTS: gl.constexpr):
    """Tile `index` along K of the rows from `row` on, in PARTS beside one another."""
    places, full, _free = ring
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    mbarrier.expect(full.index(place), NUM_BYTES)
    for part in gl.static_range(PARTS):
        k = (index * PARTS + part) * WIDTH
        tma.async_copy_global_to_shared(
            desc, [row, k], full.index(place), places.index(place * PARTS + part)
        )


@gluon.jit
def _feed_weight(
    desc,
    ring,
    first_n,
    count,
    NUM_BYTES: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    RELEASE: gl.constexpr,
):
    """Asks for the `count` tiles of K but the first AHEAD, each when its place is free."""
    _places, full, free = ring
    for index in gl.static_range(AHEAD, STAGES):
        mbarrier.wait(full.index(index - AHEAD), 0)
        _ask(desc, first_n, index, ring, index, NUM_BYTES, PARTS)
    release_at = gl.maximum(count - RELEASE, STAGES)
    for index in range(STAGES, count):
        if index == release_at:
            gdc_launch_dependents()
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(desc, first_n, index, ring, place, NUM_BYTES, PARTS)
    if release_at >= count:
        gdc_launch_dependents()


@gluon.jit
def _feed_x(desc, ring, count, NUM_BYTES: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Asks for the `count` tiles of K once the kernel ahead has ended."""
    _places, _full, free = ring
    gdc_wait()
    for index in gl.static_range(STAGES):
        _ask(desc, 0, index, ring, index, NUM_BYTES, PARTS)
    for index in range(STAGES, count):
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(desc, 0, index, ring, place, NUM_BYTES, PARTS)


@gluon.jit
def _multiply_codes(left, right, left_place, right_place, acc):
    """acc plus a tile's four parts of K_BLOCK, each promoted, in their order."""
    zero = gl.zeros_like(acc)
    a, b = left_place * 4, right_place * 4
    sum_0 = warpgroup_mma(
        left.index(a), right.index(b).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    sum_1 = warpgroup_mma(
        left.index(a + 1), right.index(b + 1).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    sum_2 = warpgroup_mma(
        left.index(a + 2), right.index(b + 2).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    sum_3 = warpgroup_mma(
        left.index(a + 3), right.index(b + 3).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sum_0, sum_1, sum_2, sum_3))
    return acc + sums[0] + sums[1] + sums[2] + sums[3]


@gluon.jit
def _along(ptr, places, stride, mask, AXIS: gl.constexpr):
    """float32 numbers at `places`, of which the tile's other axis, AXIS, shares each."""
    found = gl.load(ptr + places * stride, mask=mask, other=0.0).to(gl.float32)
    return gl.expand_dims(found, AXIS)


@gluon.jit
def _multiply(
    x_ring,
    weight_ring,
    pointers,
    strides,
    first_n,
    num_rows,
    num_columns,
    count,
    layout: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SWAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The sums of all tiles, scaled, with the bias, into the result."""
    x, x_full, x_free = x_ring
    weight, weight_full, weight_free = weight_ring
    x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr = pointers
    x_scale_row, weight_scale_row, bias_stride, out_stride, out_last = strides
    M_AXIS: gl.constexpr = 1 if SWAP else 0
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1 - M_AXIS, layout)).to(gl.int64)
    n = first_n.to(gl.int64) + gl.arange(0, BLOCK_N, gl.SliceLayout(M_AXIS, layout))
    m_inside, n_inside = m < num_rows, n < num_columns
    gdc_wait()
    # What few threads wait for is asked before the loop: after it, everything would wait.
    if PARTS == 4:
        x_scale = _along(x_scale_ptr, m, x_scale_row, m_inside, 1 - M_AXIS)
        weight_scale = _along(weight_scale_ptr, n, weight_scale_row, n_inside, M_AXIS)
    if HAS_BIAS:
        bias = _along(bias_ptr, n, bias_stride, n_inside, M_AXIS)
    SHAPE: gl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    acc = gl.zeros(SHAPE, gl.float32, layout)
    for index in range(count):
        place, x_place = index % STAGES, index % X_STAGES
        mbarrier.wait(weight_full.index(place), (index // STAGES) & 1)
        mbarrier.wait(x_full.index(x_place), (index // X_STAGES) & 1)
        if SWAP:
            left, left_place, right, right_place = weight, place, x, x_place
        else:
            left, left_place, right, right_place = x, x_place, weight, place
        if PARTS == 4:
            acc = _multiply_codes(left, right, left_place, right_place, acc)
        else:
            b = right.index(right_place).permute([1, 0])
            acc = warpgroup_mma(left.index(left_place), b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(weight_free.index(place), count=1)
        mbarrier.arrive(x_free.index(x_place), count=1)
    if PARTS == 4:
        acc = acc * x_scale * weight_scale
    if HAS_BIAS:
        acc += bias
    at = gl.expand_dims(m * out_stride, 1 - M_AXIS) + gl.expand_dims(n * out_last, M_AXIS)
    inside = gl.expand_dims(m_inside, 1 - M_AXIS) & gl.expand_dims(n_inside, M_AXIS)
    gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["num_rows"])
def specialised_linear_kernel(
    x_desc,  # [M, K], parts of tiles: [BLOCK_M, BLOCK_K], or of codes [BLOCK_M, K_BLOCK]
    weight_desc,  # [N, K], likewise of BLOCK_N
    x_scale_ptr,  # float32; read of codes alone, as is the weight's
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,  # at most BLOCK_M
    num_columns,
    depth,  # at least STAGES * BLOCK_K
    x_scale_row,  # strides of scales: 0 where one serves all
    weight_scale_row,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: gl.constexpr,
    SWAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    X_STAGES: gl.constexpr,  # tiles of x under way
    STAGES: gl.constexpr,  # of the weight
    AHEAD: gl.constexpr,  # of those, before the first ones are there
    RELEASE: gl.constexpr,  # tiles before the last at which the next kernel may begin
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = weight_desc.dtype
    HAS_CODES: gl.constexpr = dtype.primitive_bitwidth == 8
    PARTS: gl.constexpr = BLOCK_K // K_BLOCK if HAS_CODES else 1
    NUM_BYTES: gl.constexpr = BLOCK_K * dtype.primitive_bitwidth // 8
    WIDTH: gl.constexpr = BLOCK_K // PARTS
    weight_places = gl.allocate_shared_memory(
        dtype, [STAGES * PARTS, BLOCK_N, WIDTH], weight_desc.layout
    )
    x_places = gl.allocate_shared_memory(dtype, [X_STAGES * PARTS, BLOCK_M, WIDTH], x_desc.layout)
    weight_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weight_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    weight_ring = (weight_places, weight_full, weight_free)
    x_ring = (x_places, x_full, x_free)
    first_n = gl.program_id(0) * BLOCK_N
    count = gl.cdiv(depth, BLOCK_K)
    # Ask first: each barrier more, and the start of the other warps, would be a delay.
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_full.index(index), count=1)
    fence_async_shared()
    for index in gl.static_range(AHEAD):
        _ask(weight_desc, first_n, index, weight_ring, index, BLOCK_N * NUM_BYTES, PARTS)
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_free.index(index), count=1)
    for index in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(index), count=1)
        mbarrier.init(x_free.index(index), count=1)
    fence_async_shared()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps, 1],
        instr_shape=[16, BLOCK_M if SWAP else BLOCK_N, 256 // dtype.primitive_bitwidth],
    )
    pointers = (x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr)
    strides = (x_scale_row, weight_scale_row, bias_stride, out_stride, out_last)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_ring,
                    weight_ring,
                    pointers,
                    strides,
                    first_n,
                    num_rows,
                    num_columns,
                    count,
                    layout,
                    HAS_BIAS,
                    SWAP,
                    BLOCK_M,
                    BLOCK_N,
                    PARTS,
                    X_STAGES,
                    STAGES,
                ),
            ),
            (
                _feed_weight,
                (
                    weight_desc,
                    weight_ring,
                    first_n,
                    count,
                    BLOCK_N * NUM_BYTES,
                    PARTS,
                    STAGES,
                    AHEAD,
                    RELEASE,
                ),
            ),
            (_feed_x, (x_desc, x_ring, count, BLOCK_M * NUM_BYTES, PARTS, X_STAGES)),
        ],
        [1, 1],
        [40, 40],
    )
