"""Masks, bias, penalties and temperature, in one pass over the logits; draws nothing."""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF

# How long lists are, and how many rows a table has, compiles nothing.
_SIZES = ("num_real", "num_forbidden", "num_biased", "num_words", "num_states")


@triton.jit
def entries_here(ids_ptr, row, count, first, BLOCK: tl.constexpr, ENTRIES: tl.constexpr):
    """A row's listed ids as columns of the block that begins at id `first`, and which are in it."""
    entries = tl.arange(0, ENTRIES)
    at = ids_ptr + row.to(tl.int64) * count + entries
    ids = tl.load(at, mask=entries < count, other=-1).to(tl.int64)
    return ids - first, (ids >= 0) & (ids >= first) & (ids < first + BLOCK)


@triton.jit
def next_entry(columns, is_here, ENTRIES: tl.constexpr):
    """The first entry that is left, its column, and what is left after it."""
    entries = tl.arange(0, ENTRIES)
    entry = tl.min(tl.where(is_here, entries, ENTRIES), axis=0)
    column = tl.sum(tl.where(entries == entry, columns, 0), axis=0)
    return entry, column, is_here & (entries != entry)


@triton.jit
def penalised(x, entries, repetition, frequency, presence):
    """Each operation rounded by itself; an entry's sign bit says that the prompt has the id."""
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(entries != 0, repeated, x)
    counts = (entries & 0x7FFFFFFF).to(tl.float32)
    x = x - frequency * counts
    return tl.where(counts > 0.0, x - presence, x)


@triton.jit
def value_or(ptr, default: tl.constexpr, IS_GIVEN: tl.constexpr):
    return tl.load(ptr) if IS_GIVEN else tl.full((), default, tl.float32)


@triton.jit(do_not_specialize=[*_SIZES])
def rules_kernel(  # noqa: C901, PLR0915 - one pass over the logits, in which each rule is a branch
    logits_ptr,
    out_ptr,
    allowed_ptr,
    forbidden_ptr,
    until_ptr,
    positions_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    counts_ptr,
    rows_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    temperature_ptr,
    row_stride,
    last_stride,
    out_row,
    out_last,
    num_columns,
    num_real,
    first_id,
    num_words,
    num_forbidden,
    num_biased,
    num_states,
    count_stride,
    IN_PLACE: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_REPETITION: tl.constexpr,
    HAS_FREQUENCY: tl.constexpr,
    HAS_PRESENCE: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    FORBIDDEN: tl.constexpr,  # 0: there are none
    BIASED: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK_WIDTH
    columns = start + tl.arange(0, BLOCK_WIDTH)
    first = start.to(tl.int64) + first_id
    changes = (start + BLOCK_WIDTH > num_real) | HAS_ALLOWED
    if FORBIDDEN > 0:
        bans, is_ban = entries_here(
            forbidden_ptr, row, num_forbidden, first, BLOCK_WIDTH, FORBIDDEN
        )
        is_ban &= tl.load(positions_ptr + row) < tl.load(until_ptr + row)
        num_bans = tl.sum(is_ban.to(tl.int32), axis=0)
        changes |= num_bans > 0
    if BIASED > 0:
        shifts, is_shift = entries_here(bias_ids_ptr, row, num_biased, first, BLOCK_WIDTH, BIASED)
        num_shifts = tl.sum(is_shift.to(tl.int32), axis=0)
        changes |= num_shifts > 0
    state = tl.full((), -1, tl.int64)
    repetition = value_or(repetition_ptr + row, 1.0, HAS_REPETITION)
    frequency = value_or(frequency_ptr + row, 0.0, HAS_FREQUENCY)
    presence = value_or(presence_ptr + row, 0.0, HAS_PRESENCE)
    if HAS_COUNTS:
        state = tl.load(rows_ptr + row).to(tl.int64)
    has_penalty = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    has_penalty &= (state >= 0) & (state < num_states)
    temperature = value_or(temperature_ptr + row, 1.0, HAS_TEMPERATURE)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    changes |= has_penalty | (temperature != 1.0)
    if IN_PLACE & (changes == 0):
        return
    at = logits_ptr + row.to(tl.int64) * row_stride + columns.to(tl.int64) * last_stride
    is_column = columns < num_columns
    x = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    x = tl.where(columns < num_real, x, NEG_INF)
    if HAS_ALLOWED:
        ids = columns.to(tl.int64) + first_id
        words_at = allowed_ptr + row.to(tl.int64) * num_words + ids // 32
        words = tl.load(words_at, mask=columns < num_real, other=0)
        x = tl.where(((words >> (ids % 32).to(tl.int32)) & 1) != 0, x, NEG_INF)
    if FORBIDDEN > 0:
        for _ in range(num_bans):
            _, column, is_ban = next_entry(bans, is_ban, FORBIDDEN)
            x = tl.where(columns - start == column, NEG_INF, x)
    if BIASED > 0:
        entries = tl.arange(0, BIASED)
        values_at = bias_values_ptr + row.to(tl.int64) * num_biased + entries
        values = tl.load(values_at, mask=entries < num_biased, other=0.0)
        for _ in range(num_shifts):
            entry, column, is_shift = next_entry(shifts, is_shift, BIASED)
            value = tl.sum(tl.where(entries == entry, values, 0.0), axis=0)
            x = tl.where(columns - start == column, x + value, x)
    if HAS_COUNTS:
        counts_at = counts_ptr + tl.maximum(state, 0) * count_stride + first_id + columns
        # A row without a penalty reads none.
        counts = tl.load(counts_at, mask=columns < tl.where(has_penalty, num_real, 0), other=0)
        x = penalised(x, counts, repetition, frequency, presence)
    if HAS_TEMPERATURE:
        x = tl.div_rn(x, temperature)
    out_at = out_ptr + row.to(tl.int64) * out_row + columns.to(tl.int64) * out_last
    tl.store(out_at, x.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def count_tokens_kernel(
    ids_ptr,
    rows_ptr,
    counts_ptr,
    num_tokens,
    num_rows,
    num_ids,
    IS_PROMPT: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    is_token = at < num_tokens
    token = tl.load(ids_ptr + at, mask=is_token, other=-1).to(tl.int64)
    row = tl.load(rows_ptr + at, mask=is_token, other=-1).to(tl.int64)
    is_known = (token >= 0) & (token < num_ids) & (row >= 0) & (row < num_rows)
    where = counts_ptr + tl.where(is_known, row * num_ids + token, 0)
    # Integers: the order of equal tokens changes nothing.
    if IS_PROMPT:
        tl.atomic_or(where, tl.full((BLOCK_WIDTH,), -0x80000000, tl.int32), mask=is_known)
    else:
        tl.atomic_add(where, tl.full((BLOCK_WIDTH,), 1, tl.int32), mask=is_known)
