"""The launches of the ops that store weights."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules
from syncline.model_ops_rocm import (
    AmaxPartial,
    CodedSource,
    CodeType,
    E4m3fnWeight,
    E8m0Mode,
    EncodeJob,
    Granularity,
    Quantised,
    ScaleType,
    Shuffle16x16,
    StorageFormat,
    Unquantised,
    full_region,
)
from syncline.model_ops_rocm.layouts import e8m0_shuffle
from syncline.model_ops_rocm.triton.configs.base import ConfigKey
from syncline.model_ops_rocm.triton.targets import casts_natively

_ROWS_PER_TOKEN: Final = 16  # whole tiles of the shuffled layout, whatever the number of tokens
_COLUMNS: Final = 4_096
_WORKSPACE_BYTES: Final = 1 << 20


def _recipe(key: ConfigKey, granularity: Granularity) -> Quantised:
    is_fnuz = casts_natively(key.arch, CodeType.E4M3FNUZ)
    return Quantised(
        granularity=granularity, code=CodeType.E4M3FNUZ if is_fnuz else CodeType.E4M3FN
    )


def _mx(code: CodeType) -> Quantised:
    return Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=code,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.EVEN,
    )


def _formats(key: ConfigKey) -> Iterator[tuple[str, StorageFormat, torch.dtype]]:
    """Formats that use the row, with the dtype of what is stored."""
    kinds = {
        "token": Granularity.TOKEN,
        "128x128": Granularity.BLOCK_128X128,
        "block": Granularity.BLOCK_1X128,
    }
    if key.kind in kinds:
        recipe = _recipe(key, kinds[key.kind])
        yield "row-major", StorageFormat(recipe=recipe), key.dtype
        if key.dtype is torch.bfloat16 and key.kind == "block":
            yield "shuffled", StorageFormat(recipe=recipe, layout=Shuffle16x16()), key.dtype
            yield "from-float16", StorageFormat(recipe=recipe), torch.float16
            mxfp4 = StorageFormat(recipe=_mx(CodeType.E2M1), scale_layout=e8m0_shuffle())
            yield "mxfp4", mxfp4, key.dtype
        return
    copied = StorageFormat(recipe=Unquantised(key.dtype), layout=Shuffle16x16())
    yield "copied", copied, key.dtype
    if key.op == "encode":
        tensor = StorageFormat(recipe=_recipe(key, Granularity.TENSOR))
        yield "tensor", tensor, key.dtype


def _job(storage: StorageFormat, shape: tuple[int, int], dtype: torch.dtype) -> EncodeJob:
    out = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for name, spec in storage.storage_spec(shape).items()
    }
    return EncodeJob.whole(storage, out, torch.empty(shape, dtype=dtype, device="meta"))


def _kept(shape: tuple[int, int], scale: ScaleType = ScaleType.FP32) -> EncodeJob:
    """Of codes that come with scales that fit."""
    recipe = Quantised(
        granularity=Granularity.TOKEN,
        code=CodeType.E4M3FN,
        scale=scale,
        e8m0_mode=E8m0Mode.EVEN if scale is ScaleType.E8M0 else None,
    )
    storage = StorageFormat(recipe=recipe, layout=Shuffle16x16())
    job = _job(storage, shape, torch.float32)
    weight = E4m3fnWeight(codes=job.out["weight"], scale=job.out["weight_scale"])
    source = CodedSource(weight=weight, granularity=recipe.granularity)
    return EncodeJob.whole(storage, job.out, source)


def _scale_of(key: ConfigKey) -> ScaleType:
    return ScaleType.E8M0 if key.dtype is torch.uint8 else ScaleType.FP32


def _recoded(key: ConfigKey, shape: tuple[int, int]) -> EncodeJob:
    """Of codes of another granularity, which are read as numbers."""
    storage = StorageFormat(recipe=_recipe(key, Granularity.BLOCK_1X128))
    out = _job(storage, shape, torch.float32).out
    return EncodeJob.whole(storage, out, _kept(shape).source)


def _others() -> Arguments:
    return {
        "nonfinite": torch.empty(1, dtype=torch.bool, device="meta"),
        "workspace": torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="meta"),
    }


def _shape(key: ConfigKey, num_tokens: int) -> tuple[int, int]:
    columns = key.up_to if key.kind == "token" else _COLUMNS
    return _ROWS_PER_TOKEN * num_tokens, columns


def _encodings(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    if key.kind == "fill":
        # The padding of scales comes with whatever has some.
        storage = StorageFormat(recipe=_mx(CodeType.E4M3FN), scale_layout=e8m0_shuffle())
        shape = (_ROWS_PER_TOKEN * num_tokens + 32, _COLUMNS)
        yield "padded-scales", {"job": _job(storage, shape, torch.bfloat16)} | _others()
        return
    if key.kind in ("bytes", "scales"):
        yield "kept", {"job": _kept(_shape(key, num_tokens), _scale_of(key))} | _others()
        return
    for variant, storage, dtype in _formats(key):
        yield variant, {"job": _job(storage, _shape(key, num_tokens), dtype)} | _others()
    if key.kind == "block" and key.dtype is torch.bfloat16:
        yield "from-codes", {"job": _recoded(key, _shape(key, num_tokens))} | _others()


def _groups(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    shape = _shape(key, num_tokens)
    if key.kind == "fill":
        storage = StorageFormat(recipe=_mx(CodeType.E4M3FN), scale_layout=e8m0_shuffle())
        padded = (shape[0] + 32, shape[1])
        yield "padded-scales", {"jobs": (_job(storage, padded, torch.bfloat16),)} | _others()
        return
    if key.kind in ("bytes", "scales"):
        yield "kept", {"jobs": (_kept(shape, _scale_of(key)),)} | _others()
        return
    if key.kind == "maxima":
        storage = StorageFormat(recipe=_recipe(key, Granularity.TENSOR))
        yield "tensor", {"jobs": (_job(storage, shape, key.dtype),)} | _others()
        return
    if key.kind == "block" and key.dtype is torch.bfloat16:
        yield "from-codes", {"jobs": (_recoded(key, shape),)} | _others()
    for variant, storage, dtype in _formats(key):
        job = _job(storage, _shape(key, num_tokens), dtype)
        yield variant, {"jobs": (job, job)} | _others()


def _maxima(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    shape = _shape(key, num_tokens)
    for granularity in (Granularity.TENSOR, Granularity.BLOCK_1X128):
        storage = StorageFormat(recipe=_recipe(key, granularity))
        grid = storage.scale_grid(shape).shape
        partial = AmaxPartial(
            logical_shape=shape,
            bits=torch.empty(grid, dtype=torch.int32, device="meta"),
            counts=torch.empty(grid, dtype=torch.int64, device="meta"),
        )
        arguments: Arguments = {
            "storage_format": storage,
            "partial": partial,
            "source": torch.empty(shape, dtype=key.dtype, device="meta"),
            "region": full_region(shape),
        }
        yield granularity.value, arguments


CALLS: Final[Mapping[str, Calls]] = {
    "encode": _encodings,
    "encode_grouped": _groups,
    "amax_into": _maxima,
}
# Narrow: scales, their padding, maxima, a flag, and the fields of the table of many weights.
RULES: Final[Mapping[str, Rules]] = {
    "encode": Rules(max_narrow_loads=3, max_narrow_stores=8),
    "encode_grouped": Rules(
        max_narrow_loads=32, max_narrow_stores=5, narrow_stores={"fill_grouped_kernel": 8}
    ),
    "amax_into": Rules(),
}
