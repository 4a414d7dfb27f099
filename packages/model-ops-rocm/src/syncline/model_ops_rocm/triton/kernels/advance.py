"""From the tokens of a step to the inputs of the next: a program has some rows of the step.

Every number is looked up by a row or a position of its own, so loads are narrow by nature; what the
kernel costs is the way through its dependent loads. Offsets into tables are int64.
"""

import triton
import triton.language as tl

# The bits of `contracts.DecodeFault`.
_MISSING_BLOCK = tl.constexpr(1)
_BAD_COUNT = tl.constexpr(2)
_BAD_TOKEN = tl.constexpr(4)
_BAD_PLACES = tl.constexpr(8)


@triton.jit
def _rows_of(rows_ptr, rows_stride, num_rows, num_state_rows, BLOCK_ROWS: tl.constexpr):
    """This program's rows, their state rows, and whether those exist."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_step = row < num_rows
    state_row = row.to(tl.int64)
    if rows_ptr is not None:
        state_row = tl.load(rows_ptr + row * rows_stride, mask=in_step, other=-1).to(tl.int64)
    is_row = in_step & (state_row >= 0) & (state_row < num_state_rows)
    return row, tl.where(is_row, state_row, 0), is_row


@triton.jit
def _is_stop(
    tokens,
    is_row,
    stop_ids_ptr,
    stop_at,
    NUM_STOP_IDS: tl.constexpr,
    BLOCK_STOP_IDS: tl.constexpr,
):
    """Which of the tokens [rows, queries] are among their row's stop ids."""
    found = tokens < tokens
    for first in tl.static_range(0, NUM_STOP_IDS, BLOCK_STOP_IDS):
        entry = first + tl.arange(0, BLOCK_STOP_IDS)
        stop_ids = tl.load(
            stop_ids_ptr + stop_at[:, None] + entry[None, :],
            mask=is_row[:, None] & (entry < NUM_STOP_IDS)[None, :],
            other=-1,
        ).to(tl.int64)
        same = tokens[:, :, None] == stop_ids[:, None, :]
        found = found | (tl.max(same.to(tl.int32), axis=2) > 0)
    return found & (tokens >= 0)


@triton.jit
def _keep(tokens, is_stop, num_new, had, limit, was_alive, NUM_QUERIES: tl.constexpr):
    """How many of the new tokens are kept, whether the row goes on, what came, and what is wrong.

    tokens [rows, queries] are looked at below num_new, is_stop says which of them may end the row.
    """
    query = tl.arange(0, tokens.shape[1])[None, :]
    is_counted = was_alive & (num_new >= 1) & (num_new <= NUM_QUERIES)
    num_new = tl.where(is_counted, num_new, 0)
    is_new = query < num_new[:, None]
    first_stop = tl.min(tl.where(is_new & is_stop, query, NUM_QUERIES), axis=1)
    first_bad = tl.min(tl.where(is_new & (tokens < 0), query, NUM_QUERIES), axis=1)
    num_kept = tl.minimum(tl.minimum(num_new, first_bad), tl.maximum(limit - had, 0))
    num_kept = tl.minimum(num_kept, first_stop + 1)
    has_ended = (first_stop < num_kept) | (had + num_kept >= limit)
    is_bad = (first_bad < num_new) & (has_ended == 0)
    faults = tl.where(is_bad, _BAD_TOKEN, 0)
    faults = tl.where(was_alive & (is_counted == 0), _BAD_COUNT, faults)
    is_alive = is_counted & (has_ended == 0) & (is_bad == 0)
    return num_kept, is_alive, tl.where(is_bad, first_bad, num_new), faults


@triton.jit
def _blocks_at(
    tables_ptr,
    tables_at,
    position,
    is_used,
    NUM_ENTRIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The block ids of positions [rows, queries]; negative where the table has none."""
    entry = position // BLOCK_SIZE
    source = tables_ptr + tables_at[:, None] + entry
    is_entry = is_used & (position >= 0) & (entry < NUM_ENTRIES)
    return tl.load(source, mask=is_entry, other=-1).to(tl.int64)


@triton.jit
def _clear(pointers, place, is_free):
    """Ids, positions and slots of places that are no living row's."""
    nothing = tl.zeros(place.shape, tl.int64)
    tl.store(pointers[0] + place, nothing, mask=is_free)
    tl.store(pointers[1] + place, nothing, mask=is_free)
    tl.store(pointers[2] + place, nothing - 1, mask=is_free)


@triton.jit
def _clear_outside(pointers, first, last, num_places, BLOCK: tl.constexpr):
    """The places before the first row's and behind the last one's, this program's part of them."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _clear(pointers, place, ((place < first) | (place >= last)) & (place < num_places))


@triton.jit
def _clear_refused(pointers, is_refused, start, stop, num_places, BLOCK_QUERIES: tl.constexpr):
    """The places of rows that were given too many, as far as there are any."""
    start, stop = tl.maximum(start, 0), tl.minimum(stop, num_places)
    longest = tl.max(tl.where(is_refused, stop - start, 0), axis=0).to(tl.int32)
    for first in range(0, longest, BLOCK_QUERIES):
        place = start[:, None] + first + tl.arange(0, BLOCK_QUERIES)[None, :]
        _clear(pointers, place, is_refused[:, None] & (place < stop[:, None]))


@triton.jit(do_not_specialize=["num_rows", "num_state_rows", "num_places"])
def advance_kernel(  # noqa: PLR0915 reason: one row's way from its tokens to its slots
    tokens_ptr,  # or None: nothing is kept
    accepted_ptr,  # or None: one token per row
    drafts_ptr,  # or None
    starts_ptr,  # or None: place r is row r's
    rows_ptr,  # or None: state row r is row r's
    num_tokens_ptr,
    last_ids_ptr,
    is_alive_ptr,
    faults_ptr,
    min_tokens_ptr,
    max_tokens_ptr,
    stop_ids_ptr,
    tables_ptr,
    history_ptr,  # or None
    ids_ptr,
    positions_ptr,
    slots_ptr,
    seq_lens_ptr,
    num_new_ptr,
    num_rows,
    num_state_rows,
    num_places,
    tokens_row,
    tokens_last,
    accepted_stride,
    drafts_row,
    drafts_last,
    rows_stride,
    stop_ids_row,
    tables_row,
    history_row,
    NUM_QUERIES: tl.constexpr,
    NUM_STOP_IDS: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    HISTORY_LENGTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LAYS_OUT: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STOP_IDS: tl.constexpr,
):
    row, state_row, is_row = _rows_of(rows_ptr, rows_stride, num_rows, num_state_rows, BLOCK_ROWS)
    query = tl.arange(0, BLOCK_QUERIES)[None, :]
    was_alive = tl.load(is_alive_ptr + state_row, mask=is_row, other=0).to(tl.int32) != 0
    had = tl.load(num_tokens_ptr + state_row, mask=was_alive, other=0).to(tl.int64)
    last = tl.load(last_ids_ptr + state_row, mask=was_alive, other=0).to(tl.int64)
    now, is_alive = had, was_alive
    faults = tl.zeros((BLOCK_ROWS,), tl.int32)

    if tokens_ptr is not None:
        least = tl.load(min_tokens_ptr + state_row, mask=was_alive, other=0).to(tl.int64)
        limit = tl.load(max_tokens_ptr + state_row, mask=was_alive, other=0).to(tl.int64)
        if history_ptr is not None:
            limit = tl.minimum(limit, HISTORY_LENGTH)
        num_new = tl.full((BLOCK_ROWS,), 1, tl.int64)
        if accepted_ptr is not None:
            accepted = tl.load(accepted_ptr + row * accepted_stride, mask=was_alive, other=0)
            num_new = accepted.to(tl.int64) + 1
        tokens_at = row.to(tl.int64)[:, None] * tokens_row + query * tokens_last
        is_token = was_alive[:, None] & (query < NUM_QUERIES)
        tokens = tl.load(tokens_ptr + tokens_at, mask=is_token, other=0).to(tl.int64)
        stop_at = state_row * stop_ids_row
        is_stop = _is_stop(tokens, was_alive, stop_ids_ptr, stop_at, NUM_STOP_IDS, BLOCK_STOP_IDS)
        is_stop = is_stop & (had[:, None] + query + 1 >= least[:, None])
        num_kept, is_alive, num_new, faults = _keep(
            tokens, is_stop, num_new, had, limit, was_alive, NUM_QUERIES
        )
        now = had + num_kept
        newest = tl.sum(tl.where(query == num_kept[:, None] - 1, tokens, 0), axis=1)
        last = tl.where(num_kept > 0, newest, last)
        tl.store(num_new_ptr + row, num_new, mask=row < num_rows)
        tl.store(num_tokens_ptr + state_row, now, mask=was_alive)
        tl.store(last_ids_ptr + state_row, last, mask=was_alive)
        if history_ptr is not None:
            history_at = (state_row * history_row + had)[:, None] + query
            tl.store(history_ptr + history_at, tokens, mask=query < num_kept[:, None])

    if LAYS_OUT:
        start = row.to(tl.int64)
        stop = start + 1
        if starts_ptr is not None:
            start = tl.load(starts_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
            stop = tl.load(starts_ptr + row + 1, mask=row < num_rows, other=0).to(tl.int64)
        has_places = (row < num_rows) & (start >= 0) & (stop > start) & (stop <= num_places)
        has_places = has_places & (stop - start <= NUM_QUERIES)
        is_place = has_places[:, None] & (start[:, None] + query < stop[:, None])
        position = now[:, None] - 1 + query
        tables_at = state_row * tables_row
        wanted = is_place & is_alive[:, None]
        block = _blocks_at(tables_ptr, tables_at, position, wanted, NUM_ENTRIES, BLOCK_SIZE)
        is_missing = tl.max((wanted & (block < 0)).to(tl.int32), axis=1) > 0
        refused = tl.where(is_missing, _MISSING_BLOCK, 0)
        refused = tl.where(is_alive & (has_places == 0), _BAD_PLACES, refused)
        is_alive = is_alive & (refused == 0)
        faults = faults | refused

        used = is_place & is_alive[:, None]
        ids = tl.where(query == 0, last[:, None], 0)
        if drafts_ptr is not None:
            drafts_at = row.to(tl.int64)[:, None] * drafts_row + (query - 1) * drafts_last
            drafts = tl.load(drafts_ptr + drafts_at, mask=used & (query > 0), other=0)
            ids = tl.where(query == 0, ids, tl.maximum(drafts.to(tl.int64), 0))
        place = start[:, None] + query
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(ids_ptr + place, tl.where(used, ids, 0), mask=is_place)
        tl.store(positions_ptr + place, tl.where(used, position, 0), mask=is_place)
        tl.store(slots_ptr + place, tl.where(used, slot, -1), mask=is_place)
        seq_len = tl.where(is_alive, now - 1 + stop - start, 0)
        tl.store(seq_lens_ptr + row, seq_len, mask=row < num_rows)
        if starts_ptr is not None:
            first = tl.load(starts_ptr).to(tl.int64)
            last = tl.load(starts_ptr + num_rows).to(tl.int64)
            pointers = (ids_ptr, positions_ptr, slots_ptr)
            _clear_outside(pointers, first, last, num_places, BLOCK_ROWS * BLOCK_QUERIES)
            is_refused = (row < num_rows) & (has_places == 0)
            _clear_refused(pointers, is_refused, start, stop, num_places, BLOCK_QUERIES)

    tl.store(is_alive_ptr + state_row, is_alive, mask=was_alive)
    earlier = tl.load(faults_ptr + state_row, mask=was_alive, other=0)
    tl.store(faults_ptr + state_row, earlier | faults, mask=was_alive & (faults != 0))
