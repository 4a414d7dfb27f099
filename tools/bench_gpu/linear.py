"""Speed of the products with a stored weight, at the shapes of an 8B model's layers.

Few rows are held against the bytes of weight, x and result; many rows of codes against PyTorch's
own fp8 product with a scale per row, which is cuBLAS's or CUTLASS's; batch-invariant products
against the default ones.
"""

from collections.abc import Callable, Iterator
from typing import Final

import torch
from gpu_timing import Machine, Row, node_seconds, num_operands, row_of_bytes

from syncline.model_ops_rocm import (
    Granularity,
    Linear,
    LinearQuantised,
    Quantised,
    RowMajor,
    StorageFormat,
    detect_arch,
    select,
)
from syncline.model_ops_rocm.quant import CodeType

Shape = tuple[int, int]
_BF16: Final = torch.bfloat16
_FP8: Final = torch.float8_e4m3fn
# Of a layer: q, k and v; o; gate and up; down.
_SHAPES: Final[tuple[Shape, ...]] = (
    (6_144, 4_096),
    (4_096, 4_096),
    (24_576, 4_096),
    (4_096, 12_288),
)
_OF_CODES: Final[tuple[Shape, ...]] = _SHAPES[2:]
_GRANULARITIES: Final = (Granularity.TOKEN, Granularity.BLOCK_128X128)
_MANY: Final = 4_096


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """The promised shapes, and more numbers of rows unless `quick`."""
    linear = select("linear", backend="triton", arch=detect_arch(), dtype=_BF16)
    quantised = select("linear_quantised", backend="triton", arch=detect_arch(), dtype=_BF16)
    for shape in _SHAPES:
        weights = [_random(*shape) for _ in range(num_operands(2 * shape[0] * shape[1]))]
        for num_tokens in (1, 16, 64) if quick else (1, 4, 16, 32, 64, 128, 256):
            yield _half(machine, linear, weights, num_tokens)
        yield _invariant(linear, weights, 256)
        if not quick:
            yield _half(machine, linear, weights[:2], _MANY)
            yield _invariant(linear, weights, 16)
            yield _invariant(linear, weights[:2], _MANY)
    for shape in _OF_CODES:
        codes = [_codes(*shape) for _ in range(num_operands(shape[0] * shape[1]))]
        for num_tokens in (1, 16, 64) if quick else (1, 16, 32, 64, 128, 256):
            for granularity in _GRANULARITIES:
                yield _few(machine, quantised, codes, num_tokens, granularity)
        library = _library(codes[:2])
        yield _many(quantised, codes[:2], Granularity.TOKEN, library, 0.70)
        yield _many(quantised, codes[:2], Granularity.BLOCK_128X128, library, 0.50)
        for granularity in _GRANULARITIES:
            yield _invariant_codes(quantised, codes, 256, granularity)
            if not quick:
                yield _invariant_codes(quantised, codes, 16, granularity)
                yield _invariant_codes(quantised, codes[:2], _MANY, granularity)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=_BF16, device="cuda")


def _codes(*shape: int) -> torch.Tensor:
    return _random(*shape).to(_FP8)


def _half(machine: Machine, linear: Linear, weights: list[torch.Tensor], num_tokens: int) -> Row:
    num_columns, depth = weights[0].shape
    num_bytes = 2 * (num_columns * depth + num_tokens * (num_columns + depth))
    floor_s = max(
        num_bytes / machine.copy_bytes_per_s,
        2 * num_tokens * num_columns * depth / machine.matmul_flop_per_s,
    )
    return Row(
        op="linear, bf16",
        shape=_name(num_tokens, weights[0].shape),
        backend="triton",
        seconds=node_seconds(_calls(linear, weights, num_tokens, is_invariant=False)),
        floor_s=floor_s,
        target=0.9 if num_tokens in (1, 16, 64) else None,
    )


def _invariant(linear: Linear, weights: list[torch.Tensor], num_tokens: int) -> Row:
    default = node_seconds(_calls(linear, weights, num_tokens, is_invariant=False))
    return Row(
        op="linear, bf16, batch-invariant",
        shape=_name(num_tokens, weights[0].shape),
        backend="triton",
        seconds=node_seconds(_calls(linear, weights, num_tokens, is_invariant=True)),
        floor_s=default,
        target=0.5 if num_tokens >= 256 else None,
        note="share of the default's speed",
    )


def _calls(
    linear: Linear, weights: list[torch.Tensor], num_tokens: int, *, is_invariant: bool
) -> list[Callable[[], object]]:
    x = _random(num_tokens, weights[0].shape[1])
    out = _random(num_tokens, weights[0].shape[0])
    workspace = _workspace(linear.workspace_bytes(weights[0], num_tokens))
    counters = _counters(linear.counters_size(weights[0], num_tokens))

    def call(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: linear(
            x,
            weight,
            layout=RowMajor(),
            batch_invariant=is_invariant,
            out=out,
            workspace=workspace,
            counters=counters,
        )

    return [call(weight) for weight in weights]


def _quantised_calls(
    quantised: LinearQuantised,
    codes: list[torch.Tensor],
    num_tokens: int,
    granularity: Granularity,
    *,
    is_invariant: bool = False,
) -> list[Callable[[], object]]:
    num_columns, depth = codes[0].shape
    recipe = Quantised(granularity=granularity, code=CodeType.E4M3FN)
    of_blocks = granularity is Granularity.BLOCK_128X128
    x_granularity = Granularity.BLOCK_1X128 if of_blocks else Granularity.TOKEN
    x_recipe = Quantised(granularity=x_granularity, code=CodeType.E4M3FN)
    x, out = _codes(num_tokens, depth), _random(num_tokens, num_columns)
    x_scale = _scales(x_recipe, (num_tokens, depth))
    weight_scale = _scales(recipe, (num_columns, depth))
    workspace = _workspace(quantised.workspace_bytes(codes[0], num_tokens))
    counters = _counters(quantised.counters_size(codes[0], num_tokens))

    def call(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: quantised(
            x,
            weight,
            weight_scale,
            storage=StorageFormat(recipe=recipe),
            x_scale=x_scale,
            x_recipe=x_recipe,
            dtype=_BF16,
            batch_invariant=is_invariant,
            out=out,
            workspace=workspace,
            counters=counters,
        )

    return [call(weight) for weight in codes]


def _few(
    machine: Machine,
    quantised: LinearQuantised,
    codes: list[torch.Tensor],
    num_tokens: int,
    granularity: Granularity,
) -> Row:
    num_columns, depth = codes[0].shape
    num_bytes = num_columns * depth + num_tokens * (2 * num_columns + depth)
    is_promised = granularity is Granularity.TOKEN and num_tokens in (1, 16, 64)
    return row_of_bytes(
        machine,
        f"linear, fp8 by fp8, scale per {_scale_name(granularity)}",
        _name(num_tokens, codes[0].shape),
        _quantised_calls(quantised, codes, num_tokens, granularity),
        num_bytes,
        target=(0.85 if num_tokens <= 16 else 0.80) if is_promised else None,
    )


def _many(
    quantised: LinearQuantised,
    codes: list[torch.Tensor],
    granularity: Granularity,
    library_s: float,
    target: float,
) -> Row:
    return Row(
        op=f"linear, fp8 by fp8, scale per {_scale_name(granularity)}",
        shape=_name(_MANY, codes[0].shape),
        backend="triton",
        seconds=node_seconds(_quantised_calls(quantised, codes, _MANY, granularity)),
        floor_s=library_s,
        target=target,
        note="share of torch._scaled_mm, a scale per row, sums in float32",
    )


def _invariant_codes(
    quantised: LinearQuantised,
    codes: list[torch.Tensor],
    num_tokens: int,
    granularity: Granularity,
) -> Row:
    given = quantised, codes, num_tokens, granularity
    return Row(
        op=f"linear, fp8 by fp8, scale per {_scale_name(granularity)}, batch-invariant",
        shape=_name(num_tokens, codes[0].shape),
        backend="triton",
        seconds=node_seconds(_quantised_calls(*given, is_invariant=True)),
        floor_s=node_seconds(_quantised_calls(*given)),
        target=0.5 if num_tokens >= 256 else None,
        note="share of the default's speed",
    )


def _library(codes: list[torch.Tensor]) -> float:
    num_columns, depth = codes[0].shape
    x, x_scale = _codes(_MANY, depth), torch.rand(_MANY, 1, device="cuda")
    scale = torch.rand(1, num_columns, device="cuda")

    def call(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: torch._scaled_mm(
            x, weight.T, scale_a=x_scale, scale_b=scale, out_dtype=_BF16, use_fast_accum=False
        )

    return node_seconds([call(weight) for weight in codes])


def _scales(recipe: Quantised, shape: Shape) -> torch.Tensor:
    return torch.rand(recipe.storage_spec(shape)["weight_scale"].shape, device="cuda") + 0.5


def _workspace(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def _counters(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device="cuda")


def _scale_name(granularity: Granularity) -> str:
    return "row" if granularity is Granularity.TOKEN else "1x128 and 128x128"


def _name(num_tokens: int, shape: tuple[int, ...]) -> str:
    return f"{num_tokens} x {shape[1]:,} to {shape[0]:,}"
