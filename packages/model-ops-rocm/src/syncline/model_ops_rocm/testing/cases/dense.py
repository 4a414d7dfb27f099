"""Calls of the ops that read and write each number once."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.contracts import NormStyle
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

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


def _styled(style: NormStyle, *shape: int, invariant: bool = False) -> Case:
    def build(make: Maker) -> Arguments:
        return {
            "x_TH": make.randn(*shape),
            "weight_H": make.randn(shape[-1]),
            "eps": 1e-5,
            "style": style,
            "batch_invariant": invariant,
            "residual_TH": make.randn(*shape),
            "out": make.nan(*shape),
        }

    label = "x".join(map(str, shape)) + f"-{style}" + ("-invariant" if invariant else "")
    return Case(op="rms_norm", label=label, build=build)


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


def _partial_rotary(width: int, head_dim: int, *, is_interleaved: bool) -> Case:
    def build(make: Maker) -> Arguments:
        return {
            "q_TNH": make.randn(5, 3, head_dim, pad=4),
            "k_TKH": make.randn(5, 2, head_dim),
            "cos_sin_cache": make.angles(50, width),
            "positions_T": make.distinct(5, 50, torch.int32),
            "is_interleaved": is_interleaved,
        }

    kind = "interleaved" if is_interleaved else "neox"
    return Case(op="rotary_embedding", label=f"{width}-of-{head_dim}-{kind}", build=build)


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
    _styled(NormStyle.WEIGHT_THEN_ROUND, 3, 257),
    _styled(NormStyle.ONE_PLUS_WEIGHT_THEN_ROUND, 2, 3, 96),
    _styled(NormStyle.ROUND_THEN_WEIGHT, 5, 640, invariant=True),
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
    _partial_rotary(16, 64, is_interleaved=False),
    _partial_rotary(10, 24, is_interleaved=False),
    _partial_rotary(64, 64, is_interleaved=True),
    _partial_rotary(16, 24, is_interleaved=True),
    _embedding(0, 8),
    _embedding(7, 33),
    _embedding(5, 1_030),
    _embedding(13, 12, first_id=7),
    _gather(0, 8),
    _gather(7, 33),
)
