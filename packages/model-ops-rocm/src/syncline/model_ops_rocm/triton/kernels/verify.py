"""Verifying drafts against the ids that the target drew: a program has some rows."""

import triton
import triton.language as tl


@triton.jit
def places_of(
    drafts_ptr,
    starts_ptr,  # or None: every row has 1 + NUM_DRAFTS places
    row,
    is_row,
    num_places,
    drafts_row,
    drafts_last,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
):
    """Each row's first place, the number of its places (0: none it may have), and its drafts.

    Drafts are [rows, queries], the number of those before the first that is missing beside them.
    """
    query = tl.arange(0, BLOCK_QUERIES)[None, :]
    start = row * (NUM_DRAFTS + 1)
    stop = start + NUM_DRAFTS + 1
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row, mask=is_row, other=0).to(tl.int64)
        stop = tl.load(starts_ptr + row + 1, mask=is_row, other=0).to(tl.int64)
    has_places = is_row & (start >= 0) & (stop > start) & (stop <= num_places)
    count = tl.where(has_places, stop - start, 0)
    is_draft = is_row[:, None] & (query < NUM_DRAFTS)
    drafts_at = row[:, None] * drafts_row + query * drafts_last
    drafts = tl.load(drafts_ptr + drafts_at, mask=is_draft, other=-1).to(tl.int64)
    is_missing = (drafts < 0) | (query >= count[:, None] - 1)
    num_drafts = tl.min(tl.where(is_missing, query, NUM_DRAFTS), axis=1)
    return start, count, drafts, num_drafts


@triton.jit(do_not_specialize=["num_rows", "num_places"])
def verify_exact_kernel(
    drafts_ptr,
    target_ptr,
    starts_ptr,  # or None
    tokens_ptr,
    accepted_ptr,
    num_rows,
    num_places,
    drafts_row,
    drafts_last,
    target_row,  # 0 for packed places
    target_last,
    tokens_row,
    tokens_last,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    is_row = row < num_rows
    query = tl.arange(0, BLOCK_QUERIES)[None, :]
    start, count, drafts, num_drafts = places_of(
        drafts_ptr, starts_ptr, row, is_row, num_places,
        drafts_row, drafts_last, NUM_DRAFTS, BLOCK_QUERIES,
    )  # fmt: skip
    target_at = row * target_row
    if starts_ptr is not None:
        target_at = start * target_last
    source = target_ptr + target_at[:, None] + query * target_last
    is_place = (query < count[:, None]) & (query <= NUM_DRAFTS)
    drawn = tl.load(source, mask=is_place, other=-1).to(tl.int64)
    is_wrong = (query >= num_drafts[:, None]) | (drafts != drawn)
    accepted = tl.min(tl.where(is_wrong, query, NUM_DRAFTS), axis=1)
    accepted = tl.where(count > 0, accepted, -1)
    # The accepted drafts are what was drawn, and so is the token after them.
    tokens = tl.where(query <= accepted[:, None], drawn, -1)
    target = tokens_ptr + row[:, None] * tokens_row + query * tokens_last
    tl.store(target, tokens, mask=is_row[:, None] & (query <= NUM_DRAFTS))
    tl.store(accepted_ptr + row, accepted, mask=is_row)
