"""Calls of the ops that store weights: each granularity, code and way to a scale, bit-equal."""

from typing import Final

import torch

from syncline.model_ops_rocm.formats import (
    EncodeJob,
    Padding,
    Quantised,
    StorageFormat,
    Unquantised,
)
from syncline.model_ops_rocm.layouts import (
    Shuffle16x16,
    e8m0_shuffle,
    gate_up_rows,
    gate_up_shuffle,
    gfx1250_tiles,
)
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType, ZeroRule
from syncline.model_ops_rocm.regions import Region, full_region, region_view
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

FN, FNUZ, INT8, FP4 = (CodeType.E4M3FN, CodeType.E4M3FNUZ, CodeType.INT8, CodeType.E2M1)
Shape = tuple[int, ...]


def _recipe(granularity: Granularity, code: CodeType = FN, **fields: object) -> Quantised:
    return Quantised(granularity=granularity, code=code, **fields)  # type: ignore[arg-type]  # of Quantised


def _mx(code: CodeType, mode: E8m0Mode) -> Quantised:
    return _recipe(
        Granularity.BLOCK_1X32, code, scale=ScaleType.E8M0, e8m0_mode=mode, zero=ZeroRule.SMALLEST
    )


TENSOR: Final = StorageFormat(recipe=_recipe(Granularity.TENSOR))
TOKEN: Final = StorageFormat(recipe=_recipe(Granularity.TOKEN))
ROWS: Final = StorageFormat(recipe=_recipe(Granularity.BLOCK_1X128))
SQUARES: Final = StorageFormat(recipe=_recipe(Granularity.BLOCK_128X128))
MXFP4: Final = StorageFormat(recipe=_mx(FP4, E8m0Mode.EVEN), scale_layout=e8m0_shuffle())


def _stored(make: Maker, storage: StorageFormat, shape: Shape) -> dict[str, torch.Tensor]:
    """Views of buffers of bytes, on every device, whose every byte shows if nobody wrote it."""
    stored = {}
    for name, spec in storage.storage_spec(shape).items():
        raw = torch.full((spec.num_bytes,), 0xA5, dtype=torch.uint8, device=make.device)
        stored[name] = raw.view(spec.dtype).view(spec.shape)
    return stored


def _flag(make: Maker) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.bool, device=make.device)


def _numbers(make: Maker, shape: Shape, pad: int = 0) -> torch.Tensor:
    """Rows of very different size, and one of zeros."""
    x = make.randn(*shape, pad=pad)
    if len(shape) > 1:
        # Made on the CPU: the power of another device may be off by a rounding.
        factors = 2.0 ** (torch.arange(shape[-2]) % 9 - 4)
        x.mul_(factors[:, None].to(x.dtype).to(make.device))
        x[..., 1:2, :] = 0
    return x


def _whole(storage: StorageFormat, *shape: int, pad: int = 0, bad: float | None = None) -> Case:
    def build(make: Maker) -> Arguments:
        source = _numbers(make, shape, pad)
        if bad is not None:
            source[-1, -1] = bad
        job = EncodeJob.whole(storage, _stored(make, storage, shape), source)
        return {
            "job": job,
            "nonfinite": _flag(make),
            "workspace": make.nan(1_024).view(torch.uint8),
        }

    label = f"{'x'.join(map(str, shape))}-{storage.describe()}"
    label += f"+{pad}" if pad else ("" if bad is None else f"-{bad}")
    return Case(op="encode", label=label, build=build, is_recordable=_is_recordable(storage))


def _part(
    storage: StorageFormat, shape: Shape, region: Region, *, with_scales: bool = False
) -> Case:
    """A part of a source that is the columns of a wider one."""

    def build(make: Maker) -> Arguments:
        whole = _numbers(make, shape, 8)
        scales = None
        if with_scales:
            on_cpu = storage.amax(whole.cpu(), full_region(shape), shape)
            scales = storage.scales(on_cpu).to(make.device)
        source = region_view(whole, region)
        job = EncodeJob(storage, _stored(make, storage, shape), source, region, scales)
        return {"job": job, "nonfinite": _flag(make)}

    label = f"part-{'x'.join(map(str, shape))}-{storage.describe()}"
    label += "-scales" if with_scales else ""
    return Case(op="encode", label=label, build=build, is_recordable=_is_recordable(storage))


def _is_recordable(storage: StorageFormat) -> bool:
    # PyTorch copies no packed fp4, which a test of replays does.
    return not isinstance(storage.recipe, Quantised) or storage.recipe.code is not FP4


def _transposed(make: Maker) -> Arguments:
    source = _numbers(make, (40, 136)).T
    return {
        "job": EncodeJob.whole(ROWS, _stored(make, ROWS, (136, 40)), source),
        "nonfinite": _flag(make),
    }


def _grouped(*weights: tuple[StorageFormat, Shape]) -> Case:
    def build(make: Maker) -> Arguments:
        jobs = tuple(
            EncodeJob.whole(
                storage, _stored(make, storage, shape), _numbers(make, shape, number % 2 * 3)
            )
            for number, (storage, shape) in enumerate(weights)
        )
        workspace = make.nan(2_048).view(torch.uint8)
        return {"jobs": jobs, "nonfinite": _flag(make), "workspace": workspace}

    label = f"{len(weights)}-of-{weights[0][0].describe()}" if weights else "none"
    return Case(op="encode_grouped", label=label, build=build, is_recordable=False)


def _amax(storage: StorageFormat, shape: Shape, *regions: Region) -> Case:
    """Added to what the first of the regions left."""

    def build(make: Maker) -> Arguments:
        x = _numbers(make, shape, 3)
        partial = storage.new_amax(shape)
        for region in regions[:-1]:
            storage.amax_into(partial, region_view(x.cpu(), region), region)
        on_device = storage.new_amax(shape, make.device)
        on_device.bits.copy_(partial.bits)
        on_device.counts.copy_(partial.counts)
        return {
            "storage_format": storage,
            "partial": on_device,
            "source": region_view(x, regions[-1]),
            "region": regions[-1],
        }

    return Case(
        op="amax_into",
        label=f"{'x'.join(map(str, shape))}-{storage.describe()}",
        build=build,
        # It adds to what it finds: a replay adds once more.
        is_recordable=False,
    )


def _with(storage: StorageFormat, **fields: object) -> StorageFormat:
    kept = {"recipe": storage.recipe, "layout": storage.layout, "padding": storage.padding}
    return StorageFormat(**{**kept, "scale_layout": storage.scale_layout, **fields})  # type: ignore[arg-type]  # of StorageFormat


_PADDING: Final = Padding(rows=37, columns=45, row_multiple=16, column_multiple=64)
_FLOAT16: Final = StorageFormat(recipe=Unquantised(torch.float16), layout=Shuffle16x16())
_BFLOAT16: Final = StorageFormat(recipe=Unquantised(torch.bfloat16))
CASES: Final[tuple[Case, ...]] = (
    _whole(ROWS, 0, 128),
    _whole(ROWS, 1, 1),
    _whole(ROWS, 7, 257, pad=3),
    _whole(ROWS, 200),
    _whole(ROWS, 5, 260, bad=float("nan")),
    _whole(SQUARES, 130, 100, bad=float("inf")),
    _whole(_with(SQUARES, layout=Shuffle16x16()), 2, 144, 128),
    _whole(TOKEN, 3, 1),
    _whole(TOKEN, 9, 100, pad=1),
    _whole(StorageFormat(recipe=_recipe(Granularity.TOKEN, INT8)), 5, 600),
    _whole(
        StorageFormat(recipe=_recipe(Granularity.TOKEN, FNUZ), layout=Shuffle16x16()), 3, 16, 96
    ),
    _whole(TENSOR, 2, 33, 70),
    _whole(StorageFormat(recipe=_recipe(Granularity.TENSOR, FNUZ, clamp=224.0)), 1, 3),
    _whole(_with(ROWS, layout=gate_up_shuffle(gate_up=True)), 2, 64, 128),
    _whole(_with(ROWS, layout=gate_up_rows()), 6, 130),
    _whole(_with(ROWS, layout=gfx1250_tiles()), 32, 96),
    _whole(MXFP4, 40, 320),
    _whole(_with(MXFP4, layout=Shuffle16x16(), padding=_PADDING), 37, 45),
    _whole(StorageFormat(recipe=_mx(FN, E8m0Mode.ROUND_DOWN)), 3, 65),
    _whole(StorageFormat(recipe=_mx(FNUZ, E8m0Mode.CEIL)), 2, 96),
    _whole(_FLOAT16, 32, 64),
    _whole(_BFLOAT16, 3, 5, 7, pad=2),
    _whole(StorageFormat(recipe=Unquantised(torch.float32)), 11),
    _part(ROWS, (20, 300), ((3, 17), (128, 300))),
    _part(_with(SQUARES, layout=Shuffle16x16()), (3, 160, 256), ((1, 3), (128, 160), (0, 128))),
    _part(TENSOR, (20, 70), ((5, 13), (9, 70)), with_scales=True),
    _part(MXFP4, (40, 320), ((7, 40), (62, 190)), with_scales=True),
    _part(
        StorageFormat(recipe=_recipe(Granularity.BLOCK_128X128, INT8)),
        *((150, 140), ((100, 140), (60, 140))),
        with_scales=True,
    ),
    Case(op="encode", label="transposed", build=_transposed),
    _grouped(),
    _grouped((ROWS, (3, 130)), (ROWS, (20, 128)), (SQUARES, (130, 5)), (ROWS, (0, 7))),
    _grouped((_FLOAT16, (32, 64)), (MXFP4, (40, 64)), (_BFLOAT16, (2, 2, 3, 4)), (TOKEN, (5, 48))),
    _grouped((TENSOR, (2, 9, 70)), (TENSOR, (3, 40)), (ROWS, (4, 130))),
    _amax(ROWS, (7, 300), ((2, 5), (100, 290)), ((0, 7), (0, 300))),
    _amax(TENSOR, (3, 33, 70), ((0, 1), (0, 5), (0, 70)), ((1, 3), (2, 33), (5, 64))),
    _amax(_with(MXFP4, padding=_PADDING), (37, 45), ((0, 37), (0, 45))),
)
