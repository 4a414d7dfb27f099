"""Reading a counting stream: is every number the successor of the one before, and whose is it.

Pure text; knows no engine. Each request counts in a range of its own, so a number that was never
asked of this request tells where it came from: a *break* is a number that does not follow the one
before it, a *foreign number* is one that another request was counting (its KV was read).
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final

NUM_DIGITS: Final = 8
NUMBER_LEN: Final = NUM_DIGITS + 1  # Digits and the separator.
PROMPT_NUMBERS: Final = 3
FIRST_START: Final = 310_000
RANGE_STRIDE: Final = 1_000_000
MAX_REQUESTS: Final = (10**NUM_DIGITS - FIRST_START) // RANGE_STRIDE


def range_start(request_index: int) -> int:
    """The first number of a request's prompt."""
    if not 0 <= request_index < MAX_REQUESTS:
        raise ValueError(f"request index must be in [0, {MAX_REQUESTS}), got {request_index}")
    return FIRST_START + request_index * RANGE_STRIDE


def count_text(first: int, num_numbers: int) -> str:
    """`num_numbers` numbers counting up, each followed by the separator."""
    return "".join(f"{first + i:0{NUM_DIGITS}d}," for i in range(num_numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one request wrote after its prompt.

    num_breaks   complete numbers that do not follow the number before them; text that is no
                 number at all counts too.
    foreign      the numbers of other requests' ranges, with the request they belong to.
    is_clean     the text is exactly the expected one, a cut-off last number included.
    """

    request_index: int
    num_numbers: int
    num_breaks: int
    foreign: tuple[tuple[int, int], ...]
    is_clean: bool
    first_break: str = ""


def read_stream(request_index: int, text: str, num_requests: int) -> Stream:
    """Judge the output text of request `request_index` of `num_requests` that ran together."""
    first_expected = range_start(request_index) + PROMPT_NUMBERS
    # Numbers a request could have reached by now: one more than its text holds is rounding up.
    reach = PROMPT_NUMBERS + len(text) // NUMBER_LEN + 1
    parts = text.split(",")
    previous: int | None = first_expected - 1
    num_breaks = 0
    first_break = ""
    foreign: list[tuple[int, int]] = []
    for part in parts[:-1]:
        number = int(part) if len(part) == NUM_DIGITS and part.isdecimal() else None
        if number is None or previous is None or number != previous + 1:
            num_breaks += 1
            first_break = first_break or f"{previous} -> {part!r}"
        if number is not None:
            owner = range_owner(number, num_requests, reach)
            if owner is not None and owner != request_index:
                foreign.append((number, owner))
        previous = number
    expected = count_text(first_expected, len(text) // NUMBER_LEN + 1)
    is_clean = expected.startswith(text)
    if not is_clean and num_breaks == 0:
        num_breaks, first_break = 1, f"{previous} -> {parts[-1]!r}"  # The cut-off last number.
    return Stream(
        request_index=request_index,
        num_numbers=len(parts) - 1,
        num_breaks=num_breaks,
        foreign=tuple(foreign),
        is_clean=is_clean,
        first_break=first_break,
    )


def range_owner(number: int, num_requests: int, reach: int) -> int | None:
    """The request whose first `reach` numbers hold `number`; None when it is nobody's."""
    index, offset = divmod(number - FIRST_START, RANGE_STRIDE)
    return index if 0 <= index < num_requests and offset < reach else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The streams of one run, summed."""

    num_clean: int
    num_broken: int  # Streams with a break and no foreign number.
    num_drifted: int  # Streams with a foreign number.
    num_breaks: int
    num_foreign_numbers: int


def sum_streams(streams: SequenceABC[Stream]) -> Counts:
    drifted = sum(1 for stream in streams if stream.foreign)
    clean = sum(1 for stream in streams if stream.is_clean)
    return Counts(
        num_clean=clean,
        num_broken=len(streams) - clean - drifted,
        num_drifted=drifted,
        num_breaks=sum(stream.num_breaks for stream in streams),
        num_foreign_numbers=sum(len(stream.foreign) for stream in streams),
    )
