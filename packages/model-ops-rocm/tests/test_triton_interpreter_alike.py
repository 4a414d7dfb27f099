"""Of many jobs in one call each is checked and stored as it is alone, whatever came before it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, cast

import pytest
import torch

from syncline.model_ops_rocm import (
    CodedSource,
    E4m3fnWeight,
    EncodeGrouped,
    EncodeJob,
    Granularity,
    Quantised,
    StorageFormat,
    select,
)
from syncline.model_ops_rocm.quant import CodeType
from syncline.model_ops_rocm.testing import allocate, encode_whole, uneven

SHAPE: Final = (8, 2_048)
STORAGE: Final = StorageFormat(
    recipe=Quantised(granularity=Granularity.BLOCK_1X128, code=CodeType.E4M3FN)
)
FLAG: Final = torch.zeros(1, dtype=torch.bool)
Change = Callable[[EncodeJob], EncodeJob]


def of_numbers() -> EncodeJob:
    return EncodeJob.whole(STORAGE, allocate(STORAGE, SHAPE), uneven(*SHAPE))


def of_codes(shape: tuple[int, int] = SHAPE) -> EncodeJob:
    stored = encode_whole(STORAGE, uneven(*shape))
    weight = E4m3fnWeight(codes=stored["weight"], scale=stored["weight_scale"])
    source = CodedSource(weight=weight, granularity=Granularity.BLOCK_1X128)
    return EncodeJob.whole(STORAGE, allocate(STORAGE, shape), source)


def of_narrow_codes() -> EncodeJob:
    """A block is a row."""
    return of_codes((8, 128))


def of_given_scales() -> EncodeJob:
    return with_scales(torch.clone)(of_numbers())


def moved(tensor: torch.Tensor, num_bytes: int = 4) -> torch.Tensor:
    """The same numbers so many bytes behind a multiple of 16."""
    raw = torch.zeros(tensor.nbytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 16 + num_bytes
    copy = raw[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    copy.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
    return copy


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with other numbers between the rows."""
    wide = torch.ones(tensor.shape[0], 2 * tensor.shape[1]).to(tensor.dtype)
    wide.view(torch.uint8)[:, : tensor.shape[1] * tensor.itemsize] = tensor.view(torch.uint8)
    return wide[:, : tensor.shape[1]]


def with_source(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda job: replace(job, source=change(cast(torch.Tensor, job.source)))


def with_out(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda job: replace(job, out={**job.out, name: change(job.out[name])})


def with_own(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(job: EncodeJob) -> EncodeJob:
        source = cast(CodedSource, job.source)
        weight = replace(source.weight, **{name: change(getattr(source.weight, name))})
        return replace(job, source=replace(source, weight=weight))

    return changed


def with_scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """With scales that are given: those that would be stored, changed."""

    def changed(job: EncodeJob) -> EncodeJob:
        stored = encode_whole(STORAGE, cast(torch.Tensor, job.source))
        return replace(job, scales=change(stored["weight_scale"]))

    return changed


def with_stored_scales(job: EncodeJob) -> EncodeJob:
    job.out["weight_scale"].fill_(0.5)
    return replace(job, scales=job.out["weight_scale"])


def of_a_half() -> EncodeJob:
    job = of_numbers()
    return replace(job, source=cast(torch.Tensor, job.source)[:4], region=((0, 4), (0, 2_048)))


def of_the_other(job: EncodeJob) -> EncodeJob:
    return replace(job, region=((4, 8), (0, 2_048)))


def of_rows(job: EncodeJob) -> EncodeJob:
    """From codes of which each row has one scale."""
    stored = encode_whole(StorageFormat(recipe=ROWS), uneven(*job.check(nonfinite=FLAG)))
    weight = E4m3fnWeight(codes=stored["weight"], scale=stored["weight_scale"])
    return replace(job, source=CodedSource(weight=weight, granularity=Granularity.TOKEN))


ROWS: Final = Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FN)
OTHER: Final[Mapping[str, tuple[Callable[[], EncodeJob], Change]]] = {
    "the other half": (of_a_half, of_the_other),
    "a source of other strides": (of_numbers, with_source(strided)),
    "a source elsewhere": (of_numbers, with_source(moved)),
    "a source of another type": (of_numbers, with_source(torch.Tensor.half)),
    "a weight elsewhere": (of_numbers, with_out("weight", moved)),
    "scales elsewhere": (of_numbers, with_out("weight_scale", moved)),
    "given scales": (of_numbers, with_scales(torch.clone)),
    "given scales that are stored": (of_numbers, with_stored_scales),
    "codes elsewhere": (of_codes, with_own("codes", moved)),
    "codes of other strides": (of_codes, with_own("codes", strided)),
    "scales of codes elsewhere": (of_codes, with_own("scale", moved)),
    "scales of codes to elsewhere": (of_codes, with_out("weight_scale", moved)),
    "codes of other scales": (of_codes, of_rows),
    "codes of rows": (of_narrow_codes, of_rows),
    "codes of powers": (of_codes, with_own("scale", lambda one: one.to(torch.float8_e8m0fnu))),
    "an equal format": (of_numbers, lambda job: replace(job, storage_format=replace(STORAGE))),
}
Launches = list[tuple[object, ...]]


def launches_of(jobs: list[EncodeJob]) -> Launches:
    """What is launched, and the rows of each launch, but for where a row's tiles begin."""
    from syncline.model_ops_rocm.triton.encode_table import NUM_FIELDS
    from syncline.model_ops_rocm.triton.ops.encode_jobs import JobTable

    table = JobTable(FLAG)
    assert table.add(jobs) == {}
    rows = torch.empty(table.num_rows, NUM_FIELDS, dtype=torch.int64)
    table.write(rows, 0)
    found: Launches = []
    start = 0
    for kind in table.kinds:
        compiled = (kind.stage, str(kind.constants), [one.dtype for one in kind.samples])
        own = rows[start : start + kind.num_rows, 1:].tolist()
        found += [(*compiled, row) for row in own]
        start += kind.num_rows
    return sorted(found, key=str)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_a_job_has_the_launches_that_it_has_alone(
    kernels: Mapping[str, object], name: str, is_first: bool
) -> None:
    make, change = OTHER[name]
    jobs = [make(), change(make())]
    if is_first:
        jobs.reverse()
    alone = launches_of(jobs[:1]) + launches_of(jobs[1:])
    assert launches_of(jobs) == sorted(alone, key=str)


@pytest.mark.parametrize("name", OTHER)
def test_a_job_is_stored_in_the_bytes_of_the_reference(
    kernels: Mapping[str, object], name: str
) -> None:
    make, change = OTHER[name]
    jobs = [make(), change(make()), make()]
    # Given scales may be the stored ones.
    copies = [{stored: one.clone() for stored, one in job.out.items()} for job in jobs]
    expected = [replace(job, out=out) for job, out in zip(jobs, copies, strict=True)]
    for job in expected:
        given = None if job.scales is None else job.scales.clone()
        select("encode", dtype=torch.float32)(replace(job, scales=given), nonfinite=FLAG.clone())
    cast(EncodeGrouped, kernels["encode_grouped"])(jobs, nonfinite=FLAG)
    assert not FLAG.item()
    for job, wanted in zip(jobs, expected, strict=True):
        for stored, one in wanted.out.items():
            assert torch.equal(job.out[stored].view(torch.uint8), one.view(torch.uint8))


def test_scales_that_are_given_to_one_job_and_stored_by_another_are_told(
    kernels: Mapping[str, object],
) -> None:
    first = with_stored_scales(of_numbers())
    for other in (of_given_scales(), of_numbers()):
        jobs = [first, replace(other, scales=first.out["weight_scale"])]
        with pytest.raises(ValueError, match="scales"):
            cast(EncodeGrouped, kernels["encode_grouped"])(jobs, nonfinite=FLAG)


WRONG: Final[Mapping[str, tuple[Callable[[], EncodeJob], Change]]] = {
    "source on another device": (of_numbers, with_source(lambda one: one.to("meta"))),
    "source of a type that no recipe takes": (of_numbers, with_source(torch.Tensor.double)),
    "source of another shape": (of_numbers, with_source(lambda one: one[:-1])),
    "weight of another type": (of_numbers, with_out("weight", lambda one: one.view(torch.uint8))),
    "weight of another shape": (of_numbers, with_out("weight", lambda one: one[:-1])),
    "weight with gaps": (of_numbers, with_out("weight", strided)),
    "weight on another device": (of_numbers, with_out("weight", lambda one: one.to("meta"))),
    "scales of another type": (of_numbers, with_out("weight_scale", torch.Tensor.half)),
    "scales of another shape": (of_numbers, with_out("weight_scale", lambda one: one[:-1])),
    "scales with gaps": (of_numbers, with_out("weight_scale", strided)),
    "scales on another device": (of_numbers, with_out("weight_scale", lambda one: one.to("meta"))),
    "given scales of another type": (of_numbers, with_scales(torch.Tensor.half)),
    "given scales of another shape": (of_numbers, with_scales(lambda one: one[:-1])),
    "given scales with gaps": (of_numbers, with_scales(strided)),
    "given scales on another device": (of_numbers, with_scales(lambda one: one.to("meta"))),
    "codes on another device": (of_codes, with_own("codes", lambda one: one.to("meta"))),
    "scales of codes with gaps": (of_codes, with_own("scale", strided)),
    "scales of codes on another device": (of_codes, with_own("scale", lambda one: one.to("meta"))),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_behind_a_job_that_is_like_it_but_right(
    kernels: Mapping[str, object], name: str
) -> None:
    make, change = WRONG[name]
    right = make()
    # For scales that are given, one that is right has some, too.
    if name.startswith("given"):
        right = with_scales(torch.clone)(right)
    try:
        jobs = [right, change(make()), make()]
    except ValueError:
        return  # refused already where the source is made
    before = [one.clone() for one in right.out.values()]
    with pytest.raises(ValueError, match=r"jobs\[1\]") as caught:
        cast(EncodeGrouped, kernels["encode_grouped"])(jobs, nonfinite=FLAG)
    assert "jobs[0]" not in str(caught.value)
    assert "jobs[2]" not in str(caught.value)
    for one, was in zip(right.out.values(), before, strict=True):
        assert torch.equal(one.view(torch.uint8), was.view(torch.uint8))
