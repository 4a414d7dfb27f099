"""Rings of shared memory for products of few rows on sm_90: two warps feed, four multiply.

Unit: what one program multiplies, tile by tile along K. Tiles of x and of a row-major weight come
into two rings by the tensor memory accelerator (TMA), each asked for by a warp of its own as soon
as a place is free: barriers in shared memory say which are full and which are free. Nothing that
the others do delays a load. The weight depends on no kernel ahead, so its first tiles are asked for
before those have ended, AHEAD of them at a time: more would take the memory's rate from what the
kernel ahead still reads. For the same reason the next kernel may begin only RELEASE tiles before
the last. Beyond the edges TMA gives zeros.

A kernel says with TILE which tile is fed as a number, and with MULTIPLY what becomes of them. A
ring is (descriptor, places, full, free, what TILE goes by). Of 16 bits a tile has one place. Of
fp8 it has four, of 128 of K each: a tensor core keeps fewer digits of sums, so those are promoted
to float32 that often. The four are multiplied side by side, so that none waits for another.

In a cluster the warps that feed take part in its barrier, and so do those that make up the four
that Triton starts.

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

from syncline.model_ops_rocm.triton.kernels.cluster import (
    arrive,
    barrier_layout,
    leave,
    make_up,
    num_barriers,
)
from syncline.model_ops_rocm.triton.kernels.early import fetch_descriptor


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    WIDTH: gl.constexpr = num_barriers(gl.num_ctas())
    layout: gl.constexpr = barrier_layout(gl.num_ctas())
    return gl.allocate_shared_memory(gl.int64, [STAGES, WIDTH], layout)


@gluon.jit
def _places(desc, STAGES: gl.constexpr, PARTS: gl.constexpr):
    ROWS: gl.constexpr = desc.block_type.shape[0]
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    return gl.allocate_shared_memory(desc.dtype, [STAGES * PARTS, ROWS, WIDTH], desc.layout)


@gluon.jit
def _expect(ring, place):
    """The place is full when a tile's bytes have come."""
    desc, places, full, _free, _rows = ring
    PARTS: gl.constexpr = places.shape[0] // full.shape[0]
    SIZE: gl.constexpr = PARTS * places.shape[1] * places.shape[2]
    mbarrier.expect(full.index(place), SIZE * desc.dtype.primitive_bitwidth // 8)


@gluon.jit
def _request(ring, index, place, TILE: gl.constexpr, IS_X: gl.constexpr):
    """What is fed as number `index`, in parts beside one another; of x always its first rows."""
    desc, places, full, _free, rows = ring
    PARTS: gl.constexpr = places.shape[0] // full.shape[0]
    WIDTH: gl.constexpr = places.shape[2]
    row, tile = TILE(rows, index)
    if IS_X:
        row = 0
    for part in gl.static_range(PARTS):
        to, k = places.index(place * PARTS + part), (tile * PARTS + part) * WIDTH
        tma.async_copy_global_to_shared(desc, [row, k], full.index(place), to)


@gluon.jit
def _ask(ring, index, place, TILE: gl.constexpr, IS_X: gl.constexpr):
    """Expects and requests it."""
    _expect(ring, place)
    _request(ring, index, place, TILE, IS_X)


@gluon.jit
def make_rings(
    x_desc,
    weight_desc,
    rows,
    TILE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """The rings of x and of the weight, of which the first AHEAD tiles are asked for."""
    PARTS: gl.constexpr = BLOCK_K // weight_desc.block_type.shape[1]
    gl.static_assert((4 if weight_desc.dtype.primitive_bitwidth == 8 else 1) == PARTS)
    gl.static_assert(AHEAD <= STAGES)
    weight_places = _places(weight_desc, STAGES, PARTS)
    x_places = _places(x_desc, X_STAGES, PARTS)
    weight_full, weight_free = _barriers(STAGES), _barriers(STAGES)
    x_full, x_free = _barriers(X_STAGES), _barriers(X_STAGES)
    weight_ring = (weight_desc, weight_places, weight_full, weight_free, rows)
    # Ask first: each barrier more, and the start of the other warps, would be a delay.
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_full.index(index), count=1)
    fence_async_shared()
    for index in gl.static_range(AHEAD):
        _ask(weight_ring, index, index, TILE, IS_X=False)
    for index in gl.static_range(STAGES):
        mbarrier.init(weight_free.index(index), count=1)
    for index in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(index), count=1)
        mbarrier.init(x_free.index(index), count=1)
    fence_async_shared()
    return (x_desc, x_places, x_full, x_free, rows), weight_ring


@gluon.jit
def _feed_weight(ring, count, TILE: gl.constexpr, AHEAD: gl.constexpr, RELEASE: gl.constexpr):
    """Asks for all `count` but the first AHEAD, each when its place is free."""
    if gl.num_ctas() > 1:
        arrive()
    _desc, _places, full, free, _rows = ring
    STAGES: gl.constexpr = full.shape[0]
    for index in gl.static_range(AHEAD, STAGES):
        mbarrier.wait(full.index(index - AHEAD), 0)
        _ask(ring, index, index, TILE, IS_X=False)
    release_at = gl.maximum(count - RELEASE, STAGES)
    for index in range(STAGES, count):
        if index == release_at:
            gdc_launch_dependents()
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(ring, index, place, TILE, IS_X=False)
    if release_at >= count:
        gdc_launch_dependents()
    if gl.num_ctas() > 1:
        leave()


@gluon.jit
def _feed_x(ring, count, TILE: gl.constexpr, KERNEL: gl.constexpr):
    """Asks for all `count` once the kernel ahead has ended."""
    if gl.num_ctas() > 1:
        arrive()
    fetch_descriptor(KERNEL, 0)
    _desc, _places, full, free, _rows = ring
    STAGES: gl.constexpr = full.shape[0]
    for index in gl.static_range(STAGES):
        _expect(ring, index)
    gdc_wait()
    for index in gl.static_range(STAGES):
        _request(ring, index, index, TILE, IS_X=True)
    for index in range(STAGES, count):
        place = index % STAGES
        mbarrier.wait(free.index(place), (index // STAGES - 1) & 1)
        _ask(ring, index, place, TILE, IS_X=True)
    if gl.num_ctas() > 1:
        leave()


@gluon.jit
def _add_codes(left, right, left_place, right_place, acc):
    """acc plus a tile's four parts, each promoted, in their order."""
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
def add_products(acc, x_ring, weight_ring, first, last, SWAP: gl.constexpr):
    """acc plus what is fed as numbers `first` to `last`, without that, whose places are then free.

    With SWAP the weight is the left operand, so that a few rows of x are the narrow side of an
    instruction.
    """
    _, x, x_full, x_free, _ = x_ring
    _, weight, weight_full, weight_free, _ = weight_ring
    X_STAGES: gl.constexpr = x_full.shape[0]
    STAGES: gl.constexpr = weight_full.shape[0]
    for index in range(first, last):
        place, x_place = index % STAGES, index % X_STAGES
        mbarrier.wait(weight_full.index(place), (index // STAGES) & 1)
        mbarrier.wait(x_full.index(x_place), (index // X_STAGES) & 1)
        if SWAP:
            left, left_place, right, right_place = weight, place, x, x_place
        else:
            left, left_place, right, right_place = x, x_place, weight, place
        if weight.dtype.primitive_bitwidth == 8:
            acc = _add_codes(left, right, left_place, right_place, acc)
        else:
            b = right.index(right_place).permute([1, 0])
            acc = warpgroup_mma(left.index(left_place), b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(weight_free.index(place), count=1)
        mbarrier.arrive(x_free.index(x_place), count=1)
    return acc


@gluon.jit
def _run(MULTIPLY: gl.constexpr, arguments, x_ring, weight_ring, count):
    MULTIPLY(x_ring, weight_ring, count, *arguments)


@gluon.jit
def share_out(
    MULTIPLY: gl.constexpr,
    arguments,
    x_ring,
    weight_ring,
    count,
    KERNEL: gl.constexpr,  # its name; x's descriptor is its first parameter
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    RELEASE: gl.constexpr,
):
    """Four warps do MULTIPLY(x_ring, weight_ring, count, *arguments), for which two feed."""
    if gl.num_ctas() > 1:
        gl.warp_specialize(
            [
                (_run, (MULTIPLY, arguments, x_ring, weight_ring, count)),
                (_feed_weight, (weight_ring, count, TILE, AHEAD, RELEASE)),
                (_feed_x, (x_ring, count, TILE, KERNEL)),
                (make_up, ()),
                (make_up, ()),
            ],
            [1, 1, 1, 1],
            [40, 40, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_run, (MULTIPLY, arguments, x_ring, weight_ring, count)),
                (_feed_weight, (weight_ring, count, TILE, AHEAD, RELEASE)),
                (_feed_x, (x_ring, count, TILE, KERNEL)),
            ],
            [1, 1],
            [40, 40],
        )
