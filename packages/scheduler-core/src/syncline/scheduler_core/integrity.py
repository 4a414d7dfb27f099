"""Checks that the books of a scheduler agree with each other; for tests and idle moments."""

from collections import Counter
from collections.abc import Iterator

from syncline.kv_cache import BlockId
from syncline.scheduler_core.admission import is_awaited
from syncline.scheduler_core.errors import StateError
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import SequenceId


def check_integrity(life: Lifecycle, num_rows: int) -> None:
    """Raise StateError, or kv_cache's IntegrityError, at the first contradiction.

    Linear in blocks and unfinished sequences. What the decode path derives lazily (positions,
    pending tokens, days in the calendar) is compared here with what it is derived from.
    """
    life.kv.check_integrity(sequence.table for sequence in life.sequences.values())
    for detail in _contradictions(life, num_rows):
        raise StateError(detail)


def _contradictions(life: Lifecycle, num_rows: int) -> Iterator[str]:
    yield from _places(life, num_rows)
    life.log.check()
    yield from life.transfers.contradictions()
    pending = _num_pending(life)
    for sequence in life.sequences.values():
        num_pending = pending[sequence.seq_id]
        for detail in (*_columns(life, sequence), *_progress(life, sequence, num_pending)):
            yield f"{sequence!r}: {detail}"
    for sequence, _, event in life.parked:
        if sequence.row is not None or not is_awaited(life, event):
            yield f"{sequence!r} is parked on {event}, which never comes"
    for group in life.groups.values():
        wrong = life.siblings.check(group)
        if wrong is not None:
            yield f"request {group.request_id!r}: {wrong}"
    yield from _writable(life)
    keys = [sequence.order_key for sequence in life.waiting]
    if keys != sorted(keys):
        yield f"the waiting line is out of order: {keys}"


def _places(life: Lifecycle, num_rows: int) -> Iterator[str]:
    waiting = {sequence.seq_id for sequence in life.waiting}
    waiting |= {sequence.seq_id for sequence, _, _ in life.parked}
    if len(waiting) != life.num_waiting:
        yield "a sequence waits twice"
    if waiting & life.running.keys() or waiting | life.running.keys() != life.sequences.keys():
        yield "waiting and running sequences are not exactly the unfinished ones"
    decoding = {sequence.seq_id for sequence in life.decoding.batch.sequences}
    parts = [set(life.prefilling), decoding, set(life.draining)]
    if sum(map(len, parts)) != len(life.running) or set().union(*parts) != life.running.keys():
        yield "a running sequence is not in exactly one of prefilling, decoding, draining"
    rows = [sequence.row for sequence in life.running.values() if sequence.row is not None]
    if len(set(rows)) != len(life.running) or not set(rows) <= set(range(num_rows)):
        yield f"{len(life.running)} running sequences hold the rows {sorted(rows)}"
    if life.rows.num_free + len(rows) != num_rows or life.rows.free_rows & set(rows):
        yield f"{life.rows.num_free} rows are free and {len(rows)} held, of {num_rows}"
    members = {
        sequence.seq_id for group in life.groups.values() for sequence in group.sequences.values()
    }
    if members != life.sequences.keys():
        yield "the groups are not exactly the unfinished sequences"


def _writable(life: Lifecycle) -> Iterator[str]:
    """Blocks that a step may yet write into have one holder; a borrowed tail is parted first."""
    holders = Counter(b for sequence in life.running.values() for b in sequence.table.block_ids)
    borrowed: set[BlockId] = set()
    for group in life.groups.values():
        if group.hold is not None:
            holders.update(group.hold.block_ids)
            if group.hold.is_tail_borrowed and group.hold.tail is not None:
                borrowed.add(group.hold.tail)
    for sequence in life.running.values():
        first = sequence.num_computed_tokens // life.kv.block_size
        for block_id in sequence.table.block_ids[first:]:
            if holders[block_id] != 1 and block_id not in borrowed:
                yield f"{sequence!r} writes into block {block_id} of {holders[block_id]} holders"


def _columns(life: Lifecycle, sequence: Sequence) -> Iterator[str]:
    # Nothing here reads a token: that would deliver it, and hide what comes of not having done so.
    outputs = sequence.outputs
    num_outputs = len(outputs)
    if len(outputs.ids) != len(outputs.logprobs) or outputs.is_closed:
        yield f"{len(outputs.logprobs)} logprobs for {len(outputs.ids)} output tokens"
    if outputs.log is not None and not life.log.has_place_for(outputs):
        yield f"place {outputs.position} of the token log is not its own"
    if not num_outputs:
        return
    num_versioned = sum(count for _, count in sequence.version_runs)
    if num_versioned != num_outputs:
        yield f"{num_versioned} output tokens have a weight version"


def _progress(life: Lifecycle, sequence: Sequence, num_pending: int) -> Iterator[str]:
    computed, issued = sequence.num_computed_tokens, sequence.num_issued_tokens
    num_tokens, target_len = sequence.num_tokens, sequence.target_len
    if not 0 <= computed <= issued <= target_len:
        yield f"computed {computed}, issued {issued}, target {target_len}"
    if sequence.is_finished:
        yield "finished, but listed as unfinished"
    if num_tokens >= sequence.max_total_tokens:
        yield f"at its limit of {sequence.max_total_tokens} tokens, but unfinished"
    if target_len > sequence.max_total_tokens:
        yield f"in flight beyond its limit of {sequence.max_total_tokens} tokens"
    capacity = sequence.table.num_tokens_capacity
    is_owner = sequence.row is not None or life.transfers.is_holding(sequence)
    if is_owner != bool(capacity) or issued > capacity:
        yield f"positions for {capacity} tokens are reserved, {issued} issued"
    if target_len - num_tokens != num_pending:
        yield f"{num_pending} tokens may be in flight, not as many as derived"
    if sequence in life.decoding:
        wrong = life.decoding.check(sequence)
        if wrong is not None:
            yield wrong


def _num_pending(life: Lifecycle) -> Counter[SequenceId]:
    """Tokens that the steps in flight may yield for each sequence, from the steps' own rows."""
    pending: Counter[SequenceId] = Counter()
    for step in life.pending:
        for final in step.finals:
            pending[final.seq_id] += 1
        for i, member in enumerate(step.batch.sequences):
            pending[member.seq_id] += step.window * (1 + step.num_draft_tokens_of(i))
    return pending
