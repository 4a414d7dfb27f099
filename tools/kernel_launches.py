"""Every launch that is compiled without a GPU: each op's wrapper with tensors that hold nothing.

Unit: one row of a configuration table, called as a model would call it. The shapes are those the
row is meant for; `variant` says in what a call differs from the plain one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.triton.configs import CONFIGS, ConfigKey

Arguments = dict[str, object]
_TWO_GIB: Final = 2**31
# The width that stands for a bucket without a bound.
_WIDE: Final = 12_288


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call that uses the configuration `key`."""

    key: ConfigKey
    variant: str
    arguments: Arguments

    @property
    def name(self) -> str:
        dtype = str(self.key.dtype).removeprefix("torch.")
        up_to = "any" if self.key.up_to == 2**31 - 1 else str(self.key.up_to)
        return f"{self.key.op}/{dtype}/{up_to}/{self.variant}"


def launches_for(arch: str, num_tokens: int = 64) -> list[Launch]:
    """At least one for each row of the tables of `arch`, each with `num_tokens` tokens or pairs."""
    return [
        Launch(key=key, variant=variant, arguments=arguments)
        for key in CONFIGS
        if key.arch == arch
        for variant, arguments in _CALLS[key.op](key, num_tokens)
    ]


def _empty(key: ConfigKey, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=key.dtype, device="meta")


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _width(key: ConfigKey) -> int:
    return min(key.up_to, _WIDE)


def _norms(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    width = min(key.up_to, 8_192)
    shape = (num_tokens, 32, width) if width <= 256 else (num_tokens, width)
    plain: Arguments = {
        "x_TH": _empty(key, *shape),
        "weight_H": _empty(key, width),
        "eps": 1e-6,
        "out": _empty(key, *shape),
    }
    yield "plain", plain
    if width > 256:
        yield "residual", plain | {"residual_TH": _empty(key, *shape)}


def _activations(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    yield "plain", {"x_T2I": _empty(key, num_tokens, 2 * _width(key))}


def _rotations(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    head_dim = min(key.up_to, 128)
    fused = _empty(key, num_tokens, 48 * head_dim)
    yield (
        "fused",
        {
            "q_TNH": fused[:, : 32 * head_dim].view(num_tokens, 32, head_dim),
            "k_TKH": fused[:, 32 * head_dim : 40 * head_dim].view(num_tokens, 8, head_dim),
            "cos_sin_cache": torch.empty(4_096, head_dim, device="meta"),
            "positions_T": _ids(num_tokens),
        },
    )


def _lookups(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    whole: Arguments = {"ids_T": _ids(num_tokens), "weight_VH": _empty(key, 1_024, _width(key))}
    yield "whole", whole
    yield "shard", whole | {"first_id": 1_024}


def _gathers(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    yield "plain", {"x_TH": _empty(key, num_tokens, _width(key)), "rows_R": _ids(num_tokens)}


def _writes(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    head_dim = min(key.up_to, 128)
    fused = _empty(key, num_tokens, 48 * head_dim)
    for variant, num_blocks in _pools(key, 8 * 64 * head_dim):
        pool = _empty(key, num_blocks, 8, 64, head_dim)
        arguments: Arguments = {
            "k_TKH": fused[:, 32 * head_dim : 40 * head_dim].view(num_tokens, 8, head_dim),
            "v_TKH": fused[:, 40 * head_dim :].view(num_tokens, 8, head_dim),
            "k_cache": pool,
            "v_cache": pool,
            "slot_mapping": torch.empty(num_tokens, dtype=torch.int32, device="meta"),
        }
        yield variant, arguments


def _copies(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    width = _width(key)
    for variant, num_blocks in _pools(key, width):
        pool = _empty(key, num_blocks, 1, 16, width // 16)
        num_bytes = 2 * num_tokens * width * key.dtype.itemsize
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        arguments: Arguments = {"k_cache": pool, "v_cache": pool, "pairs": _ids(num_tokens, 2)}
        yield variant, arguments | {"workspace": workspace}


def _pools(key: ConfigKey, block_elements: int) -> Iterator[tuple[str, int]]:
    """Storage up to 2 GiB is addressed by 32-bit offsets on AMD, beyond it by pointers."""
    yield "under-2-GiB", 8
    yield "over-2-GiB", _TWO_GIB // (block_elements * key.dtype.itemsize) + 1


_CALLS: Final = {
    "rms_norm": _norms,
    "silu_and_mul": _activations,
    "rotary_embedding": _rotations,
    "embedding": _lookups,
    "gather_rows": _gathers,
    "kv_write": _writes,
    "kv_copy_blocks": _copies,
}
