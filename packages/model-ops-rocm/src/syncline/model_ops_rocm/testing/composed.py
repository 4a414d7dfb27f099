"""Fused ops from their parts, which they must equal bit for bit; knows no backend.

Unit: one call. The parts are a backend's own, but for what is written in an order of storage that
no separate op has: `kv.tokens` writes that.
"""

from collections.abc import Callable, Mapping
from typing import Any  # Any: the arguments of ops, which differ

import torch

from syncline.model_ops_rocm.kv import KVPool, write_tokens
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
    ops: Mapping[str, Op],
    *,
    caches: tuple[torch.Tensor, torch.Tensor],
    layout: Any,
    out: torch.Tensor | None = None,
    **given: Any,
) -> torch.Tensor:
    q, k, v = given["q_TNH"], given["k_TKH"], given["v_TKH"]
    if given["norm_weights"] is not None:
        q, k = (
            ops["rms_norm"](x, weight, given["eps"], **_chosen(given, "style"))
            for x, weight in zip((q, k), given["norm_weights"], strict=True)
        )
    q, k = ops["rotary_embedding"](
        *(q, k, given["cos_sin_cache"], given["positions_T"]), **_chosen(given, "is_interleaved")
    )
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens:
        pool = KVPool(
            layout=layout,
            num_blocks=caches[0].shape[0],
            block_size=layout.kernel_block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        tensors = {"k": caches[0], "v": caches[1]}
        if given.get("scales") is not None:
            tensors |= {"k_scale": given["scales"][0], "v_scale": given["scales"][1]}
        write_tokens(pool, tensors, k, v, given["slot_mapping"])
    return q if out is None else out.copy_(q)


def _chosen(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: arguments[name]} if name in arguments else {}
