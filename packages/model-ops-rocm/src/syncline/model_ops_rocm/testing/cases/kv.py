"""Calls of the ops that write and copy the KV cache."""

from typing import Final

import torch

from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker


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
    _kv_write(0, 2, 4, 8),
    _kv_write(1, 1, 1, 1),
    _kv_write(11, 3, 16, 24),
    _kv_write(6, 9, 5, 64),
    _kv_copy((5, 2, 4, 8), on_host=True),
    _kv_copy((7, 3, 5, 9), on_host=False, skips=True),
    _kv_copy((4, 2, 16, 48), on_host=False),
)
