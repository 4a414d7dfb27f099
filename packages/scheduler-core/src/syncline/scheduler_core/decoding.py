"""The sequences that decode in every step, and a calendar of when one of them needs attention.

Every member is in every plan, so all advance together: a clock of planned tokens tells when a row
runs out of reserved positions or reaches a length limit. A step touches only the rows whose day has
come. A row that advances by more (it has drafts) is filed anew when planned, one that yields fewer
tokens than planned when its result is applied: so every day is exact.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceABC

from syncline.scheduler_core.columns import OutputColumns
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import RowId, SequenceId


class _Day:
    """The sequences filed under one date. Dates move, the object stays."""

    __slots__ = ("date", "sequences")

    def __init__(self, date: int) -> None:
        self.date = date
        self.sequences: dict[SequenceId, Sequence] = {}


class Calendar:
    """Each filed sequence under one day; constant time to file, remove, take, and move a day."""

    __slots__ = ("_by_date", "_filed")

    def __init__(self) -> None:
        self._by_date: dict[int, _Day] = {}
        self._filed: dict[SequenceId, _Day] = {}

    def file(self, sequence: Sequence, date: int) -> None:
        """The sequence must not be filed already."""
        day = self._by_date.get(date)
        if day is None:
            day = self._by_date[date] = _Day(date)
        day.sequences[sequence.seq_id] = sequence
        self._filed[sequence.seq_id] = day

    def remove(self, sequence: Sequence) -> None:
        """No effect if it is not filed."""
        day = self._filed.pop(sequence.seq_id, None)
        if day is None:
            return
        del day.sequences[sequence.seq_id]
        if not day.sequences:
            del self._by_date[day.date]

    def on(self, date: int) -> Collection[Sequence]:
        """The sequences filed under this date, which stay filed."""
        day = self._by_date.get(date)
        return () if day is None else day.sequences.values()

    def take(self, date: int) -> list[Sequence]:
        """The sequences filed under this date, which are filed no longer."""
        day = self._by_date.pop(date, None)
        if day is None:
            return []
        for seq_id in day.sequences:
            del self._filed[seq_id]
        return list(day.sequences.values())

    def move(self, date: int, later: int) -> None:
        """Everybody filed under `date` is now filed under `later`."""
        if self.has(later):
            for sequence in self.take(date):
                self.file(sequence, later)
            return
        day = self._by_date.pop(date)
        day.date = later
        self._by_date[later] = day

    def shift(self, sequences: SequenceABC[Sequence], amounts: SequenceABC[int]) -> None:
        """File each by so many dates later; one that is not filed stays so."""
        by_date, filed = self._by_date, self._filed
        for sequence, amount in zip(sequences, amounts, strict=True):
            if not amount:
                continue
            seq_id = sequence.seq_id
            day = filed.get(seq_id)
            if day is None:
                continue
            del day.sequences[seq_id]
            if not day.sequences:
                del by_date[day.date]
            date = day.date + amount
            later = by_date.get(date)
            if later is None:
                later = by_date[date] = _Day(date)
            later.sequences[seq_id] = sequence
            filed[seq_id] = later

    def dates(self, sequences: SequenceABC[Sequence]) -> list[int]:
        """Of sequences that are all filed."""
        filed = self._filed
        return [filed[sequence.seq_id].date for sequence in sequences]

    def has(self, date: int) -> bool:
        return date in self._by_date

    def due(self, sequence: Sequence) -> int | None:
        day = self._filed.get(sequence.seq_id)
        return None if day is None else day.date


class DecodeBatch:
    """The decode rows of one membership, in three aligned columns; never changed once made.

    ending       every id that may end a member
    is_watched   a member must be looked at after every token
    """

    __slots__ = ("ending", "is_watched", "outputs", "rows", "sequences")

    def __init__(
        self, rows: tuple[RowId, ...], sequences: list[Sequence], endings: "EndingIds"
    ) -> None:
        self.rows = rows
        self.sequences = sequences
        self.outputs: list[OutputColumns] = [sequence.outputs for sequence in sequences]
        self.ending = endings.union
        self.is_watched = endings.num_watched > 0

    def candidates(self, token_ids: SequenceABC[int]) -> list[Sequence]:
        """Unfinished members whose token, here in their order, may end them."""
        if not self.is_watched and self.ending.isdisjoint(token_ids):
            return []
        return [
            sequence
            for sequence, token_id in zip(self.sequences, token_ids, strict=False)
            if sequence.may_end_with(token_id) and not sequence.is_finished
        ]


class EndingIds:
    """The ids that may end any of the members, counted so that members may come and go."""

    __slots__ = ("_num_members", "num_watched", "union")

    def __init__(self) -> None:
        self._num_members: dict[frozenset[int], int] = {}
        self.num_watched = 0  # Members of which every token must be looked at.
        self.union: frozenset[int] = frozenset()

    def add(self, ids: frozenset[int] | None) -> None:
        if ids is None:
            self.num_watched += 1
        elif ids in self._num_members:
            self._num_members[ids] += 1
        else:
            self._num_members[ids] = 1
            self.union |= ids

    def discard(self, ids: frozenset[int] | None) -> None:
        """Undo one `add` of the same ids."""
        if ids is None:
            self.num_watched -= 1
            return
        self._num_members[ids] -= 1
        if not self._num_members[ids]:
            del self._num_members[ids]
            self.union = frozenset().union(*self._num_members)


class DecodeSet:
    """A member holds a row and may yield a token in the next plan.

    Members keep their places: one that joins takes the next, and when one leaves, the last takes
    its place. So a change of membership concerns a place or two, not everyone behind it.
    """

    __slots__ = (
        "_batch",
        "_blocks",
        "_clock",
        "_endings",
        "_lengths",
        "_places",
        "_rows",
        "_sequences",
    )

    def __init__(self) -> None:
        self._rows: list[RowId] = []
        self._sequences: list[Sequence] = []
        self._places: dict[SequenceId, int] = {}  # Index in both lists.
        self._endings = EndingIds()
        self._batch: DecodeBatch | None = None  # Made when asked for after a change.
        self._clock = 0  # Tokens planned per row so far.
        self._blocks = Calendar()  # The clock at which a row has no reserved position left.
        self._lengths = Calendar()  # The clock at which a row reaches its length limit.

    @property
    def batch(self) -> DecodeBatch:
        """The same object while membership is unchanged."""
        if self._batch is None:
            self._batch = DecodeBatch(tuple(self._rows), self._sequences.copy(), self._endings)
        return self._batch

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._places

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, sequence: Sequence, row: RowId) -> None:
        """From the next plan on the sequence decodes; at least one more token is allowed."""
        self._places[sequence.seq_id] = len(self._rows)
        self._rows.append(row)
        self._sequences.append(sequence)
        self._endings.add(sequence.stop_candidates)
        self._batch = None
        self.file(sequence)

    def discard(self, sequence: Sequence) -> None:
        """No effect if it is not a member."""
        place = self._places.pop(sequence.seq_id, None)
        if place is None:
            return
        row, last = self._rows.pop(), self._sequences.pop()
        if last is not sequence:
            self._rows[place], self._sequences[place] = row, last
            self._places[last.seq_id] = place
        self._endings.discard(sequence.stop_candidates)
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

    def positions_left(self) -> list[int]:
        """Of each member, in the batch's order: reserved positions that no planned token needs."""
        clock = self._clock
        return [date - clock for date in self._blocks.dates(self._sequences)]

    def tokens_left(self) -> list[int]:
        """Of each member, in the batch's order: tokens that may still be planned."""
        clock = self._clock
        return [date - clock for date in self._lengths.dates(self._sequences)]

    def get_positions(self, sequence: Sequence, num_positions: int) -> None:
        """So many more are reserved for this member."""
        self._blocks.shift([sequence], [num_positions])

    def get_tokens_back(
        self, sequences: SequenceABC[Sequence], num_tokens: SequenceABC[int]
    ) -> None:
        """So many planned tokens of each have not come, or are planned beyond the clock's if
        negative. No effect on who is no member.
        """
        self._blocks.shift(sequences, num_tokens)
        self._lengths.shift(sequences, num_tokens)

    @property
    def short_of_blocks(self) -> Collection[Sequence]:
        """Members that have no reserved position for their next token."""
        return self._blocks.on(self._clock)

    def postpone_short(self, num_positions: int) -> None:
        """Those `short_of_blocks` have got so many positions each."""
        self._blocks.move(self._clock, self._clock + num_positions)

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
        for date in range(self._clock + 1, self._clock + window):
            short += self._blocks.take(date)
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
        place = self._places[sequence.seq_id]
        if self._sequences[place] is not sequence or self._rows[place] != sequence.row:
            return f"place {place} of the batch is somebody else's"
        if (
            sequence.stop_candidates is not None
            and not sequence.stop_candidates <= self.batch.ending
        ):
            return "the batch does not know every id that may end it"
        if sequence.stop_candidates is None and not self.batch.is_watched:
            return "the batch does not know that every token must be looked at"
        return None
