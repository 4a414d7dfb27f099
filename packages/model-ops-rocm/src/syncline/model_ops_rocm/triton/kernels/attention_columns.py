"""Columns of attention, each a token and a head, in a warp group's products on sm_90.

Unit: one program's. Columns are the narrow side of the products: [tokens, columns] of scores,
[dimensions, columns] of sums, which lie as the accumulators do. In Gluon, which no interpreter
runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language import debug_barrier

from syncline.model_ops_rocm.triton.kernels.attention_pages import PAGE
from syncline.model_ops_rocm.triton.kernels.cluster import each_whole

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _rows_layout(num_warps, num_ctas):
    """Of rows of HEAD_DIM, 16 bytes to a thread."""
    return gl.BlockedLayout(
        [1, 8], [2, 16], [num_warps, 1], [1, 0], cga_layout=each_whole(num_ctas, 2)
    )


@gluon.jit
def load_queries(
    queries,  # where the first is; strides of a token, a head and a dimension
    q,  # shared [COLUMNS, HEAD_DIM]
    NUM_CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    NUM_COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Queries into shared memory, as products read them: column c is head c % GROUP of a token."""
    layout: gl.constexpr = _rows_layout(num_warps, NUM_CTAS)
    column = gl.arange(0, q.shape[0], gl.SliceLayout(1, layout))
    dims = gl.arange(0, q.shape[1], gl.SliceLayout(0, layout))
    first = (column // GROUP).to(gl.int64) * queries[1] + column % GROUP * queries[2]
    at = queries[0] + (gl.expand_dims(first, 1) + gl.expand_dims(dims * queries[3], 0))
    q.store(gl.load(at, mask=gl.expand_dims(column < NUM_COLUMNS, 1), other=0.0))
    fence_async_shared()
    debug_barrier()


@gluon.jit
def only_seen(scores, page, position, WINDOW: gl.constexpr, layout: gl.constexpr):
    """Scores [PAGE, columns] of a page; -inf of tokens that a column's does not see."""
    tokens = gl.expand_dims(page * PAGE + gl.arange(0, PAGE, gl.SliceLayout(1, layout)), 1)
    is_seen = tokens <= gl.expand_dims(position, 0)
    if WINDOW > 0:
        is_seen &= tokens > gl.expand_dims(position, 0) - WINDOW
    return gl.where(is_seen, scores, float("-inf"))


@gluon.jit
def store_weights(scores, state, factor, weights, COUNT: gl.constexpr):
    """Weights of COUNT pages into shared [COUNT, columns, PAGE], by the highest score so far.

    `state` is (acc, top, total). Returns it, shrunk, and what is to be added to the total.
    """
    acc, top, total = state
    highest = scores[0]
    for index in gl.static_range(1, COUNT):
        highest = gl.maximum(highest, scores[index])
    new_top = gl.maximum(top, gl.max(highest, 0) * factor)
    shrink = gl.exp2(top - new_top)
    added = gl.zeros_like(highest)
    for index in gl.static_range(COUNT):
        page_weights = gl.exp2(scores[index] * factor - gl.expand_dims(new_top, 0))
        added += page_weights
        weights.index(index).permute([1, 0]).store(page_weights.to(weights.dtype))
    fence_async_shared()
    # All warps have stored theirs.
    debug_barrier()
    return acc * gl.expand_dims(shrink, 0), new_top, total * shrink, added


@gluon.jit
def zero_past(stage, num_tokens, NUM_CTAS: gl.constexpr, num_warps: gl.constexpr):
    """Zeros for the values that are no token's: they may be NaN, which no weight of 0 stops."""
    layout: gl.constexpr = _rows_layout(num_warps, NUM_CTAS)
    values = stage.load(layout)
    token = gl.expand_dims(gl.arange(0, PAGE, gl.SliceLayout(1, layout)), 1)
    stage.store(gl.where(token < num_tokens, values, gl.zeros_like(values)))
    fence_async_shared()
    debug_barrier()
