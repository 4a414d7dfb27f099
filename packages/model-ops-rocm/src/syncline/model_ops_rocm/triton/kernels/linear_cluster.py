"""Linear of 64 rows on sm_90 in 16 bits: the two programs of a cluster share what a tile sums.

Unit: a tile of the result, which both programs of one cluster make. Each has every second tile of
K, of x and of a row-major weight, by rings of its own (`linear_rings`): so twice as many programs
are at work as there are tiles, and together they read no more of x than one for each tile would.
Then each stores one half of the columns, after the other's sums of them were added
(`linear_cluster_sums`). A tile that lies wholly beyond K, which only the second program can have,
is zeros. A cluster waits for no other, so that any number may run at a time.

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
    store_pairs,
)
from syncline.model_ops_rocm.triton.kernels.linear_rings import add_products, make_rings, share_out


@gluon.jit
def _tile(rows, index):
    """(first row, tile along K) of what this program is fed as number `index`."""
    row, rank = rows
    return row, index * PROGRAMS + rank


@gluon.jit
def _multiply(
    x_ring,
    weight_ring,
    count,
    bias_ptr,
    out_ptr,
    bias_stride,
    out_stride,
    first_n,
    rank,
    room,
    num_columns,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """The sums of this program's tiles, with the other's of its columns added, into the result."""
    SHARE: gl.constexpr = BLOCK_N // PROGRAMS
    NUM_SUMS: gl.constexpr = BLOCK_M * BLOCK_N // THREADS
    layout: gl.constexpr = sums_layout(gl.num_warps(), BLOCK_N, PROGRAMS)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    n = first_n + rank * SHARE + column
    n_inside = (column < SHARE) & (n < num_columns)
    gdc_wait()
    if HAS_BIAS:
        bias = gl.load(bias_ptr + n.to(gl.int64) * bias_stride, mask=n_inside, other=0.0)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    acc = add_products(acc, x_ring, weight_ring, 0, count, SWAP=False)
    acc = send_sums(acc, room, NUM_SUMS)
    # While the other's sums are under way.
    at = gl.expand_dims(m.to(gl.int64) * out_stride, 1) + gl.expand_dims(n, 0)
    places = kept(out_ptr, at, gl.expand_dims(n_inside, 0))
    acc = receive_sums(acc, room, NUM_SUMS)
    if HAS_BIAS:
        acc += gl.expand_dims(bias.to(gl.float32), 0)
    store_pairs(places, acc.to(out_ptr.dtype.element_ty))


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
):
    rank = rank_in_cluster()
    first_n = gl.program_id(0) * BLOCK_N
    count = gl.cdiv(depth, BLOCK_K * PROGRAMS)
    x_ring, weight_ring = make_rings(
        x_desc, weight_desc, (first_n, rank), _tile, BLOCK_K, X_STAGES, STAGES, AHEAD
    )
    room = make_room_for_sums(BLOCK_M * BLOCK_N // THREADS)
    share_out(
        _multiply,
        (
            bias_ptr, out_ptr, bias_stride, out_stride, first_n, rank, room, num_columns,
            HAS_BIAS, BLOCK_M, BLOCK_N,
        ),
        x_ring, weight_ring, count, "cluster_linear_kernel", _tile, AHEAD, RELEASE,
    )  # fmt: skip
