"""Paged attention of few short decode rows in 16 bits on sm_90: every page asked for at once.

Unit: one launch. A program has a row and a key/value head, so that no results are merged between
programs. A warp of its own asks for the pages, as many as shared memory holds before any of them is
looked at, so that a few programs keep all of the memory busy (`attention_pages`). Two teams of four
warps attend to half of each chunk: what follows the last byte is half as long.

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
    store_columns,
    store_weights,
    zero_past,
)
from syncline.model_ops_rocm.triton.kernels.attention_pages import PAGE, TEAMS, feed, pages_of

LOWEST: gl.constexpr = gl.constexpr(-1.0e30)  # below every score, and finite


@gluon.jit
def _attend(  # noqa: PLR0915 - one loop
    ring,
    queries,
    q,
    weights,
    sinks_ptr,
    lens_at,
    table_tokens,
    first_head,
    qk_scale,
    layout: gl.constexpr,
    TEAM: gl.constexpr,
    GROUP: gl.constexpr,
    Q_LEN: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    OVERLAP: gl.constexpr,
    WINDOW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    COLUMNS: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A team's (acc [HEAD_DIM, COLUMNS], top [COLUMNS], total [COLUMNS])."""
    stages, full, free = ring
    of_columns: gl.constexpr = gl.SliceLayout(0, layout)
    column = gl.arange(0, COLUMNS, of_columns)
    acc = gl.zeros([HEAD_DIM, COLUMNS], gl.float32, layout)
    top = gl.full([COLUMNS], LOWEST, gl.float32, of_columns)
    total = gl.zeros([COLUMNS], gl.float32, of_columns)
    if OVERLAP:
        gdc_wait()
    seq_len = gl.load(lens_at).to(gl.int32)
    load_queries(queries, q, GROUP, GROUP * Q_LEN, num_warps)
    # A length that no host has seen is not cut in silence.
    factor = gl.where(seq_len > table_tokens, float("nan"), 1.0) * qk_scale * LOG2_E
    seq_len = gl.minimum(seq_len, table_tokens)
    num_pages, first_page = pages_of(seq_len, Q_LEN, WINDOW)
    if HAS_SINKS and TEAM == 0:
        at = sinks_ptr + first_head + column % GROUP
        sinks = gl.load(at, mask=column < GROUP * Q_LEN, other=float("-inf"))
        sinks = sinks.to(gl.float32) * LOG2_E
        top = gl.maximum(sinks, LOWEST)
        # Of a row without a token nothing is attended, whatever a sink weighs.
        total = gl.where(num_pages > 0, gl.exp2(sinks - top), 0.0)
    position = seq_len - Q_LEN + column // GROUP
    number = TEAM
    for start in range(first_page + TEAM * PAGES, num_pages + TEAM * PAGES, TEAMS * PAGES):
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
        stage = (number + TEAMS) % STAGES
        mbarrier.wait(full.index(stage), (number + TEAMS) // STAGES & 1)
        last = num_pages - 1 - start
        if (last >= 0) & (last < PAGES) & (num_pages * PAGE > seq_len):
            zero_past(stages.index(stage * PAGES + last), seq_len % PAGE, num_warps)
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
        number += 2 * TEAMS
    return acc, top, total


@gluon.jit
def _follow(
    ring,
    queries,
    q,
    weights,
    results,
    sinks_ptr,
    lens_at,
    table_tokens,
    first_head,
    qk_scale,
    layout: gl.constexpr,
    GROUP: gl.constexpr,
    Q_LEN: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    OVERLAP: gl.constexpr,
    WINDOW: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    COLUMNS: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The second team; what it finds goes to shared memory."""
    acc, top, total = _attend(
        ring,
        queries,
        q,
        weights,
        sinks_ptr,
        lens_at,
        table_tokens,
        first_head,
        qk_scale,
        layout,
        1,
        GROUP,
        Q_LEN,
        HAS_SINKS,
        OVERLAP,
        WINDOW,
        HEAD_DIM,
        COLUMNS,
        PAGES,
        STAGES,
        num_warps,
    )
    results[0].store(acc)
    results[1].store(top)
    results[2].store(total)


@gluon.jit(
    do_not_specialize=["lse_token", "lse_head", "table_row", "table_tokens"],
    do_not_specialize_on_alignment=["lse_ptr", "lens_ptr", "table_ptr"],
)
def short_decode_kernel(  # noqa: PLR0915 - one program
    q_ptr,
    k_desc,  # rows of HEAD_DIM, or of all heads of a slot, in tiles of [PAGE, HEAD_DIM]
    v_desc,
    out_ptr,
    lse_ptr,  # of float32 [T, N]; any, unless HAS_LSE
    sinks_ptr,  # any, unless HAS_SINKS
    lens_ptr,
    table_ptr,
    qk_scale,
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
    num_warps: gl.constexpr,  # 4, of a team
):
    """Program: row and key/value head."""
    gl.static_assert(SHAPE[0] % PAGE == 0)
    # Each stage is one team's: of two turns of a barrier, whose parity is all that a wait knows,
    # a team that has not waited for the first would take it for the second.
    gl.static_assert(STAGES % TEAMS == 0)
    gl.static_assert(GROUP * Q_LEN <= COLUMNS)
    HEAD_DIM: gl.constexpr = SHAPE[1]
    dtype: gl.constexpr = k_desc.dtype
    swizzled: gl.constexpr = k_desc.layout
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, COLUMNS, 16]
    )
    of_columns: gl.constexpr = gl.SliceLayout(0, layout)
    stages = gl.allocate_shared_memory(dtype, [STAGES * PAGES, PAGE, HEAD_DIM], swizzled)
    q = gl.allocate_shared_memory(dtype, [TEAMS, COLUMNS, HEAD_DIM], swizzled)
    leading = gl.allocate_shared_memory(dtype, [PAGES, COLUMNS, PAGE], swizzled)
    following = gl.allocate_shared_memory(dtype, [PAGES, COLUMNS, PAGE], swizzled)
    sums = gl.allocate_shared_memory(gl.float32, [HEAD_DIM, COLUMNS], plane)
    tops = gl.allocate_shared_memory(gl.float32, [COLUMNS], line)
    totals = gl.allocate_shared_memory(gl.float32, [COLUMNS], line)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(free.index(index), count=1)
    fence_async_shared()
    row, kv_head = gl.program_id(0) // NUM_KV_HEADS, gl.program_id(0) % NUM_KV_HEADS
    if PLACES[1] > PLACES[2]:
        place = (kv_head * SHAPE[0], kv_head * 0)
    else:
        place = (kv_head * 0, kv_head * HEAD_DIM)
    first_token, first_head = row.to(gl.int64) * Q_LEN, kv_head * GROUP
    queries = (q_ptr + first_token * q_token + first_head * q_head, q_token, q_head, q_last)
    ring = (stages, full, free)
    found = gl.warp_specialize(
        [
            (
                _attend,
                (
                    ring,
                    queries,
                    q.index(0),
                    leading,
                    sinks_ptr,
                    lens_ptr + row,
                    table_tokens,
                    first_head,
                    qk_scale,
                    layout,
                    0,
                    GROUP,
                    Q_LEN,
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
                _follow,
                (
                    ring,
                    queries,
                    q.index(1),
                    following,
                    (sums, tops, totals),
                    sinks_ptr,
                    lens_ptr + row,
                    table_tokens,
                    first_head,
                    qk_scale,
                    layout,
                    GROUP,
                    Q_LEN,
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
                    k_desc,
                    v_desc,
                    ring,
                    lens_ptr + row,
                    table_ptr + row.to(gl.int64) * table_row,
                    table_last,
                    table_tokens,
                    place,
                    Q_LEN,
                    OVERLAP,
                    WINDOW,
                    PAGES,
                    STAGES,
                    PLACES,
                    SHAPE,
                ),
            ),
        ],
        [4, 1],
        [128, 40],
    )
    acc, top, total = found[0], found[1], found[2]
    other = tops.load(of_columns)
    highest = gl.maximum(top, other)
    shrink, weight = gl.exp2(top - highest), gl.exp2(other - highest)
    acc = acc * gl.expand_dims(shrink, 0) + sums.load(layout) * gl.expand_dims(weight, 0)
    total = total * shrink + totals.load(of_columns) * weight
    is_empty = total == 0.0
    mean = acc / gl.expand_dims(gl.where(is_empty, 1.0, total), 0)
    column = gl.arange(0, COLUMNS, of_columns)
    is_row, head = column < GROUP * Q_LEN, first_head + column % GROUP
    token = first_token + column // GROUP
    store_columns(out_ptr, token * out_token + head * out_head, out_last, mean, is_row, layout)
    if HAS_LSE:
        lse = (highest + gl.log2(gl.where(is_empty, 1.0, total))) * LN_2
        lse = gl.where(is_empty, float("-inf"), lse)
        gl.store(lse_ptr + token * lse_token + head * lse_head, lse, mask=is_row)
