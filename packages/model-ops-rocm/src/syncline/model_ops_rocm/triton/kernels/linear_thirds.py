"""Linear of up to 32 rows on sm_90 in 16 bits: the two programs of a cluster make three tiles.

Unit: three tiles of the result, of a cluster. Each program has one of its own and of the third
every second tile of K, so that 96 tiles keep 64 programs busy alike: one on each of as many
multiprocessors, while the others are the next kernel's, as in `linear_specialised`. The third comes
first: what each has summed of it is on its way to the other (`linear_cluster_sums`) while the own
tile is multiplied, and then each adds up and stores half of its rows of x. The weight is the left
operand, so that a few rows of x are the narrow side of an instruction.

Two rings of shared memory, which two warps of its own feed, go on from one tile to the next. Beyond
the edges TMA gives zeros, of a tile that lies wholly beyond K or the weight, too.

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
    store_each,
    sums_layout,
)


@gluon.jit
def _ask(desc, rows, index, ring, place, NUM_BYTES: gl.constexpr):
    """What this program multiplies as number `index`: of the third tile first, then of its own.

    `rows` are the first of the third tile and of the own one, how many numbers the third has, and
    the program's rank.
    """
    places, full, _free = ring
    third, own, num_third, rank = rows
    is_third = index < num_third
    row = gl.where(is_third, third, own)
    tile = gl.where(is_third, index * PROGRAMS + rank, index - num_third)
    mbarrier.expect(full.index(place), NUM_BYTES)
    k = tile * desc.block_type.shape[1]
    tma.async_copy_global_to_shared(desc, [row, k], full.index(place), places.index(place))


@gluon.jit
def _feed_weight(
    desc,
    ring,
    rows,
    count,
    NUM_BYTES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    RELEASE: gl.constexpr,
):
    """Asks for all `count` but the first AHEAD, each when its place is free."""
    arrive()
    _places, full, free = ring
    for index in gl.static_range(AHEAD, STAGES):
        mbarrier.wait(full.index(index - AHEAD), 0)
        _ask(desc, rows, index, ring, index, NUM_BYTES)
    release_at = gl.maximum(count - RELEASE, STAGES)
    for index in range(STAGES, count):
        if index == release_at:
            gdc_launch_dependents()
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(desc, rows, index, ring, place, NUM_BYTES)
    if release_at >= count:
        gdc_launch_dependents()
    leave()


@gluon.jit
def _feed_x(desc, ring, rows, count, NUM_BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Asks for x as `_feed_weight` for the weight, once the kernel ahead has ended."""
    arrive()
    _places, _full, free = ring
    # All tiles of the weight have the same rows of x.
    rows = (0, 0, rows[2], rows[3])
    gdc_wait()
    for index in gl.static_range(STAGES):
        _ask(desc, rows, index, ring, index, NUM_BYTES)
    for index in range(STAGES, count):
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(desc, rows, index, ring, place, NUM_BYTES)
    leave()


@gluon.jit
def _products(x_ring, weight_ring, acc, first, last, X_STAGES: gl.constexpr, STAGES: gl.constexpr):
    """acc plus what is fed as numbers `first` to `last`, without that."""
    x, x_full, x_free = x_ring
    weight, weight_full, weight_free = weight_ring
    for index in range(first, last):
        place, x_place = index % STAGES, index % X_STAGES
        mbarrier.wait(weight_full.index(place), (index // STAGES) & 1)
        mbarrier.wait(x_full.index(x_place), (index // X_STAGES) & 1)
        b = x.index(x_place).permute([1, 0])
        acc = warpgroup_mma(weight.index(place), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(weight_free.index(place), count=1)
        mbarrier.arrive(x_free.index(x_place), count=1)
    return acc


@gluon.jit
def _store(acc, pointers, strides, n, m, n_inside, m_inside, HAS_BIAS: gl.constexpr):
    """Sums [columns of the result, its rows], with the bias."""
    bias_ptr, out_ptr = pointers
    bias_stride, out_stride, out_last = strides
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n * bias_stride, mask=n_inside, other=0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    at = gl.expand_dims(n * out_last, 1) + gl.expand_dims(m.to(gl.int64) * out_stride, 0)
    inside = gl.expand_dims(n_inside, 1) & gl.expand_dims(m_inside, 0)
    store_each(out_ptr + at, acc.to(out_ptr.dtype.element_ty), inside)


@gluon.jit
def _multiply(
    x_ring,
    weight_ring,
    pointers,
    strides,
    rows,
    room,
    num_rows,
    num_columns,
    count,
    layout: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The own tile, and of the third one half of the rows, into the result."""
    third, own, num_third, rank = rows
    NUM_SUMS: gl.constexpr = BLOCK_M * BLOCK_N // THREADS
    SHARE: gl.constexpr = BLOCK_M // PROGRAMS
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)).to(gl.int64)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    gdc_wait()
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    shared = _products(x_ring, weight_ring, zero, 0, num_third, X_STAGES, STAGES)
    shared = send_sums(shared, room, NUM_SUMS)
    acc = _products(x_ring, weight_ring, zero, num_third, count, X_STAGES, STAGES)
    n = own + column
    _store(acc, pointers, strides, n, m, n < num_columns, m < num_rows, HAS_BIAS)
    shared = receive_sums(shared, room, NUM_SUMS)
    n, half = third + column, rank * SHARE + m
    m_inside = (m < SHARE) & (half < num_rows)
    _store(shared, pointers, strides, n, half, n < num_columns, m_inside, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_rows"])
def thirds_linear_kernel(
    x_desc,  # [M, K], tiles of [BLOCK_M, BLOCK_K]
    weight_desc,  # [N, K], likewise of BLOCK_N
    bias_ptr,
    out_ptr,
    num_rows,  # at most BLOCK_M
    num_columns,
    depth,  # one and a half of it at least BLOCK_K times either number of stages
    out_stride,
    out_last,
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
    """Program: of a cluster, three tiles."""
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
    rank, first = rank_in_cluster(), gl.program_id(0) * 3
    num_own = gl.cdiv(depth, BLOCK_K)
    num_third = gl.cdiv(num_own, PROGRAMS)
    rows = ((first + PROGRAMS) * BLOCK_N, (first + rank) * BLOCK_N, num_third, rank)
    # Ask first: each barrier more, and the start of the other warps, would be a delay.
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_full.index(index), count=1)
    fence_async_shared()
    for index in gl.static_range(AHEAD):
        _ask(weight_desc, rows, index, weight_ring, index, BLOCK_N * NUM_BYTES)
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_free.index(index), count=1)
    for index in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(index), count=1)
        mbarrier.init(x_free.index(index), count=1)
    fence_async_shared()
    room = make_room(BLOCK_M * BLOCK_N // THREADS)
    layout: gl.constexpr = sums_layout(num_warps, BLOCK_M)
    count = num_third + num_own
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_ring,
                    weight_ring,
                    (bias_ptr, out_ptr),
                    (bias_stride, out_stride, out_last),
                    rows,
                    room,
                    num_rows,
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
                    rows,
                    count,
                    BLOCK_N * NUM_BYTES,
                    STAGES,
                    AHEAD,
                    RELEASE,
                ),
            ),
            (_feed_x, (x_desc, x_ring, rows, count, BLOCK_M * NUM_BYTES, X_STAGES)),
            (make_up, ()),
            (make_up, ()),
        ],
        [1, 1, 1, 1],
        [40, 40, 40, 40],
    )
