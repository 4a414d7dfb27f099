"""Fused ops from their parts, which they must equal bit for bit; knows no backend.

Unit: one call; the parts are a backend's own.
"""

from collections.abc import Callable, Mapping
from typing import Any  # Any: the arguments of ops, which differ

import torch

from syncline.model_ops_rocm.testing.parity import Maker

Op = Callable[..., Any]


class RoughMaker(Maker):
    """Makes numbers whose sums depend on their order, where others have sums that do not."""

    __slots__ = ()

    def eighths(self, *shape: int, pad: int = 0) -> torch.Tensor:
        return self.randn(*shape, pad=pad)


def composed(op: str, ops: Mapping[str, Op]) -> Op:
    """The fused `op` by the separate ones among `ops`."""
    known: Mapping[str, Op] = {
        "rms_norm_quant": _rms_norm_quant,
        "silu_and_mul_quant": _silu_and_mul_quant,
        "qk_norm_rope_kv_write": _qk_norm_rope_kv_write,
    }
    return lambda **arguments: known[op](ops, **arguments)


def _rms_norm_quant(
    ops: Mapping[str, Op], *, recipe: Any, out: Any = None, **arguments: Any
) -> Any:
    given = {name: arguments.pop(name, None) for name in ("scale", "nonfinite")}
    return ops["quantise_activation"](ops["rms_norm"](**arguments), recipe, out=out, **given)


def _silu_and_mul_quant(
    ops: Mapping[str, Op], *, x_T2I: torch.Tensor, recipe: Any, **arguments: Any
) -> Any:
    return ops["quantise_activation"](ops["silu_and_mul"](x_T2I), recipe, **arguments)


def _qk_norm_rope_kv_write(
    ops: Mapping[str, Op], *, out: torch.Tensor | None = None, **given: Any
) -> torch.Tensor:
    q, k = given["q_TNH"], given["k_TKH"]
    if given["norm_weights"] is not None:
        q, k = (
            ops["rms_norm"](x, weight, given["eps"], **_chosen(given, "style"))
            for x, weight in zip((q, k), given["norm_weights"], strict=True)
        )
    q, k = ops["rotary_embedding"](
        *(q, k, given["cos_sin_cache"], given["positions_T"]), **_chosen(given, "is_interleaved")
    )
    ops["kv_write"](
        *(k, given["v_TKH"], given["k_cache"], given["v_cache"], given["slot_mapping"]),
        layout=given["layout"],
        **_chosen(given, "kv_scales"),
    )
    return q if out is None else out.copy_(q)


def _chosen(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: arguments[name]} if name in arguments else {}
