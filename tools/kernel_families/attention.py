"""The launches of paged attention and of merging its parts."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, operands_of_dtype, pools
from syncline.model_ops_rocm import AttentionMetadata
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVScale
from syncline.model_ops_rocm.triton.configs.attention import (
    CLOSE,
    CLOSE_LONG,
    EIGHTHS,
    HALVES,
    QUARTERS,
)
from syncline.model_ops_rocm.triton.configs.base import ConfigKey

_NUM_HEADS: Final = 32
_NUM_KV_HEADS: Final = 8
_BLOCK_SIZE: Final = 64
_MANY_BLOCKS: Final = 32
# Rows and blocks of a row that these kinds are for, as many rows or one more.
_FEW: Final = {
    EIGHTHS: (1, 32),
    QUARTERS: (1, 8),
    HALVES: (3, 8),
    CLOSE: (7, 8),
    CLOSE_LONG: (7, 16),
}


def _numbers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _metadata(key: ConfigKey, num_tokens: int) -> AttentionMetadata:
    is_decode = key.kind.startswith("decode")
    num_rows = num_tokens if is_decode else 2
    return AttentionMetadata(
        query_start_loc=_numbers(num_rows + 1),
        seq_lens=_numbers(num_rows),
        block_tables=_numbers(num_rows, _FEW.get(key.kind, (0, _MANY_BLOCKS))[1]),
        num_decode_rows=num_rows if is_decode else 0,
        max_query_len=num_tokens,
    )


def _attention(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    head_dim = key.up_to
    if key.kind in _FEW:
        # As many rows as the kind is for, whatever their number is elsewhere.
        num_tokens = _FEW[key.kind][0] + (num_tokens % 2 if key.kind != EIGHTHS else 0)
    for variant, num_blocks in pools(key, _NUM_KV_HEADS * _BLOCK_SIZE * head_dim):
        is_told_apart = key.arch != "sm_90" and head_dim == 128 and key.dtype == torch.bfloat16
        if variant == "over-2-GiB" and not is_told_apart:
            continue
        pool = empty(key, num_blocks, _NUM_KV_HEADS, _BLOCK_SIZE, head_dim)
        arguments: Arguments = {
            "q_TNH": empty(key, num_tokens, _NUM_HEADS, head_dim),
            "k_cache": pool,
            "v_cache": pool,
            "meta": _metadata(key, num_tokens),
            "scale": head_dim**-0.5,
            "out": empty(key, num_tokens, _NUM_HEADS, head_dim),
            "batch_invariant": key.kind == "invariant",
        }
        if key.kind.startswith(("decode_split", "decode_short", "decode_few")):
            # The others compile split rows too, merged by a launch more.
            arguments["counters"] = _numbers(num_tokens * _NUM_KV_HEADS)
        if key.kind.endswith("_fp8"):
            arguments |= _in_codes(key.arch, pool.shape)
        yield variant, arguments
        if key.kind in _FEW and key.kind != EIGHTHS and key.dtype == torch.bfloat16:
            yield "of-sixteen-columns", arguments | _of_heads(key, num_tokens, 16 * _NUM_KV_HEADS)


def _of_heads(key: ConfigKey, num_tokens: int, num_heads: int) -> Arguments:
    shape = (num_tokens, num_heads, key.up_to)
    return {"q_TNH": empty(key, *shape), "out": empty(key, *shape)}


def _in_codes(arch: str, shape: torch.Size) -> Arguments:
    """A cache of the codes that `arch` converts itself, with a scale for each head."""
    code = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    layout = KVLayout(
        order=KVOrder.HND, dtype=code, kernel_block_size=_BLOCK_SIZE, scale=KVScale.HEAD
    )
    pool = torch.empty(shape, dtype=code, device="meta")
    scale = torch.empty(shape[1], dtype=torch.float32, device="meta")
    return {"k_cache": pool, "v_cache": pool, "layout": layout, "kv_scales": (scale, scale)}


def _merges(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    if key.kind != "":
        return  # compiled with the other kind
    shape = (2, num_tokens, _NUM_HEADS, key.up_to)
    lse = torch.empty(shape[:3], dtype=torch.float32, device="meta")
    yield "two", {"parts_PTNH": empty(key, *shape), "lse_PTN": lse}
    if key.dtype == torch.bfloat16:
        # The number of tokens says whether a stride is a multiple of 16.
        narrow = (2, num_tokens, 1, 24)
        lse = torch.empty(narrow[:3], dtype=torch.float32, device="meta")
        yield "narrow", {"parts_PTNH": empty(key, *narrow), "lse_PTN": lse}


def _operands(key: ConfigKey) -> tuple[str, ...]:
    return ("f16 f16",) if key.kind.endswith("_fp8") else operands_of_dtype(key)


CALLS: Final[Mapping[str, Calls]] = {"paged_attention": _attention, "merge_states": _merges}
# Narrow: lengths, block ids and logarithms; values in fp8, which sm_90 copies 8 bytes at a time.
RULES: Final[Mapping[str, Rules]] = {
    "paged_attention": Rules(
        max_narrow_loads=44,
        max_narrow_stores=16,
        # A part reads the other parts' sums, too, when it comes last.
        narrow_loads={"decode_kernel": 47},
        is_matrix=True,
        operands=_operands,
    ),
    "merge_states": Rules(max_narrow_loads=40, max_narrow_stores=1),
}
