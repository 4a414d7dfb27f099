"""Calls that every backend must answer as the reference does, and how near.

Unit: one call of one op. Its tensors lie in buffers that are poisoned around them, and a comparison
looks at the whole buffers, so that a write beside a tensor is seen. Knows no backend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

Arguments = dict[str, object]


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

    def nan(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def distinct(self, count: int, below: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """`count` different numbers in [0, below)."""
        # A copy: on another device a view would leave the rest of its buffer behind.
        drawn = torch.randperm(below, generator=self._generator)[:count].clone()
        return drawn.to(dtype).to(self.device)

    def angles(self, num_positions: int, head_dim: int) -> torch.Tensor:
        """A float32 cos-sin cache."""
        drawn = torch.randn((num_positions, head_dim // 2), generator=self._generator)
        return torch.cat((drawn.cos(), drawn.sin()), dim=-1).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call; `is_recordable` says whether its arguments are all on the device."""

    op: str
    label: str
    build: Callable[[Maker], Arguments]
    is_recordable: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


# (rtol, atol): where sums are taken in another order, or exp is another, the roundings of the
# contract fall differently now and then. An op that is not here copies, or rounds each product, so
# it is bit-equal.
TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = MappingProxyType(
    {
        ("rms_norm", torch.float32): (2e-6, 1e-7),
        ("rms_norm", torch.float16): (2**-9, 1e-6),
        ("rms_norm", torch.bfloat16): (2**-6, 1e-6),
        ("silu_and_mul", torch.float32): (2e-6, 1e-7),
        ("silu_and_mul", torch.float16): (2**-9, 1e-6),
        ("silu_and_mul", torch.bfloat16): (2**-6, 1e-6),
    }
)


def assert_parity(
    case: Case,
    dtype: torch.dtype,
    implementation: Callable[..., object],
    reference: Callable[..., object],
    *,
    device: torch.device | str = "cpu",
) -> None:
    """Both calls give results within the tolerance, and leave the same bytes in every argument."""
    ours, theirs = case.build(Maker(dtype, device)), case.build(Maker(dtype))
    got, expected = implementation(**ours), reference(**theirs)
    rtol, atol = TOLERANCES.get((case.op, dtype), (0.0, 0.0))
    for one, other in zip(results_of(got), results_of(expected), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=rtol, atol=atol, equal_nan=True)
    for name in ours:
        if name == "workspace":
            continue
        exact = (0.0, 0.0) if name != "out" else (rtol, atol)
        for one, other in zip(buffers_of(ours[name]), buffers_of(theirs[name]), strict=True):
            torch.testing.assert_close(
                *(one.cpu(), other), rtol=exact[0], atol=exact[1], equal_nan=True
            )


def results_of(value: object) -> tuple[torch.Tensor, ...]:
    """The tensors among what an op returned, or was given."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple):
        return tuple(entry for entry in value if isinstance(entry, torch.Tensor))
    return ()


def buffers_of(value: object) -> tuple[torch.Tensor, ...]:
    """The whole buffers that an argument's tensors are views of."""
    return tuple(one if one._base is None else one._base for one in results_of(value))


def _norm(*shape: int, pad: int = 0, residual: bool = False, out: bool = False) -> Case:
    def build(make: Maker) -> Arguments:
        x = make.randn(*shape, pad=pad)
        call: Arguments = {"x_TH": x, "weight_H": make.randn(shape[-1]), "eps": 1e-6}
        if residual:
            call["residual_TH"] = make.randn(*shape, pad=pad)
        if out:
            call["out"] = make.nan(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]
        return call

    label = "x".join(map(str, shape)) + ("+residual" if residual else "")
    return Case(op="rms_norm", label=f"{label}+{pad}" if pad else label, build=build)


def _norm_of_heads(make: Maker) -> Arguments:
    fused = make.randn(5, 8 * 32)
    return {"x_TH": fused[:, 64:192].view(5, 4, 32), "weight_H": make.randn(32), "eps": 1e-6}


def _norm_transposed(make: Maker) -> Arguments:
    return {"x_TH": make.randn(24, 7).T, "weight_H": make.randn(24), "eps": 1e-5}


def _swiglu(*shape: int, pad: int = 0, scale: float = 1.0) -> Case:
    def build(make: Maker) -> Arguments:
        x = make.randn(*shape, pad=pad)
        return {"x_T2I": x.mul_(scale), "out": make.nan(*shape[:-1], shape[-1] // 2)}

    label = "x".join(map(str, shape)) + (f"+{pad}" if pad else "")
    return Case(op="silu_and_mul", label=label if scale == 1 else f"{label}-large", build=build)


def _rotary(num_tokens: int, heads: tuple[int, int], head_dim: int, *, out: bool = False) -> Case:
    def build(make: Maker) -> Arguments:
        width = (heads[0] + heads[1]) * head_dim
        fused = make.randn(num_tokens, width, pad=8)
        cut = heads[0] * head_dim
        call: Arguments = {
            "q_TNH": fused[:, :cut].view(num_tokens, heads[0], head_dim),
            "k_TKH": fused[:, cut:].view(num_tokens, heads[1], head_dim),
            "cos_sin_cache": make.angles(50, head_dim),
            "positions_T": make.distinct(num_tokens, 50),
        }
        if out:
            call["out"] = (
                make.nan(num_tokens, heads[0], head_dim),
                make.nan(num_tokens, heads[1], head_dim),
            )
        return call

    label = f"{num_tokens}x{heads[0]}/{heads[1]}x{head_dim}"
    return Case(op="rotary_embedding", label=label, build=build)


def _embedding(num_ids: int, width: int, *, first_id: int | None = None) -> Case:
    def build(make: Maker) -> Arguments:
        call: Arguments = {
            "ids_T": make.distinct(num_ids, 40 if first_id is None else 60, torch.int32),
            "weight_VH": make.randn(40, width, pad=5),
            "out": make.nan(num_ids, width + 1)[:, :width],
        }
        return call if first_id is None else call | {"first_id": first_id}

    label = f"{num_ids}x{width}" + ("" if first_id is None else f"-from-{first_id}")
    return Case(op="embedding", label=label, build=build)


def _gather(num_rows: int, width: int) -> Case:
    def build(make: Maker) -> Arguments:
        rows = make.distinct(num_rows, 12)
        rows[1::3] = -1
        return {"x_TH": make.randn(12, width, pad=3), "rows_R": rows}

    return Case(op="gather_rows", label=f"{num_rows}x{width}", build=build)


def _kv_write(num_tokens: int, heads: int, block_size: int, head_dim: int) -> Case:
    def build(make: Maker) -> Arguments:
        fused = make.randn(num_tokens, 2 * heads * head_dim, pad=8)
        k, v = fused.chunk(2, dim=1)
        cut = heads * head_dim
        slots = make.distinct(num_tokens, 9 * block_size, torch.int32)
        slots[2::4] = -1
        return {
            "k_TKH": k[:, :cut].view(num_tokens, heads, head_dim),
            "v_TKH": v[:, :cut].view(num_tokens, heads, head_dim),
            "k_cache": make.nan(9, heads, block_size, head_dim),
            "v_cache": make.nan(9, heads, block_size, head_dim),
            "slot_mapping": slots,
        }

    return Case(
        op="kv_write", label=f"{num_tokens}x{heads}x{head_dim}-block-{block_size}", build=build
    )


def _kv_copy(shape: tuple[int, int, int, int], *, on_host: bool, skips: bool = False) -> Case:
    def build(make: Maker) -> Arguments:
        call: Arguments = {"k_cache": make.randn(*shape), "v_cache": make.randn(*shape)}
        targets, sources = make.distinct(3, shape[0]), make.distinct(3, shape[0])
        pairs = torch.stack((sources, targets), dim=1)
        if skips:
            pairs[1, 0] = -1
        if on_host:
            return call | {"pairs": tuple((int(one), int(two)) for one, two in pairs.tolist())}
        num_bytes = 2 * 3 * shape[1] * shape[2] * shape[3] * make.dtype.itemsize
        workspace = torch.zeros(num_bytes + 64, dtype=torch.uint8, device=make.device)
        return call | {"pairs": pairs, "workspace": workspace}

    label = "x".join(map(str, shape)) + ("-host" if on_host else "") + ("-skips" if skips else "")
    return Case(op="kv_copy_blocks", label=label, build=build, is_recordable=not on_host)


CASES: Final[tuple[Case, ...]] = (
    _norm(0, 128),
    _norm(1, 1),
    _norm(7, 96, pad=1),
    _norm(3, 257, residual=True, out=True),
    _norm(5, 64, pad=8, residual=True),
    _norm(2, 3, 2, 16, out=True),
    _norm(1, 5_000, residual=True),
    _norm(9, 5, pad=3),
    Case(op="rms_norm", label="heads-of-a-fused-row", build=_norm_of_heads),
    Case(op="rms_norm", label="transposed", build=_norm_transposed),
    _swiglu(0, 64),
    _swiglu(1, 2),
    _swiglu(5, 2 * 333, pad=7),
    _swiglu(2, 3, 6),
    _swiglu(3, 2 * 1_100),
    _swiglu(4, 64, scale=200.0),
    _rotary(0, (4, 2), 32),
    _rotary(1, (1, 1), 2),
    _rotary(3, (5, 3), 64, out=True),
    _rotary(9, (4, 2), 24),
    _rotary(2, (9, 1), 256),
    _embedding(0, 8),
    _embedding(7, 33),
    _embedding(5, 1_030),
    _embedding(13, 12, first_id=7),
    _gather(0, 8),
    _gather(7, 33),
    _kv_write(0, 2, 4, 8),
    _kv_write(1, 1, 1, 1),
    _kv_write(11, 3, 16, 24),
    _kv_write(6, 9, 5, 64),
    _kv_copy((5, 2, 4, 8), on_host=True),
    _kv_copy((7, 3, 5, 9), on_host=False, skips=True),
    _kv_copy((4, 2, 16, 48), on_host=False),
)
