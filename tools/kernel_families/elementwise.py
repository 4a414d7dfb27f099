"""The launches of the ops that read and write each number once."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, ids, width_of
from syncline.model_ops_rocm.triton.configs.base import ConfigKey


def _norms(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    width = min(key.up_to, 8_192)
    shape = (num_tokens, 32, width) if width <= 256 else (num_tokens, width)
    plain: Arguments = {
        "x_TH": empty(key, *shape),
        "weight_H": empty(key, width),
        "eps": 1e-6,
        "out": empty(key, *shape),
    }
    yield "plain", plain
    if width > 256:
        yield "residual", plain | {"residual_TH": empty(key, *shape)}


def _activations(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    yield "plain", {"x_T2I": empty(key, num_tokens, 2 * width_of(key))}


def _rotations(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    head_dim = min(key.up_to, 128)
    fused = empty(key, num_tokens, 48 * head_dim)
    yield (
        "fused",
        {
            "q_TNH": fused[:, : 32 * head_dim].view(num_tokens, 32, head_dim),
            "k_TKH": fused[:, 32 * head_dim : 40 * head_dim].view(num_tokens, 8, head_dim),
            "cos_sin_cache": torch.empty(4_096, head_dim, device="meta"),
            "positions_T": ids(num_tokens),
        },
    )


def _lookups(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    whole: Arguments = {"ids_T": ids(num_tokens), "weight_VH": empty(key, 1_024, width_of(key))}
    yield "whole", whole
    yield "shard", whole | {"first_id": 1_024}


def _gathers(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    yield "plain", {"x_TH": empty(key, num_tokens, width_of(key)), "rows_R": ids(num_tokens)}


CALLS: Final[Mapping[str, Calls]] = {
    "rms_norm": _norms,
    "silu_and_mul": _activations,
    "rotary_embedding": _rotations,
    "embedding": _lookups,
    "gather_rows": _gathers,
}
# Narrow: an id, the norm's weight, a position, and the cos and sin that q's heads share, and k's.
RULES: Final[Mapping[str, Rules]] = {
    "rms_norm": Rules(max_narrow_loads=1),
    "silu_and_mul": Rules(),
    "rotary_embedding": Rules(max_narrow_loads=8),
    "embedding": Rules(max_narrow_loads=1),
    "gather_rows": Rules(max_narrow_loads=1),
}
