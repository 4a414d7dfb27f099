"""Fused ops from their parts, which they must equal bit for bit; knows no backend.

Unit: one call; the parts are a backend's own.
"""

from collections.abc import Callable, Mapping
from typing import Any  # Any: the arguments of ops, which differ

import torch

from syncline.model_ops_rocm.testing.bits import flat_bits
from syncline.model_ops_rocm.testing.parity import Case, Maker, buffers_of, results_of

Op = Callable[..., Any]


class RoughMaker(Maker):
    """Makes numbers whose sums depend on their order, where others have sums that do not."""

    __slots__ = ()

    def eighths(self, *shape: int, pad: int = 0) -> torch.Tensor:
        return self.randn(*shape, pad=pad)


def assert_is_composed(
    case: Case, dtype: torch.dtype, ops: Mapping[str, Op], device: str = "cpu"
) -> None:
    """The fused op leaves the bits that its parts leave, in results and in arguments."""
    ours, theirs = (case.build(RoughMaker(dtype, device, seed=1)) for _ in range(2))
    got, expected = ops[case.op](**ours), composed(case.op, ops)(**theirs)
    pairs = list(zip(results_of(got), results_of(expected), strict=True))
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        pairs += zip(buffers_of(one), buffers_of(other), strict=True)
    assert len(pairs) > 2
    for one_, other_ in pairs:
        assert torch.equal(flat_bits(one_), flat_bits(other_))


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
