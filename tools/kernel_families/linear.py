"""The launches of the products with a stored weight."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, operands_of_dtype
from syncline.model_ops_rocm import Quantised, RowMajor, Shuffle16x16, StorageFormat
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType
from syncline.model_ops_rocm.triton.configs import CONFIGS
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH, ConfigKey
from syncline.model_ops_rocm.triton.configs.linear import (
    CODES,
    CODES_OF_BLOCKS,
    DECODED,
    DECODED_FP32,
    DEEP,
    HALVES,
    INVARIANT,
    LONE,
    LOW,
    MX,
    NARROW,
    NARROW_VECTOR_ROWS,
    QUARTERS,
    SHALLOW,
    SMALL,
    SQUARE,
    VECTOR,
)
from syncline.model_ops_rocm.triton.configs.linear_many import MANY, TILE_ROWS, WIDE
from syncline.model_ops_rocm.triton.configs.linear_specialised import ROWS, SPECIALISED, THIRDS

# Rows and K of the weight that the rows of a kind are for.
_SHAPES: Final = {
    NARROW: (4_096, 4_096),
    QUARTERS: (4_096, 4_096),
    HALVES: (5_120, 4_096),
    DEEP: (4_096, 12_288),
    SMALL: (2_048, 2_048),
    SHALLOW: (4_096, 1_024),
    LONE: (7_168, 4_096),
    THIRDS: (6_144, 4_096),
}
_SHAPES_OF_MANY: Final = {
    QUARTERS: (4_096, 12_288),
    HALVES: (5_120, 12_288),
    WIDE: (24_576, 4_096),
}
_SHAPE: Final = (12_288, 4_096)
_ROWS_OF_VECTORS: Final = {NARROW: NARROW_VECTOR_ROWS, LOW: 2_048, SQUARE: 4_096}
_CODES: Final = {
    torch.float8_e4m3fn: CodeType.E4M3FN,
    torch.float8_e4m3fnuz: CodeType.E4M3FNUZ,
    torch.float4_e2m1fn_x2: CodeType.E2M1,
}
_FEW: Final = 16
_LEAST_BYTES: Final = 8_192  # of a row of a weight that is fed to few rows
_MOST_TILES: Final = 1_024


def _tokens(key: ConfigKey, num_tokens: int) -> int:
    """As many of `num_tokens` as the row is for, or as few; of a row for whole tiles alone all."""
    if key.kind.startswith(SPECIALISED) and key.up_to == ROWS[-1]:
        return key.up_to
    if key.kind.startswith(MANY):
        # Weights for parts have others with more rows than a tile's.
        most = key.up_to if key.up_to == ANY_WIDTH else TILE_ROWS
        return min(max(num_tokens, TILE_ROWS // 2 + 1), most)
    narrower = [one.up_to for one in CONFIGS if one._replace(up_to=0) == key._replace(up_to=0)]
    below = max((up_to for up_to in narrower if up_to < key.up_to), default=0)
    return min(max(num_tokens, below + 1), key.up_to)


def _shape(key: ConfigKey) -> tuple[int, int]:
    ending = key.kind.rpartition("-")[2]
    if _is_of_a_row(key):
        return _ROWS_OF_VECTORS.get(ending, _SHAPE[0]), min(key.up_to, _SHAPE[0])
    if key.kind == SPECIALISED:
        return _SHAPES[DEEP][0], _LEAST_BYTES // key.dtype.itemsize
    shapes = _SHAPES_OF_MANY if key.kind.startswith(MANY) else _SHAPES
    return shapes.get(ending, _SHAPE)


def _is_of_a_row(key: ConfigKey) -> bool:
    return key.kind.startswith(VECTOR)


def _linears(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    width, depth = _shape(key)
    tokens = 1 if _is_of_a_row(key) else _tokens(key, num_tokens)
    call: Arguments = {
        "x_TK": empty(key, tokens, depth),
        "weight": empty(key, width, depth),
        "layout": RowMajor(),
        "batch_invariant": key.kind == INVARIANT,
    }
    if key.up_to == _FEW:
        call["bias"] = empty(key, width)
    yield "row-major", call
    if CONFIGS[key].constants.get("MERGES"):
        yield (
            "merged",
            call | {"counters": torch.empty(_MOST_TILES, dtype=torch.int32, device="meta")},
        )
    if key.dtype == torch.bfloat16 and not key.kind:
        yield "shuffled", call | {"layout": Shuffle16x16()}


def _quantised(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    code = _CODES[key.dtype]
    recipe = _recipe(Granularity.TOKEN, code)
    is_blocked = _multiplied(key).startswith(CODES_OF_BLOCKS)
    if is_blocked:
        recipe = _recipe(Granularity.BLOCK_128X128, code)
    elif key.kind == MX or code is CodeType.E2M1:
        recipe = _mx(code)
    is_shuffled = key.up_to == _FEW and key.kind in (CODES_OF_BLOCKS, DECODED, MX)
    layout = Shuffle16x16() if is_shuffled else RowMajor()
    storage = StorageFormat(recipe=recipe, layout=layout)
    tokens = 1 if _is_of_a_row(key) else _tokens(key, num_tokens)
    shape = (tokens, _shape(key)[1])
    spec = storage.storage_spec(_shape(key))
    call: Arguments = {
        **{
            name: torch.empty(one.shape, dtype=one.dtype, device="meta")
            for name, one in spec.items()
        },
        "storage": storage,
        "batch_invariant": key.kind.endswith(INVARIANT),
    }
    if not _is_of_codes(key):
        dtype = torch.float32 if key.kind == DECODED_FP32 else torch.bfloat16
        yield "decoded", call | {"x_TK": torch.empty(shape, dtype=dtype, device="meta")}
        return
    x_recipe = _recipe(Granularity.BLOCK_1X128, code) if is_blocked else recipe
    x = x_recipe.storage_spec(shape)
    call |= {
        "x_TK": torch.empty(x["weight"].shape, dtype=x["weight"].dtype, device="meta"),
        "x_scale": torch.empty(
            x["weight_scale"].shape, dtype=x["weight_scale"].dtype, device="meta"
        ),
        "x_recipe": x_recipe,
        "dtype": torch.bfloat16,
    }
    yield layout.describe(), call


def _multiplied(key: ConfigKey) -> str:
    """How x and the weight are: the kind, without that it is one row or that they are many."""
    return key.kind.removeprefix(f"{VECTOR}-").removeprefix(f"{MANY}-")


def _is_of_codes(key: ConfigKey) -> bool:
    return _multiplied(key).startswith((CODES, SPECIALISED)) or key.kind == MX


def _recipe(granularity: Granularity, code: CodeType) -> Quantised:
    return Quantised(granularity=granularity, code=code)


def _mx(code: CodeType) -> Quantised:
    return Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=code,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.ROUND_UP,
    )


def _operands(key: ConfigKey) -> tuple[str, ...]:
    if _is_of_codes(key):
        return ("e2m1 e2m1",) if key.dtype == torch.float4_e2m1fn_x2 else ("e4m3 e4m3",)
    dtype = torch.float32 if key.kind == DECODED_FP32 else torch.bfloat16
    return operands_of_dtype(key._replace(dtype=dtype))


CALLS: Final[Mapping[str, Calls]] = {"linear": _linears, "linear_quantised": _quantised}
_SUM: Final = frozenset({"sum_splits_kernel"})
# Narrow: bias and scales, one number for each row of a tile, and what a tile of few rows of x in
# one byte leaves to each thread.
RULES: Final[Mapping[str, Rules]] = {
    "linear": Rules(
        is_matrix=True,
        without_matrix=_SUM | {"linear_vector_kernel"},
        max_narrow_loads=4,
        max_narrow_stores=16,
        # Of two tiles, of which half of one is not this program's: none of those runs.
        narrow_stores={"thirds_linear_kernel": 32},
    ),
    "linear_quantised": Rules(
        is_matrix=True,
        without_matrix=_SUM | {"codes_vector_kernel"},
        operands=_operands,
        max_narrow_loads=34,
        max_narrow_stores=16,
        # Scales of two groups of warps, two neighbours at once; and so are stored parts.
        narrow_loads={"specialised_codes_kernel": 52},
        narrow_stores={"specialised_codes_kernel": 64},
    ),
}
