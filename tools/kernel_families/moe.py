"""The launches of mixture of experts: 128 experts, 8 of a token, 2,048 x 768, as Qwen3-30B-A3B."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, operands_of_dtype
from syncline.model_ops_rocm.contracts.moe import ExpertMap
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16
from syncline.model_ops_rocm.quant import CodeType, Granularity
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, ConfigKey
from syncline.model_ops_rocm.triton.configs.moe import CODES, FP8_ROWS, GATE_UP, INVARIANT

_NUM_EXPERTS: Final = 128
_TOP_K: Final = 8
_HIDDEN: Final = 2_048
_INTERMEDIATE: Final = 768


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _routes(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    plain: Arguments = {"logits_TE": empty(key, num_tokens, key.up_to // 2), "top_k": _TOP_K}
    yield "plain", plain
    if key.dtype is not torch.bfloat16:
        return
    replicas = _numbers(torch.int32, key.up_to // 2, 2)
    counts = _numbers(torch.int32, key.up_to // 2)
    positions = _numbers(torch.int64, num_tokens)
    more = {"expert_map": ExpertMap(replicas, counts), "positions_T": positions}
    yield "replicas", plain | more


def _sorts(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    if key.kind != "":
        return  # A call that compiles uses both rows.
    sorted_ids: Arguments = {"ids_TK": empty(key, num_tokens, _TOP_K)}
    yield "by-expert", sorted_ids | {"num_groups": _NUM_EXPERTS, "block_size": 16}
    yield "by-rank", sorted_ids | {"num_groups": 8, "group_size": _NUM_EXPERTS // 8}


def _permutations(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    arguments: Arguments = {
        "x_TH": empty(key, num_tokens, _HIDDEN),
        "ids_TK": _numbers(torch.int32, num_tokens, _TOP_K),
        "pairs_C": _numbers(torch.int32, num_tokens * _TOP_K),
        "group_size": _NUM_EXPERTS // 8,
    }
    yield "plain", arguments


def _sums(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    arguments: Arguments = {
        "y_CH": empty(key, num_tokens * _TOP_K, _HIDDEN),
        "weights_TK": _numbers(torch.float32, num_tokens, _TOP_K),
        "places_TK": _numbers(torch.int32, num_tokens, _TOP_K),
    }
    yield "plain", arguments


def _experts(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    """A call that compiles uses every row of its dtype: the widest stands for all."""
    is_invariant, is_codes = (key.kind == f"{GATE_UP}-{one}" for one in (INVARIANT, CODES))
    if key.up_to != ANY_WIDTH or not (is_invariant or is_codes or key.kind == GATE_UP):
        return
    shapes = {
        "w13": (_NUM_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN),
        "w2": (_NUM_EXPERTS, _HIDDEN, _INTERMEDIATE),
    }
    is_fp8 = key.dtype is FP8_ROWS
    x = _numbers(torch.bfloat16 if is_fp8 else key.dtype, num_tokens, _HIDDEN)
    of_arch = torch.float8_e4m3fnuz if key.arch == "gfx942" else torch.float8_e4m3fn
    stored = of_arch if is_fp8 else key.dtype
    plain: Arguments = {
        "x_TH": x,
        **{name: _numbers(stored, *shape) for name, shape in shapes.items()},
        "weights_TK": _numbers(torch.float32, num_tokens, _TOP_K),
        "ids_TK": _numbers(torch.int32, num_tokens, _TOP_K),
        "layout": RowMajor(),
        "batch_invariant": is_invariant,
    }
    if is_fp8:
        blocks = [[size // 128 for size in shape[1:]] for shape in shapes.values()]
        scales = tuple(_numbers(torch.float32, _NUM_EXPERTS, *one) for one in blocks)
        plain["scales"] = scales
        if is_codes:
            yield from _encoded(plain, shapes, of_arch)
        else:
            yield "per-block", plain
        return
    yield "row-major", plain
    if key.dtype is torch.bfloat16 and not is_invariant and key.arch.startswith("gfx"):
        yield "shuffled", plain | {"layout": Shuffle16x16()}


def _encoded(
    per_block: Arguments, shapes: Mapping[str, tuple[int, int, int]], dtype: torch.dtype
) -> Iterator[tuple[str, Arguments]]:
    code = CodeType.E4M3FNUZ if dtype is torch.float8_e4m3fnuz else CodeType.E4M3FN
    of_blocks = Quantised(granularity=Granularity.BLOCK_1X128, code=code)
    yield "per-block", per_block | {"recipe": of_blocks}
    rows = tuple(_numbers(torch.float32, *shape[:2], 1) for shape in shapes.values())
    of_rows = Quantised(granularity=Granularity.TOKEN, code=code)
    yield "per-row", per_block | {"scales": rows, "recipe": of_rows}


def _operands(key: ConfigKey) -> tuple[str, ...]:
    """Codes become x's dtype first, unless those of x are multiplied with them."""
    if key.kind.endswith(CODES):
        return ("e4m3 e4m3",)
    return operands_of_dtype(key._replace(dtype=torch.bfloat16) if key.dtype is FP8_ROWS else key)


CALLS: Final[Mapping[str, Calls]] = {
    "moe_route": _routes,
    "moe_sort": _sorts,
    "moe_permute": _permutations,
    "moe_combine": _sums,
    "moe_experts": _experts,
}
# Narrow: a block's pairs, ids and scales, those of each 128 columns where a row is unrolled, and x
# there in codes; a routing's replicas, results of few rows; sorting moves single numbers only.
RULES: Final[Mapping[str, Rules]] = {
    "moe_route": Rules(max_narrow_loads=12, max_narrow_stores=4),
    "moe_sort": Rules(max_narrow_loads=64, max_narrow_stores=64),
    "moe_permute": Rules(max_narrow_loads=2, max_narrow_stores=1),
    "moe_combine": Rules(max_narrow_loads=16),
    "moe_experts": Rules(
        max_narrow_loads=40,
        narrow_loads={"direct_gate_up_kernel": 65},
        max_narrow_stores=8,
        is_matrix=True,
        operands=_operands,
        without_matrix=frozenset({"direct_gate_up_kernel", "direct_down_kernel"}),
    ),
}
