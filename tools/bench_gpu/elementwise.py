"""Speed of RMSNorm, SwiGLU, embedding and rows by index, at the sizes of an 8B model."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from gpu_timing import Machine, Row, num_operands, row_of_bytes

from syncline.model_ops_rocm import detect_arch, select

TARGET = 0.75
_VOCABULARY: Final = 151_936
_HIDDEN: Final = 4_096
_STEP: Final = 8_192  # tokens of the step whose rows are gathered


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """The promised shapes, and those of a decode step unless `quick`."""
    for num_tokens in (8_192,) if quick else (8_192, 256, 1):
        yield _norm(machine, num_tokens, 4_096)
        yield _swiglu(machine, num_tokens, 12_288)
    if not quick:
        yield from _embeddings(machine)
        yield from _gathers(machine)


def _norm(machine: Machine, num_tokens: int, width: int) -> Row:
    op = select("rms_norm", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    num_bytes = 4 * num_tokens * width * 2
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_bytes)):
        x, residual = (_random(num_tokens, width) for _ in range(2))
        weight, out = _random(width), _random(num_tokens, width)
        calls.append(
            lambda x=x, weight=weight, residual=residual, out=out: op(  # type: ignore[misc]  # defaults bind the operands
                x, weight, 1e-6, residual_TH=residual, out=out
            )
        )
    return _row(machine, "rms_norm + residual", f"{num_tokens} x {width}", calls, num_bytes)


def _swiglu(machine: Machine, num_tokens: int, width: int) -> Row:
    op = select("silu_and_mul", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    num_bytes = 3 * num_tokens * width * 2
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_bytes)):
        x, out = _random(num_tokens, 2 * width), _random(num_tokens, width)
        calls.append(lambda x=x, out=out: op(x, out=out))  # type: ignore[misc]  # as above
    return _row(machine, "silu_and_mul", f"{num_tokens} x {width}", calls, num_bytes)


def _embeddings(machine: Machine) -> Iterator[Row]:
    op = select("embedding", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    weight = _random(_VOCABULARY, _HIDDEN)
    for num_tokens in (8_192, 256, 1):
        num_bytes = num_tokens * (4 * _HIDDEN + 4)
        calls: list[Callable[[], object]] = []
        for _ in range(num_operands(num_bytes)):
            ids = torch.randint(0, _VOCABULARY, (num_tokens,), dtype=torch.int32, device="cuda")
            calls.append(partial(op, ids, weight, out=_random(num_tokens, _HIDDEN)))
        shape = f"{num_tokens} x {_HIDDEN} of {_VOCABULARY:,}"
        yield _row(machine, "embedding", shape, calls, num_bytes, may_promise=False)


def _gathers(machine: Machine) -> Iterator[Row]:
    """The last tokens of a step's sequences; calls that share a step read different rows of it."""
    op = select("gather_rows", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    steps = [_random(_STEP, _HIDDEN) for _ in range(num_operands(2 * _STEP * _HIDDEN))]
    order = torch.randperm(_STEP, device="cuda")
    for num_rows in (256, 1):
        num_bytes = num_rows * (4 * _HIDDEN + 8)
        calls: list[Callable[[], object]] = []
        for number in range(num_operands(num_bytes)):
            turn, step = divmod(number, len(steps))
            rows_R = order.roll(-turn * num_rows)[:num_rows]
            calls.append(partial(op, steps[step], rows_R, out=_random(num_rows, _HIDDEN)))
        shape = f"{num_rows} x {_HIDDEN} of {_STEP}"
        yield _row(machine, "gather_rows", shape, calls, num_bytes, may_promise=False)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _row(
    machine: Machine,
    op: str,
    shape: str,
    calls: list[Callable[[], object]],
    num_bytes: int,
    *,
    may_promise: bool = True,
) -> Row:
    return row_of_bytes(
        machine,
        op,
        shape,
        calls,
        num_bytes,
        target=TARGET if may_promise and num_bytes > 2**26 else None,
    )
