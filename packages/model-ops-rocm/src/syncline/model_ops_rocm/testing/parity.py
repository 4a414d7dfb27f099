"""Calls that every backend must answer as the reference does, and how near.

Unit: one call of one op. Its tensors lie in buffers that are poisoned around them, and a comparison
looks at the whole buffers, so that a write beside a tensor is seen. Knows no backend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Final, TypeVar

import torch

Arguments = dict[str, object]
Result = TypeVar("Result")
# Arguments that an op computes, so that a tolerance holds for them.
RESULTS: Final = ("out", "lse_TN")


class Maker:
    """Makes the tensors of one call on one device; equal seeds give equal numbers everywhere."""

    __slots__ = ("_generator", "device", "dtype")

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0):
        self.dtype = dtype
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, pad: int = 0) -> torch.Tensor:
        """Normal numbers; with `pad`, a view whose rows lie `pad` NaN apart."""
        drawn = torch.randn(shape, generator=self._generator).to(self.dtype)
        wide = self.nan(*shape[:-1], shape[-1] + pad)
        wide[..., : shape[-1]] = drawn.to(self.device)
        return wide[..., : shape[-1]]

    def eighths(self, *shape: int, pad: int = 0) -> torch.Tensor:
        """As `randn`: multiples of 1/8 within +-4, whose squares sum exactly in any order."""
        wide = self.randn(*shape, pad=pad)
        return wide.mul_(8).round_().div_(8).clamp_(-4, 4)

    def nan(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def distinct(self, count: int, below: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """`count` different numbers in [0, below)."""
        # A copy: on another device a view would leave the rest of its buffer behind.
        drawn = torch.randperm(below, generator=self._generator)[:count].clone()
        return drawn.to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, pad: int = 0) -> torch.Tensor:
        """int32 in [low, high); with `pad`, a view whose rows lie `pad` large numbers apart."""
        drawn = torch.randint(low, high, shape, generator=self._generator, dtype=torch.int32)
        wide = torch.full((*shape[:-1], shape[-1] + pad), 2**30, dtype=torch.int32)
        wide[..., : shape[-1]] = drawn
        return wide.to(self.device)[..., : shape[-1]]

    def angles(self, num_positions: int, head_dim: int) -> torch.Tensor:
        """A float32 cos-sin cache."""
        drawn = torch.randn((num_positions, head_dim // 2), generator=self._generator)
        return torch.cat((drawn.cos(), drawn.sin()), dim=-1).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call; `is_recordable` says whether its arguments are all on the device.

    `jump` is what a result moves by, beyond the tolerance of its op, where a number inside rounds
    the other way and so falls on another code. That befalls few: as a whole the results must then
    be near, too.
    """

    op: str
    label: str
    build: Callable[[Maker], Arguments]
    is_recordable: bool = True
    jump: float = 0.0

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def assert_parity(
    case: Case,
    dtype: torch.dtype,
    implementation: Callable[..., object],
    reference: Callable[..., object],
    *,
    tolerance: tuple[float, float] = (0.0, 0.0),
    device: torch.device | str = "cpu",
) -> None:
    """Both calls give results within the tolerance, and leave the same bytes in every argument."""
    tolerance = tolerance[0], tolerance[1] + case.jump
    ours, theirs = case.build(Maker(dtype, device)), case.build(Maker(dtype))
    got, expected = implementation(**ours), reference(**theirs)
    for one, other in zip(results_of(got), results_of(expected), strict=True):
        _assert_close(one, other, tolerance)
        if case.jump:
            _assert_near(one, other, dtype)
    for name in ours:
        if name == "workspace":
            continue
        allowed = (0.0, 0.0) if name not in RESULTS else tolerance
        for one, other in zip(buffers_of(ours[name]), buffers_of(theirs[name]), strict=True):
            _assert_close(one, other, allowed)


def _assert_close(
    got: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]
) -> None:
    """Codes of a byte are compared as bytes, or as numbers where a tolerance is allowed."""
    got = got.cpu()
    if got.is_floating_point() and got.itemsize == 1:
        assert got.dtype is expected.dtype
        is_exact = tolerance == (0.0, 0.0)
        got, expected = (
            one.view(torch.uint8) if is_exact else one.float() for one in (got, expected)
        )
    torch.testing.assert_close(got, expected, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)


def _assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """By the norm: what is off by d falls on another code, a step s away, with probability d / s.

    The mean square of that is s * d: a step of e4m3fn is an eighth at most, and d is the rounding
    of `dtype`. One number on another code is more than that where float32 hardly ever rounds so.
    """
    got, expected = got.cpu().double(), expected.double()
    bound = (2**-3 * torch.finfo(dtype).eps) ** 0.5 + 2**-8
    assert float((got - expected).norm()) <= bound * float(expected.norm())


def results_of(value: object) -> tuple[torch.Tensor, ...]:
    """The tensors among what an op returned, or was given: in tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, field.name) for field in fields(value))
    elif isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return tuple(tensor for entry in value for tensor in results_of(entry))
    return ()


def buffers_of(value: object) -> tuple[torch.Tensor, ...]:
    """The whole buffers that an argument's tensors are views of."""
    return tuple(one if one._base is None else one._base for one in results_of(value))


def recorded(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of the call, which has run once before, and what it returned."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
