"""What sequences have produced, packed: token ids and logprobs, one of each per token.

A decode step yields one token for each of many sequences. Its results are kept as one line of a
`TokenLog`, and a sequence gets its own column of the lines when somebody reads it, when it leaves
or moves within the batch, or when the log is full. Lengths are exact at any time:

    len(outputs) = what has been delivered + the lines since then, while the log has a place for it

    line 0   a0 b0 c0 . \
    line 1   a1 b1 c1 .  > one token per member and line, padded to the log's width
    line 2   a2 b2 c2 . /
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from struct import error as struct_error
from struct import pack
from typing import Final, TypeVar, overload

from syncline.scheduler_core.errors import StateError

MAX_TOKEN_ID: Final = 2**32 - 1
"""The largest id that is kept."""

LOG_LINES: Final = 64
"""Steps between deliveries to everybody: their cost is shared by so many steps."""

_T = TypeVar("_T", int, float)


def pack_logprobs(logprobs: SequenceABC[float]) -> "array[float]":
    """Raises TypeError for what is no number."""
    try:
        return array("d", pack(f"{len(logprobs)}d", *logprobs))  # Three times as fast as array().
    except struct_error as error:
        raise TypeError(f"logprobs must be numbers: {error}") from None


def pack_ids(token_ids: SequenceABC[int]) -> "array[int]":
    """Raises OverflowError for an id outside [0, MAX_TOKEN_ID], TypeError for no integer."""
    return array("I", token_ids)


class OutputColumns:
    """The output of one sequence. It grows in all columns together, or not at all.

    log        where lines wait that have not been delivered; None: there are none
    position   its place in a line of the log
    start      the first line that has not been delivered
    """

    __slots__ = ("ids", "is_closed", "log", "logprobs", "position", "start")

    def __init__(self) -> None:
        self.ids = array("I")
        self.logprobs = array("d")
        self.is_closed = False
        self.log: TokenLog | None = None
        self.position = 0
        self.start = 0

    def __len__(self) -> int:
        log = self.log
        return len(self.ids) if log is None else len(self.ids) + log.num_lines - self.start

    def settle(self) -> None:
        """Take what waits in the log, so that the packed columns are whole."""
        if self.log is not None:
            self.log.deliver(self)

    def append(self, token_ids: SequenceABC[int], logprobs: SequenceABC[float]) -> None:
        """Raises ValueError, with nothing changed, for a value that cannot be kept."""
        if len(token_ids) != len(logprobs):
            raise ValueError(
                f"logprobs must be one per token ({len(token_ids)}), got {len(logprobs)}"
            )
        try:
            ids = pack_ids(token_ids)
        except OverflowError:
            raise ValueError(
                f"token_ids must be in [0, {MAX_TOKEN_ID}], got {list(token_ids)}"
            ) from None
        values = pack_logprobs(logprobs)
        self.settle()
        self.ids.extend(ids)
        self.logprobs.extend(values)

    def extend(self, token_ids: "array[int]", logprobs: "array[float]") -> None:
        """`append` of packed values, which have been checked."""
        if self.log is not None:
            self.log.deliver(self)
        self.ids.extend(token_ids)
        self.logprobs.extend(logprobs)

    def truncate(self, num_tokens: int) -> None:
        """Drop what lies beyond so many tokens."""
        self.settle()
        del self.ids[num_tokens:]
        del self.logprobs[num_tokens:]

    def close(self) -> None:
        """Nothing is appended any more: lines to come do not count for this sequence."""
        if self.log is not None:
            self.log.release(self)
        self.is_closed = True


class TokenLog:
    """The latest decode results of many sequences, one line per step.

    `members` of a line are the sequences' outputs in the order of its tokens. While the same list
    object is passed, a line costs no work per member.
    """

    __slots__ = (
        "_ids",
        "_logprobs",
        "_max_lines",
        "_members",
        "_pad_ids",
        "_pad_logprobs",
        "_places",
        "_width",
        "num_lines",
    )

    def __init__(self, max_lines: int = LOG_LINES) -> None:
        if max_lines < 1:
            raise ValueError(f"max_lines must be at least 1, got {max_lines}")
        self._max_lines = max_lines
        self._ids = array("I")
        self._logprobs = array("d")
        self._members: SequenceABC[OutputColumns] = ()  # Of the latest line; identity counts.
        self._places: list[OutputColumns | None] = []  # Who gets each column; None: nobody.
        self._pad_ids = array("I")
        self._pad_logprobs = array("d")
        self._width = 0
        self.num_lines = 0

    def append(
        self, members: SequenceABC[OutputColumns], ids: "array[int]", logprobs: "array[float]"
    ) -> None:
        """One token for each member, in this order; a closed member's is nobody's."""
        if members is not self._members:
            self._seat(members)
        if self.num_lines == self._max_lines:
            self._deliver_all()
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)
        if self._pad_ids:
            self._ids.extend(self._pad_ids)
            self._logprobs.extend(self._pad_logprobs)
        self.num_lines += 1

    def deliver(self, outputs: OutputColumns) -> None:
        """Give a member its own column of the lines since its last delivery."""
        if outputs.start < self.num_lines:
            first = outputs.start * self._width + outputs.position
            outputs.ids.extend(self._ids[first :: self._width])
            outputs.logprobs.extend(self._logprobs[first :: self._width])
            outputs.start = self.num_lines

    def release(self, outputs: OutputColumns) -> None:
        """Deliver for the last time: the place is nobody's."""
        self.deliver(outputs)
        self._places[outputs.position] = None
        outputs.log = None

    def check(self) -> None:
        """Raise StateError if lines, places and members contradict each other."""
        size = self.num_lines * self._width
        if not len(self._ids) == len(self._logprobs) == size or self.num_lines > self._max_lines:
            raise StateError(
                f"the log has {len(self._ids)} ids and {len(self._logprobs)} logprobs in "
                f"{self.num_lines} lines of {self._width}"
            )
        for position, outputs in enumerate(self._places):
            if outputs is None:
                continue
            if outputs.log is not self or outputs.position != position or outputs.is_closed:
                raise StateError(f"place {position} of the log belongs to somebody else")
            if outputs is not self._members[position] or outputs.start > self.num_lines:
                raise StateError(f"place {position} of the log is out of date")

    def has_place_for(self, outputs: OutputColumns) -> bool:
        """Whether the log knows these outputs under the position that they name."""
        position = outputs.position
        return position < len(self._places) and self._places[position] is outputs

    def _seat(self, members: SequenceABC[OutputColumns]) -> None:
        """Other members, or the same ones in another order, from the next line on."""
        places = self._places
        pairs = zip(places, members, strict=False)
        moved = [k for k, (old, new) in enumerate(pairs) if old is not new]
        moved += range(min(len(places), len(members)), max(len(places), len(members)))
        # Everybody who moves gets up before anybody sits down.
        for k in moved:
            outputs = places[k] if k < len(places) else None
            if outputs is not None:
                self.release(outputs)
        del places[len(members) :]
        places += [None] * (len(members) - len(places))
        if len(members) > self._width:
            self._widen(len(members))
        for k in moved:
            if k < len(members) and not members[k].is_closed:
                outputs = members[k]
                places[k] = outputs
                outputs.log, outputs.position, outputs.start = self, k, self.num_lines
        self._members = members
        num_padding = self._width - len(members)
        self._pad_ids = array("I", (0,)) * num_padding
        self._pad_logprobs = array("d", (0.0,)) * num_padding

    def _widen(self, num_members: int) -> None:
        """Room for so many members at least, and for half as many again."""
        self._deliver_all()
        self._width = num_members + num_members // 2

    def _deliver_all(self) -> None:
        """Empty the log."""
        ids, logprobs, width = self._ids, self._logprobs, self._width
        for position, outputs in enumerate(self._places):
            if outputs is not None:
                first = outputs.start * width + position
                outputs.ids.extend(ids[first::width])
                outputs.logprobs.extend(logprobs[first::width])
                outputs.start = 0
        del ids[:]
        del logprobs[:]
        self.num_lines = 0


class Column(SequenceABC[_T]):
    """One output column of a sequence as it stands: reads like a list, cannot be changed.

    A slice is a list. Equal to a list, or to another column, with the same entries.
    """

    __slots__ = ("_outputs", "_values")

    def __init__(self, outputs: OutputColumns, values: "array[_T]") -> None:
        self._outputs = outputs
        self._values: array[_T] = values

    def __len__(self) -> int:
        return len(self._outputs)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        self._outputs.settle()
        if isinstance(index, slice):
            return self._values[index].tolist()
        return self._values[index]

    def __iter__(self) -> Iterator[_T]:
        return iter(self.to_list())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return self.to_list() == other.to_list()
        return self.to_list() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # It changes, like a list.

    def __repr__(self) -> str:
        return repr(self.to_list())

    def to_list(self) -> list[_T]:
        self._outputs.settle()
        return self._values.tolist()
