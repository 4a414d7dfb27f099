"""The sequences that decode in every step, and a calendar of when one of them needs attention.

Every member is in every plan, so all advance together: a clock of planned tokens tells when a row
runs out of reserved positions or reaches a length limit. A step touches only the rows whose day has
come. A row that advances by more (it has drafts) is filed anew when planned, one that yields fewer
tokens than planned when its result is applied: so every day is exact.
"""

from syncline.scheduler_core.sequence import Cursor, Sequence, cursor_of
from syncline.scheduler_core.types import RowId, SequenceId


class Calendar:
    """Each filed sequence under one day; constant time to file, remove and take."""

    __slots__ = ("_days", "_due")

    def __init__(self) -> None:
        self._days: dict[int, dict[SequenceId, Sequence]] = {}
        self._due: dict[SequenceId, int] = {}

    def file(self, sequence: Sequence, day: int) -> None:
        """The sequence must not be filed already."""
        seq_id = sequence.seq_id
        self._due[seq_id] = day
        entries = self._days.get(day)
        if entries is None:
            self._days[day] = {seq_id: sequence}
        else:
            entries[seq_id] = sequence

    def file_all(self, sequences: list[Sequence], day: int) -> None:
        """None of them may be filed already."""
        entries = self._days.setdefault(day, {})
        due = self._due
        for sequence in sequences:
            seq_id = sequence.seq_id
            due[seq_id] = day
            entries[seq_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """No effect if it is not filed."""
        day = self._due.pop(sequence.seq_id, None)
        if day is None:
            return
        entries = self._days[day]
        del entries[sequence.seq_id]
        if not entries:
            del self._days[day]

    def take(self, day: int) -> list[Sequence]:
        """The sequences filed under this day, which are filed no longer."""
        entries = self._days.pop(day, None)
        if entries is None:
            return []
        for seq_id in entries:
            del self._due[seq_id]
        return list(entries.values())

    def has(self, day: int) -> bool:
        return day in self._days

    def due(self, sequence: Sequence) -> int | None:
        return self._due.get(sequence.seq_id)


class DecodeBatch:
    """The decode rows of one membership, in three aligned columns; never changed once made."""

    __slots__ = ("cursors", "rows", "sequences")

    def __init__(
        self, rows: tuple[RowId, ...], sequences: list[Sequence], cursors: list[Cursor]
    ) -> None:
        self.rows = rows
        self.sequences = sequences
        self.cursors = cursors


class DecodeSet:
    """Members in order of joining. A member holds a row and may yield a token in the next plan."""

    __slots__ = ("_batch", "_blocks", "_clock", "_cursors", "_lengths", "rows")

    def __init__(self) -> None:
        self.rows: dict[SequenceId, RowId] = {}
        self._cursors: dict[SequenceId, Cursor] = {}
        self._batch: DecodeBatch | None = None  # Made when asked for after a change.
        self._clock = 0  # Tokens planned per row so far.
        self._blocks = Calendar()  # The clock at which a row has no reserved position left.
        self._lengths = Calendar()  # The clock at which a row reaches its length limit.

    @property
    def batch(self) -> DecodeBatch:
        """The same object while membership is unchanged."""
        if self._batch is None:
            cursors = list(self._cursors.values())
            sequences = [cursor[3] for cursor in cursors]
            self._batch = DecodeBatch(tuple(self.rows.values()), sequences, cursors)
        return self._batch

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, sequence: Sequence, row: RowId) -> None:
        """From the next plan on the sequence decodes; at least one more token is allowed."""
        self.rows[sequence.seq_id] = row
        self._cursors[sequence.seq_id] = cursor_of(sequence)
        self._batch = None
        self.file(sequence)

    def discard(self, sequence: Sequence) -> None:
        """No effect if it is not a member."""
        if self.rows.pop(sequence.seq_id, None) is None:
            return
        del self._cursors[sequence.seq_id]
        self._batch = None
        self._blocks.remove(sequence)
        self._lengths.remove(sequence)

    def file(self, sequence: Sequence) -> None:
        """Note, or note anew, how long its positions last and how many tokens may be planned."""
        self._blocks.remove(sequence)
        self._lengths.remove(sequence)
        target_len = sequence.target_len
        self.file_blocks(sequence, target_len)
        self._lengths.file(sequence, self._clock + sequence.max_total_tokens - target_len)

    def file_blocks(self, sequence: Sequence, target_len: int) -> None:
        """Note how long the reserved positions last: `target_len` - 1 is the next to be written."""
        room = sequence.table.num_tokens_capacity - target_len + 1
        self._blocks.file(sequence, self._clock + room)

    def num_positions_left(self, sequence: Sequence) -> int:
        """Reserved positions of a member that no planned token needs."""
        day = self._blocks.due(sequence)
        assert day is not None  # Every member is filed.
        return day - self._clock

    def num_tokens_left(self, sequence: Sequence) -> int:
        """Tokens that may still be planned for a member."""
        day = self._lengths.due(sequence)
        assert day is not None  # Every member is filed.
        return day - self._clock

    def postpone(self, sequences: list[Sequence], num_positions: int) -> None:
        """Sequences short at this very clock have got so many positions each."""
        self._blocks.file_all(sequences, self._clock + num_positions)

    def window_within_lengths(self, window: int) -> int:
        """The longest window, at most `window`, that takes no row past its length limit."""
        for shorter in range(1, window):
            if self._lengths.has(self._clock + shorter):
                return shorter
        return window

    def take_short_of_blocks(self, window: int) -> list[Sequence]:
        """Members that lack a reserved position for one of the next `window` tokens.

        Each is to be filed again, or discarded.
        """
        short = self._blocks.take(self._clock)
        for day in range(self._clock + 1, self._clock + window):
            short += self._blocks.take(day)
        return short

    def advance(self, window: int) -> list[Sequence]:
        """`window` tokens per row have been planned; takes those that are at their limit now.

        Each is to be discarded.
        """
        self._clock += window
        return self._lengths.take(self._clock)

    def check(self, sequence: Sequence) -> str | None:
        """What is wrong with the books about this member, if anything."""
        blocks_due = self._blocks.due(sequence)
        length_due = self._lengths.due(sequence)
        room = sequence.table.num_tokens_capacity - (sequence.target_len - 1)
        left = sequence.max_total_tokens - sequence.target_len
        if blocks_due != self._clock + room or room < 0:
            return f"block day {blocks_due} at clock {self._clock} with room for {room}"
        if length_due != self._clock + left or left < 1:
            return f"length day {length_due} at clock {self._clock} with {left} tokens left"
        return None
