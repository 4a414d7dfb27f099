"""How long one launch takes on the GPU at hand, and the floors it is held against.

A time is that of a node of a graph: the calls are captured one after another, each with operands of
its own, at least a gigabyte of them together, so that none is found in the cache, and the graph is
replayed; the median replay divided by the number of calls. Operands are random: zeros are faster.
"""

import statistics
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final

import torch

BYTES_TO_CYCLE: Final = 2**30
MAX_CALLS: Final = 512
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU and its two measured rates."""

    name: str
    copy_bytes_per_s: float  # bytes read and bytes written, together
    matmul_flop_per_s: float  # bfloat16, 8,192 in each direction

    @classmethod
    def measure(cls) -> "Machine":
        """Measure the current device, about a second."""
        size = 8_192
        return cls(
            name=torch.cuda.get_device_name(),
            copy_bytes_per_s=2**31 / copy_seconds(2**31),
            matmul_flop_per_s=2 * size**3 / _matmul_seconds(size),
        )


def copy_seconds(num_bytes: int) -> float:
    """Of a node that reads half of the bytes and writes the other half, each node its own.

    By a kernel: in a graph a plain copy is left to the copy engines, which are slower.
    """
    num_calls = max(num_operands(num_bytes), 8)
    size = num_bytes // 8
    shape = (min(num_calls, max(BYTES_TO_CYCLE // num_bytes, 1)), size)
    source = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return node_seconds(
        [
            lambda row=number % shape[0]: torch.bitwise_not(source[row], out=target[row])  # type: ignore[misc]  # a default binds the row
            for number in range(num_calls)
        ]
    )


def _matmul_seconds(size: int) -> float:
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(left)
    return node_seconds([lambda: torch.matmul(left, right, out=out)] * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: an op at one shape."""

    op: str
    shape: str
    backend: str
    seconds: float
    floor_s: float  # what the bytes or the operations alone would take
    target: float | None = None  # the least share of the floor that is promised
    note: str = ""

    @property
    def share(self) -> float:
        return self.floor_s / self.seconds


def num_operands(bytes_per_call: int) -> int:
    """How many sets of operands a graph must cycle over; 2 to MAX_CALLS."""
    return min(max(-(-BYTES_TO_CYCLE // bytes_per_call), 2), MAX_CALLS)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as in torch


def node_seconds(calls: SequenceABC[Call], *, num_replays: int = 15) -> float:
    """Seconds per call, in a graph of all of them in this order.

    Every call runs once first, which compiles it. The calls must not allocate what a later one
    reads: whatever they return is dropped.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # as in torch
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(num_replays):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e-3)
    return statistics.median(times) / len(calls)


def row_of_bytes(  # noqa: PLR0913 - what a row says
    machine: Machine,
    op: str,
    shape: str,
    calls: SequenceABC[Call],
    num_bytes: float,
    *,
    target: float | None = None,
    note: str = "",
) -> Row:
    """Of a Triton op that has to move `num_bytes` in each call."""
    return Row(
        op=op,
        shape=shape,
        backend="triton",
        seconds=node_seconds(calls),
        floor_s=num_bytes / machine.copy_bytes_per_s,
        target=target,
        note=note,
    )
