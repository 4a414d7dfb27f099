"""The launches of the ops that write and copy the KV cache."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, ids, pools, width_of
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVScale
from syncline.model_ops_rocm.triton.configs.base import ConfigKey


def _writes(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    head_dim = min(key.up_to, 128)
    fused = empty(key, num_tokens, 48 * head_dim)
    for variant, num_blocks in pools(key, 8 * 64 * head_dim):
        pool = empty(key, num_blocks, 8, 64, head_dim)
        arguments: Arguments = {
            "k_TKH": fused[:, 32 * head_dim : 40 * head_dim].view(num_tokens, 8, head_dim),
            "v_TKH": fused[:, 40 * head_dim :].view(num_tokens, 8, head_dim),
            "k_cache": pool,
            "v_cache": pool,
            "slot_mapping": torch.empty(num_tokens, dtype=torch.int32, device="meta"),
        }
        yield variant, arguments
        if variant == "under-2-GiB" and key.up_to >= 128 and key.dtype == torch.bfloat16:
            yield "fp8", arguments | _in_codes(key.arch, pool.shape)


def _in_codes(arch: str, shape: torch.Size) -> Arguments:
    """A cache of the codes that `arch` converts to itself, with a scale for each token."""
    code = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    layout = KVLayout(
        order=KVOrder.HND, dtype=code, kernel_block_size=shape[2], scale=KVScale.TOKEN
    )
    pool = torch.empty(shape, dtype=code, device="meta")
    scale = torch.empty(shape[:3], dtype=torch.float32, device="meta")
    return {"k_cache": pool, "v_cache": pool, "layout": layout, "kv_scales": (scale, scale)}


def _copies(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    width = width_of(key)
    for variant, num_blocks in pools(key, width):
        pool = empty(key, num_blocks, 1, 16, width // 16)
        num_bytes = 2 * num_tokens * width * key.dtype.itemsize
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        arguments: Arguments = {"k_cache": pool, "v_cache": pool, "pairs": ids(num_tokens, 2)}
        yield variant, arguments | {"workspace": workspace}


CALLS: Final[Mapping[str, Calls]] = {"kv_write": _writes, "kv_copy_blocks": _copies}
# Narrow: a slot, and the two ids of a pair; codes, of which a lane has 8 bytes, and their scales.
RULES: Final[Mapping[str, Rules]] = {
    "kv_write": Rules(max_narrow_loads=1, max_narrow_stores=4),
    "kv_copy_blocks": Rules(max_narrow_loads=2),
}
