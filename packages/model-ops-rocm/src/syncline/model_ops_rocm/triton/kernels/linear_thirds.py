"""Linear of up to 32 rows on sm_90 in 16 bits: the two programs of a cluster make three tiles.

Unit: three tiles of the result, of a cluster. Each program has one of its own and of the third
every second tile of K, so that 96 tiles keep 64 programs busy alike: one on each of as many
multiprocessors, while the others are the next kernel's, as in `linear_specialised`. The third comes
first: what each has summed of it is on its way to the other (`linear_cluster_sums`) while the own
tile is multiplied, and then each adds up and stores half of its rows of x. The weight is the left
operand, so that a few rows of x are the narrow side of an instruction.

The rings (`linear_rings`) go on from one tile to the next. A tile that lies wholly beyond K or the
weight is zeros.

In Gluon, as `linear_rings`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from syncline.model_ops_rocm.triton.kernels.cluster import THREADS, rank_in_cluster, sums_layout
from syncline.model_ops_rocm.triton.kernels.early import kept
from syncline.model_ops_rocm.triton.kernels.linear_cluster_sums import (
    PROGRAMS,
    make_room_for_sums,
    receive_sums,
    send_sums,
    store_each,
)
from syncline.model_ops_rocm.triton.kernels.linear_rings import add_products, make_rings, share_out


@gluon.jit
def _tile(rows, index):
    """(first row, tile along K) of what is fed as number `index`: the third tile's first.

    `rows` are the first of the third tile and of the own one, how many numbers the third has, and
    the program's rank.
    """
    third, own, num_third, rank = rows
    is_third = index < num_third
    row = gl.where(is_third, third, own)
    return row, gl.where(is_third, index * PROGRAMS + rank, index - num_third)


@gluon.jit
def _places(out_ptr, strides, n, m, n_inside, m_inside):
    """Where sums [columns of the result, its rows] go."""
    _bias_stride, out_stride, out_last = strides
    at = gl.expand_dims(n * out_last, 1) + gl.expand_dims(m.to(gl.int64) * out_stride, 0)
    return kept(out_ptr, at, gl.expand_dims(n_inside, 1) & gl.expand_dims(m_inside, 0))


@gluon.jit
def _store(acc, places, pointers, strides, n, n_inside, HAS_BIAS: gl.constexpr):
    """Sums [columns of the result, its rows], with the bias."""
    bias_ptr, out_ptr = pointers
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n * strides[0], mask=n_inside, other=0.0)
        acc += gl.expand_dims(bias.to(gl.float32), 1)
    store_each(places, acc.to(out_ptr.dtype.element_ty))


@gluon.jit
def _multiply(
    x_ring,
    weight_ring,
    count,
    pointers,
    strides,
    rows,
    room,
    num_rows,
    num_columns,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """The own tile, and of the third one half of the rows, into the result."""
    third, own, num_third, rank = rows
    NUM_SUMS: gl.constexpr = BLOCK_M * BLOCK_N // THREADS
    SHARE: gl.constexpr = BLOCK_M // PROGRAMS
    layout: gl.constexpr = sums_layout(gl.num_warps(), BLOCK_M, PROGRAMS)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)).to(gl.int64)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    gdc_wait()
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    shared = add_products(zero, x_ring, weight_ring, 0, num_third, SWAP=True)
    shared = send_sums(shared, room, NUM_SUMS)
    n, of_third, half = own + column, third + column, rank * SHARE + m
    n_inside, is_of_third = n < num_columns, of_third < num_columns
    m_inside = (m < SHARE) & (half < num_rows)
    places = _places(pointers[1], strides, n, m, n_inside, m < num_rows)
    shared_places = _places(pointers[1], strides, of_third, half, is_of_third, m_inside)
    acc = add_products(zero, x_ring, weight_ring, num_third, count, SWAP=True)
    _store(acc, places, pointers, strides, n, n_inside, HAS_BIAS)
    shared = receive_sums(shared, room, NUM_SUMS)
    _store(shared, shared_places, pointers, strides, of_third, is_of_third, HAS_BIAS)


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
):
    """Program: of a cluster, three tiles."""
    rank, first = rank_in_cluster(), gl.program_id(0) * 3
    num_own = gl.cdiv(depth, BLOCK_K)
    num_third = gl.cdiv(num_own, PROGRAMS)
    rows = ((first + PROGRAMS) * BLOCK_N, (first + rank) * BLOCK_N, num_third, rank)
    x_ring, weight_ring = make_rings(
        x_desc, weight_desc, rows, _tile, BLOCK_K, X_STAGES, STAGES, AHEAD
    )
    room = make_room_for_sums(BLOCK_M * BLOCK_N // THREADS)
    count = num_third + num_own
    pointers, strides = (bias_ptr, out_ptr), (bias_stride, out_stride, out_last)
    share_out(
        _multiply,
        (pointers, strides, rows, room, num_rows, num_columns, HAS_BIAS, BLOCK_M, BLOCK_N),
        x_ring, weight_ring, count, "thirds_linear_kernel", _tile, AHEAD, RELEASE,
    )  # fmt: skip
