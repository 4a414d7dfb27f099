"""Jobs of every way in which a weight is stored, for tests of many at once.

Sources and storage are made anew by each call, with equal contents on every device.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import torch

from syncline.model_ops_rocm.formats import (
    CodedSource,
    EncodeJob,
    Padding,
    Quantised,
    StorageFormat,
    Unquantised,
)
from syncline.model_ops_rocm.layouts import Shuffle16x16, e8m0_shuffle
from syncline.model_ops_rocm.quant import (
    CodeType,
    E4m3fnWeight,
    E8m0Mode,
    Granularity,
    ScaleType,
)
from syncline.model_ops_rocm.testing.stored import allocate, encode_whole, uneven

_TENSOR, _TOKEN, _ROWS = (
    Quantised(granularity=granularity, code=CodeType.E4M3FN)
    for granularity in (Granularity.TENSOR, Granularity.TOKEN, Granularity.BLOCK_1X128)
)
_POWERS: Final = Quantised(
    granularity=Granularity.BLOCK_1X32,
    code=CodeType.E4M3FN,
    scale=ScaleType.E8M0,
    e8m0_mode=E8m0Mode.ROUND_DOWN,
)
_PADDED: Final = StorageFormat(
    recipe=_ROWS, padding=Padding(rows=17, columns=160, row_multiple=32, column_multiple=256)
)
_SCATTERED: Final = StorageFormat(recipe=_POWERS, scale_layout=e8m0_shuffle())


def coded(recipe: Quantised, x: torch.Tensor) -> CodedSource:
    """What an e4m3fn recipe stores of `x`, as a source."""
    stored = encode_whole(StorageFormat(recipe=recipe), x)
    weight = E4m3fnWeight(codes=stored["weight"], scale=stored["weight_scale"])
    return CodedSource(weight=weight, granularity=recipe.granularity)


def jobs_of_every_kind(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> list[EncodeJob]:
    """One pass and two, in pieces, padded, copied, from codes that are kept and that are not."""
    token = StorageFormat(recipe=_TOKEN)
    tensor = StorageFormat(recipe=_TENSOR, layout=Shuffle16x16())
    numbers = (
        (StorageFormat(recipe=_TENSOR), uneven(5, 70)),
        (StorageFormat(recipe=_TENSOR), uneven(2, 2, 3, 33)),
        (_PADDED, uneven(17, 160)),
        (_SCATTERED, uneven(9, 96)),
        (StorageFormat(recipe=Unquantised(torch.float32)), uneven(7)),
        (tensor, uneven(0, 16, 32)),
    )
    codes = (
        (_PADDED, coded(_ROWS, uneven(17, 160))),
        (_SCATTERED, coded(_POWERS, uneven(9, 96))),
        (token, coded(_ROWS, uneven(3, 130))),
        (StorageFormat(recipe=Unquantised(torch.float16)), coded(_TOKEN, uneven(4, 8))),
    )
    jobs = [(each, source.to(dtype)) for each, source in numbers] + list(codes)
    found = [
        _on(EncodeJob.whole(each, allocate(each, tuple(source.shape)), source), device)
        for each, source in jobs
    ]
    # Experts of one slot: their scales take two passes, or are given.
    slot = _on(EncodeJob.whole(tensor, allocate(tensor, (5, 16, 64)), uneven(5, 16, 64)), device)
    for first, stop, scale in ((1, 2, None), (3, 5, None), (2, 3, 0.5)):
        source = (uneven(stop - first, 16, 64) * stop).to(dtype).to(device)
        region = ((first, stop), (0, 16), (0, 64))
        scales = None if scale is None else torch.full((5, 1, 1), scale, device=device)
        found.append(replace(slot, source=source, region=region, scales=scales))
    return found


def _on(job: EncodeJob, device: torch.device | str) -> EncodeJob:
    out = {name: tensor.to(device) for name, tensor in job.out.items()}
    source = job.source
    if not isinstance(source, CodedSource):
        return replace(job, out=out, source=source.to(device))
    weight = source.weight
    moved = replace(weight, codes=weight.codes.to(device), scale=weight.scale.to(device))
    return replace(job, out=out, source=replace(source, weight=moved))


def change(jobs: Iterable[EncodeJob]) -> None:
    """Other numbers in the sources, and other bytes in what is stored."""
    for job in jobs:
        for tensor in job.out.values():
            tensor.view(torch.uint8).fill_(0x5A)
        if not isinstance(job.source, CodedSource):
            job.source.mul_(-3)
            continue
        scale = job.source.weight.scale
        if scale.dtype is torch.float32:
            scale.mul_(3)
        else:
            scale.view(torch.uint8).add_(1)
