"""Linear of 64 rows on sm_90 in 16 bits: the two programs of a cluster share what a tile sums.

Unit: a tile of the result, which both programs of one cluster make. Each has every second tile of
K, of x and of a row-major weight, by two rings of shared memory that two warps of its own feed, as
`linear_specialised` does: so twice as many programs are at work as there are tiles, and together
they read no more of x than one for each tile would. Then each stores one half of the columns, after
the other's sums of them were added (`linear_cluster_sums`). Beyond the edges TMA gives zeros, of a
tile that lies wholly beyond K, too, which only the second program can have.

The warps that feed take part in the cluster's barrier, and so do those that make up the four that
Triton starts. A cluster waits for no other, so that any number may run at a time.

In Gluon, as `linear_specialised`.
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

from syncline.model_ops_rocm.triton.kernels.linear_cluster_sums import (
    NUM_BARRIERS,
    PROGRAMS,
    THREADS,
    arrive,
    barrier_layout,
    leave,
    make_room,
    make_up,
    rank_in_cluster,
    receive_sums,
    send_sums,
    store_pairs,
    sums_layout,
)


@gluon.jit
def _ask(desc, row, index, rank, ring, place, NUM_BYTES: gl.constexpr):
    """The tile `index` of those along K that this program has, of the rows from `row` on."""
    places, full, _free = ring
    k = (index * PROGRAMS + rank) * desc.block_type.shape[1]
    mbarrier.expect(full.index(place), NUM_BYTES)
    tma.async_copy_global_to_shared(desc, [row, k], full.index(place), places.index(place))


@gluon.jit
def _feed_weight(
    desc,
    ring,
    first_n,
    rank,
    count,
    NUM_BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    RELEASE: gl.constexpr,
):
    """Asks for the `count` tiles of K but the first AHEAD, each when its place is free."""
    arrive()
    _places, full, free = ring
    for index in gl.static_range(AHEAD, STAGES):
        mbarrier.wait(full.index(index - AHEAD), 0)
        _ask(desc, first_n, index, rank, ring, index, NUM_BYTES)
    release_at = gl.maximum(count - RELEASE, STAGES)
    for index in range(STAGES, count):
        if index == release_at:
            gdc_launch_dependents()
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(desc, first_n, index, rank, ring, place, NUM_BYTES)
    if release_at >= count:
        gdc_launch_dependents()
    leave()


@gluon.jit
def _feed_x(desc, ring, rank, count, NUM_BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Asks for the `count` tiles of K once the kernel ahead has ended."""
    arrive()
    _places, _full, free = ring
    gdc_wait()
    for index in gl.static_range(STAGES):
        _ask(desc, 0, index, rank, ring, index, NUM_BYTES)
    for index in range(STAGES, count):
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(desc, 0, index, rank, ring, place, NUM_BYTES)
    leave()


@gluon.jit
def _multiply(
    x_ring,
    weight_ring,
    bias_ptr,
    out_ptr,
    bias_stride,
    out_stride,
    first_n,
    rank,
    room,
    num_columns,
    count,
    layout: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The sums of this program's tiles, with the other's of its columns added, into the result."""
    x, x_full, x_free = x_ring
    weight, weight_full, weight_free = weight_ring
    SHARE: gl.constexpr = BLOCK_N // PROGRAMS
    NUM_SUMS: gl.constexpr = BLOCK_M * BLOCK_N // THREADS
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    n = first_n + rank * SHARE + column
    n_inside = (column < SHARE) & (n < num_columns)
    gdc_wait()
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n.to(gl.int64) * bias_stride, mask=n_inside, other=0.0)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for index in range(count):
        place, x_place = index % STAGES, index % X_STAGES
        mbarrier.wait(weight_full.index(place), (index // STAGES) & 1)
        mbarrier.wait(x_full.index(x_place), (index // X_STAGES) & 1)
        b = weight.index(place).permute([1, 0])
        acc = warpgroup_mma(x.index(x_place), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(weight_free.index(place), count=1)
        mbarrier.arrive(x_free.index(x_place), count=1)
    acc = receive_sums(send_sums(acc, room, NUM_SUMS), room, NUM_SUMS)
    if HAS_BIAS:
        acc += gl.expand_dims(bias.to(gl.float32), 0)
    at = gl.expand_dims(m.to(gl.int64) * out_stride, 1) + gl.expand_dims(n, 0)
    inside = gl.expand_dims(n_inside, 0)
    store_pairs(out_ptr + at, acc.to(out_ptr.dtype.element_ty), inside)


@gluon.jit
def cluster_linear_kernel(
    x_desc,  # [BLOCK_M, K], tiles of [BLOCK_M, BLOCK_K]
    weight_desc,  # [N, K], likewise of BLOCK_N
    bias_ptr,
    out_ptr,  # [BLOCK_M, N], rows that lie close, at multiples of 4 bytes
    num_columns,  # even
    depth,  # at least 2 * BLOCK_K times either number of stages
    out_stride,
    bias_stride,
    HAS_BIAS: gl.constexpr,
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
    NUM_BYTES: gl.constexpr = BLOCK_K * dtype.primitive_bitwidth // 8
    weight_places = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    x_places = gl.allocate_shared_memory(dtype, [X_STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    barriers: gl.constexpr = barrier_layout()
    weight_full = gl.allocate_shared_memory(gl.int64, [STAGES, NUM_BARRIERS], barriers)
    weight_free = gl.allocate_shared_memory(gl.int64, [STAGES, NUM_BARRIERS], barriers)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, NUM_BARRIERS], barriers)
    x_free = gl.allocate_shared_memory(gl.int64, [X_STAGES, NUM_BARRIERS], barriers)
    weight_ring = (weight_places, weight_full, weight_free)
    x_ring = (x_places, x_full, x_free)
    rank = rank_in_cluster()
    first_n = gl.program_id(0) * BLOCK_N
    count = gl.cdiv(depth, BLOCK_K * PROGRAMS)
    # Ask first: each barrier more, and the start of the other warps, would be a delay.
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_full.index(index), count=1)
    fence_async_shared()
    for index in gl.static_range(AHEAD):
        _ask(weight_desc, first_n, index, rank, weight_ring, index, BLOCK_N * NUM_BYTES)
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_free.index(index), count=1)
    for index in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(index), count=1)
        mbarrier.init(x_free.index(index), count=1)
    fence_async_shared()
    room = make_room(BLOCK_M * BLOCK_N // THREADS)
    layout: gl.constexpr = sums_layout(num_warps, BLOCK_N)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_ring,
                    weight_ring,
                    bias_ptr,
                    out_ptr,
                    bias_stride,
                    out_stride,
                    first_n,
                    rank,
                    room,
                    num_columns,
                    count,
                    layout,
                    HAS_BIAS,
                    BLOCK_M,
                    BLOCK_N,
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
                    rank,
                    count,
                    BLOCK_N * NUM_BYTES,
                    STAGES,
                    AHEAD,
                    RELEASE,
                ),
            ),
            (_feed_x, (x_desc, x_ring, rank, count, BLOCK_M * NUM_BYTES, X_STAGES)),
            (make_up, ()),
            (make_up, ()),
        ],
        [1, 1, 1, 1],
        [40, 40, 40, 40],
    )
