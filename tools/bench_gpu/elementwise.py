"""Speed of RMSNorm, SwiGLU and rotary embedding on large inputs."""

from collections.abc import Callable, Iterator

import torch
from gpu_timing import Machine, Row, node_seconds, num_operands

from syncline.model_ops_rocm import detect_arch, select

TARGET = 0.75


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """The promised shapes, and those of a decode step unless `quick`."""
    for num_tokens in (8_192,) if quick else (8_192, 256, 1):
        yield _norm(machine, num_tokens, 4_096)
        yield _swiglu(machine, num_tokens, 12_288)


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


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _row(
    machine: Machine, op: str, shape: str, calls: list[Callable[[], object]], num_bytes: int
) -> Row:
    return Row(
        op=op,
        shape=shape,
        backend="triton",
        seconds=node_seconds(calls),
        floor_s=num_bytes / machine.copy_bytes_per_s,
        target=TARGET if num_bytes > 2**26 else None,
    )
