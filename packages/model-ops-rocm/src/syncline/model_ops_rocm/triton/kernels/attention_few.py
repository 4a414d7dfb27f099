"""Paged attention of few decode rows in 16 bits on sm_90: a cluster of programs for each.

Unit: one launch. A cluster has a row and a key/value head, and its programs take turns in its
pages, which a warp of its own asks for (`attention_pages`): so a few rows keep many multiprocessors
and all of the memory busy. What they find they send to the first of them (`attention_merge`), so
that no part goes through memory.

Tokens are the wide side of the products, and the rows of queries the narrow one: scores are
[tokens, columns], sums [dimensions, columns]; a column is a token and a head, as a row of
`attention_tiles` is. In Gluon, which no interpreter runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from syncline.model_ops_rocm.triton.kernels.attention_columns import (
    LN_2,
    LOG2_E,
    load_queries,
    only_seen,
    store_weights,
    zero_past,
)
from syncline.model_ops_rocm.triton.kernels.attention_merge import (
    make_room_for_parts,
    merge_parts,
    send_part,
)
from syncline.model_ops_rocm.triton.kernels.attention_pages import PAGE, feed, pages_of
from syncline.model_ops_rocm.triton.kernels.cluster import (
    THREADS,
    barrier_layout,
    make_up,
    num_barriers,
    rank_in_cluster,
    sums_layout,
)
from syncline.model_ops_rocm.triton.kernels.early import kept, store_kept

LOWEST: gl.constexpr = gl.constexpr(-1.0e30)  # below every score, and finite
# Shared memory that Triton does not lay out counts beside what it does, for which it asks the
# driver only if that alone is more than a kernel has unasked.
_UNASKED_BYTES: gl.constexpr = gl.constexpr(48 * 1024)


@gluon.jit
def _attend_pieces(
    ring,
    shared,
    state,
    seq_len,
    factor,
    rank,
    layout: gl.constexpr,
    NUM_CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    Q_LEN: gl.constexpr,
    WINDOW: gl.constexpr,
    COLUMNS: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """(acc [HEAD_DIM, COLUMNS], top [COLUMNS], total [COLUMNS]) with this program's pieces."""
    stages, full, free = ring
    q, weights = shared
    acc, top, total = state
    num_pages, first_page = pages_of(seq_len, Q_LEN, WINDOW)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    position = seq_len - Q_LEN + column // GROUP
    number = 0
    for start in range(first_page + rank * PAGES, num_pages, NUM_CTAS * PAGES):
        stage = number % STAGES
        mbarrier.wait(full.index(stage), number // STAGES & 1)
        products = ()
        for index in gl.static_range(PAGES):
            page_scores = warpgroup_mma(
                stages.index(stage * PAGES + index),
                q.permute([1, 0]),
                gl.zeros([PAGE, COLUMNS], gl.float32, layout),
                use_acc=False,
                is_async=True,
            )
            products += (page_scores,)  # type: ignore[assignment]  # tuples grow
        products = warpgroup_mma_wait(num_outstanding=0, deps=products)
        mbarrier.arrive(free.index(stage), count=1)
        scores = ()
        for index in gl.static_range(PAGES):
            page_scores = products[index] if PAGES > 1 else products
            scores += (only_seen(page_scores, start + index, position, WINDOW, layout),)  # type: ignore[assignment]  # tuples grow
        acc, top, total, added = store_weights(scores, (acc, top, total), factor, weights, PAGES)
        stage = (number + 1) % STAGES
        mbarrier.wait(full.index(stage), (number + 1) // STAGES & 1)
        last = num_pages - 1 - start
        if (last < PAGES) & (num_pages * PAGE > seq_len):
            zero_past(stages.index(stage * PAGES + last), seq_len % PAGE, NUM_CTAS, num_warps)
        for index in gl.static_range(PAGES):
            sums = warpgroup_mma(
                stages.index(stage * PAGES + index).permute([1, 0]),
                weights.index(index).permute([1, 0]),
                acc,
                is_async=True,
            )
            acc = sums
        # While the values are multiplied.
        total += gl.sum(added, 0)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        number += 2
    return acc, top, total


@gluon.jit
def _places(
    result,  # where it is; strides of a token, a head and a dimension
    token,
    head,
    is_row,
    HEAD_DIM: gl.constexpr,
    NUM_DIMS: gl.constexpr,  # that the result has
    layout: gl.constexpr,
):
    """Addresses [HEAD_DIM, columns] of what columns have in a result; 0 where there is nothing."""
    dims = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout)), 1)
    first = gl.expand_dims(token * result[1] + head * result[2], 0)
    return kept(result[0], first + dims * result[3], gl.expand_dims(is_row, 0) & (dims < NUM_DIMS))


@gluon.jit
def _attend(
    ring,
    shared,
    queries,
    results,
    sinks_ptr,
    lens_at,
    table_tokens,
    place,
    cluster,
    qk_scale,
    layout: gl.constexpr,
    NUM_CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    Q_LEN: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    OVERLAP: gl.constexpr,
    WINDOW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    COLUMNS: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attends to this program's pieces; the first one stores what all have found."""
    first_token, first_head = place
    rank, room = cluster
    NUM_SUMS: gl.constexpr = HEAD_DIM * COLUMNS // THREADS
    of_columns: gl.constexpr = gl.SliceLayout(0, layout)
    column = gl.arange(0, COLUMNS, of_columns)
    is_row, head = column < GROUP * Q_LEN, first_head + column % GROUP
    acc = gl.zeros([HEAD_DIM, COLUMNS], gl.float32, layout)
    top = gl.full([COLUMNS], LOWEST, gl.float32, of_columns)
    total = gl.zeros([COLUMNS], gl.float32, of_columns)
    token = first_token + column // GROUP
    places = _places(results[0], token, head, is_row, HEAD_DIM, HEAD_DIM, layout)
    if OVERLAP:
        gdc_wait()
    seq_len = gl.load(lens_at).to(gl.int32)
    load_queries(queries, shared[0], NUM_CTAS, GROUP, GROUP * Q_LEN, num_warps)
    # A length that no host has seen is not cut in silence.
    factor = gl.where(seq_len > table_tokens, float("nan"), 1.0) * qk_scale * LOG2_E
    seq_len = gl.minimum(seq_len, table_tokens)
    if HAS_SINKS:
        # Of all programs' the first one's.
        sinks = gl.load(sinks_ptr + head, mask=is_row & (rank == 0), other=float("-inf"))
        sinks = sinks.to(gl.float32) * LOG2_E
        top = gl.maximum(sinks, LOWEST)
        # Of a row without a token nothing is attended, whatever a sink weighs.
        total = gl.where(seq_len > 0, gl.exp2(sinks - top), 0.0)
    acc, top, total = _attend_pieces(
        ring,
        shared,
        (acc, top, total),
        seq_len,
        factor,
        rank,
        layout,
        NUM_CTAS,
        GROUP,
        Q_LEN,
        WINDOW,
        COLUMNS,
        PAGES,
        STAGES,
        num_warps,
    )
    if rank > 0:
        send_part(acc, top, total, room, NUM_SUMS, NUM_CTAS)
    else:
        acc, tops, totals = merge_parts(acc, top, total, room, NUM_SUMS, NUM_CTAS)
        is_empty = totals == 0.0
        mean = acc / gl.where(is_empty, 1.0, totals)
        store_kept(results[0][0], places, mean)
        if HAS_LSE:
            lse = (tops + gl.log2(gl.where(is_empty, 1.0, totals))) * LN_2
            lse = gl.where(is_empty, float("-inf"), lse)
            places = _places(results[1], token, head, is_row, HEAD_DIM, 1, layout)
            store_kept(results[1][0], places, lse)


@gluon.jit(
    do_not_specialize=["num_blocks", "lse_token", "lse_head", "table_row", "table_tokens"],
    do_not_specialize_on_alignment=["lse_ptr", "lens_ptr", "table_ptr"],
)
def few_decode_kernel(
    k_desc,  # rows of HEAD_DIM, or of all heads of a slot, in tiles of [PAGE, HEAD_DIM]
    v_desc,
    q_ptr,
    out_ptr,
    lse_ptr,  # of float32 [T, N]; any, unless HAS_LSE
    sinks_ptr,  # any, unless HAS_SINKS
    lens_ptr,
    table_ptr,
    qk_scale,
    num_blocks,
    q_token,
    q_head,
    q_last,
    out_token,
    out_head,
    out_last,
    lse_token,
    lse_head,
    table_row,
    table_last,
    table_tokens,  # that a row of it has room for
    NUM_CTAS: gl.constexpr,  # programs of a cluster, as launched
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    Q_LEN: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    OVERLAP: gl.constexpr,  # launched while the kernel before it ends
    WINDOW: gl.constexpr,
    SHAPE: gl.constexpr,  # tokens of a block, of which a page is a part; HEAD_DIM
    PLACES: gl.constexpr,  # strides of a block, a head and a slot
    COLUMNS: gl.constexpr,  # at least GROUP * Q_LEN
    PAGES: gl.constexpr,  # to a piece
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,  # pages of each program that L2 is asked for while the kernel before ends
    RELEASE: gl.constexpr,  # pieces that are asked for when the next kernel may begin
    num_warps: gl.constexpr,  # 4
):
    """Cluster: row and key/value head."""
    gl.static_assert(SHAPE[0] % PAGE == 0)
    gl.static_assert(GROUP * Q_LEN <= COLUMNS)
    HEAD_DIM: gl.constexpr = SHAPE[1]
    gl.static_assert(STAGES * PAGES * PAGE * HEAD_DIM * 2 >= _UNASKED_BYTES)
    dtype: gl.constexpr = k_desc.dtype
    swizzled: gl.constexpr = k_desc.layout
    layout: gl.constexpr = sums_layout(num_warps, COLUMNS, NUM_CTAS)
    barriers: gl.constexpr = barrier_layout(NUM_CTAS)
    NUM_BARRIERS: gl.constexpr = num_barriers(NUM_CTAS)
    stages = gl.allocate_shared_memory(dtype, [STAGES * PAGES, PAGE, HEAD_DIM], swizzled)
    q = gl.allocate_shared_memory(dtype, [COLUMNS, HEAD_DIM], swizzled)
    weights = gl.allocate_shared_memory(dtype, [PAGES, COLUMNS, PAGE], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, NUM_BARRIERS], barriers)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, NUM_BARRIERS], barriers)
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(free.index(index), count=1)
    fence_async_shared()
    rank = rank_in_cluster()
    room = make_room_for_parts(HEAD_DIM * COLUMNS // THREADS, NUM_CTAS)
    row, kv_head = gl.program_id(0) // NUM_KV_HEADS, gl.program_id(0) % NUM_KV_HEADS
    if PLACES[1] > PLACES[2]:
        place = (kv_head * SHAPE[0], kv_head * 0)
    else:
        place = (kv_head * 0, kv_head * HEAD_DIM)
    first_token, first_head = row.to(gl.int64) * Q_LEN, kv_head * GROUP
    queries = (q_ptr + first_token * q_token + first_head * q_head, q_token, q_head, q_last)
    ring = (stages, full, free)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    ring,
                    (q, weights),
                    queries,
                    ((out_ptr, out_token, out_head, out_last), (lse_ptr, lse_token, lse_head, 0)),
                    sinks_ptr,
                    lens_ptr + row,
                    table_tokens,
                    (first_token, first_head),
                    (rank, room),
                    qk_scale,
                    layout,
                    NUM_CTAS,
                    GROUP,
                    Q_LEN,
                    HAS_LSE,
                    HAS_SINKS,
                    OVERLAP,
                    WINDOW,
                    HEAD_DIM,
                    COLUMNS,
                    PAGES,
                    STAGES,
                    num_warps,
                ),
            ),
            (
                feed,
                (
                    (k_desc, v_desc),
                    "few_decode_kernel",
                    ring,
                    num_blocks,
                    lens_ptr + row,
                    (table_ptr + row.to(gl.int64) * table_row, table_last),
                    table_tokens,
                    place,
                    rank,
                    NUM_CTAS,
                    Q_LEN,
                    OVERLAP,
                    WINDOW,
                    PAGES,
                    STAGES,
                    AHEAD,
                    RELEASE,
                    PLACES,
                    SHAPE,
                ),
            ),
            (make_up, ()),
            (make_up, ()),
            (make_up, ()),
        ],
        [1, 1, 1, 1],
        [40, 40, 40, 40],
    )
