"""Many weights stored at once: what two jobs must not share is refused by the jobs' places."""

import re
from dataclasses import replace
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    EncodeGrouped,
    EncodeJob,
    PerTokenFp8,
    Quantised,
    StorageFormat,
    Unquantised,
    checksum_stored,
    select,
)
from syncline.model_ops_rocm.quant import CodeType, E8m0Mode, Granularity, ScaleType
from syncline.model_ops_rocm.regions import Region, region_shape
from syncline.model_ops_rocm.testing.refusals import bytes_of
from syncline.model_ops_rocm.testing.stored import allocate, encode_whole

F32 = torch.float32
PLAIN = StorageFormat(recipe=Unquantised(F32))
GROUPED: EncodeGrouped = select("encode_grouped", dtype=F32)


def some(seed: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def job(seed: int) -> EncodeJob:
    return EncodeJob.whole(PLAIN, allocate(PLAIN, (8, 16)), some(seed))


def rows(job: EncodeJob, start: int, stop: int) -> EncodeJob:
    """Of the same slot, some rows."""
    return replace(job, source=some(9)[start:stop], region=((start, stop), (0, 16)))


def refused(match: str, *jobs: EncodeJob, nonfinite: torch.Tensor | None = None) -> None:
    kept = [bytes_of({"job": one}) for one in jobs]
    for call in (GROUPED, GROUPED.prepare):
        with pytest.raises(ValueError, match="^encode_grouped: " + re.escape(match)):
            call(jobs, nonfinite=nonfinite)
    for one, before in zip(jobs, kept, strict=True):
        assert all(map(torch.equal, bytes_of({"job": one}), before))


def test_jobs_store_parts_of_one_slot_but_no_part_twice() -> None:
    one = job(0)
    GROUPED([rows(one, 0, 3), rows(one, 5, 8), rows(one, 3, 5), rows(one, 3, 3)])
    assert torch.equal(one.out["weight"], encode_whole(PLAIN, some(9))["weight"])
    twice = "region ((3, 4), (0, 16)) must be of one job, got jobs[0] and jobs[2]"
    refused(f"jobs[2]: {twice}", rows(one, 0, 4), job(1), rows(one, 3, 8))
    refused("jobs[1]: region ((0, 8), (0, 16)) must be of one job, got jobs[0] and", one, one)


def test_a_job_neither_reads_nor_crosses_what_another_one_writes() -> None:
    one, other = job(0), job(1)
    shared = ", got tensors that share bytes"
    reads = replace(other, source=one.out["weight"])
    refused(f"jobs[0]: source must be apart from weight of jobs[1]{shared}", reads, one)
    refused(
        f"jobs[0]: source must be apart from weight of jobs[0]{shared}",
        replace(one, source=one.out["weight"]),
    )
    buffer = torch.zeros(8 * 24)
    first, second = buffer[:128].view(8, 16), buffer[64:].view(8, 16)
    crossed = replace(one, out={"weight": first}), replace(other, out={"weight": second})
    refused("jobs[1]: weight of jobs[0] must be apart from weight of jobs[1]", *crossed)
    flag = torch.zeros(8, 16, dtype=torch.bool)
    flagged = replace(one, out={"weight": flag.view(torch.uint8).repeat(1, 4).view(F32)})
    inside = flagged.out["weight"].view(torch.bool)[0, :1]
    refused("jobs[0]: weight of jobs[0] must be apart from nonfinite", flagged, nonfinite=inside)


TOKEN = StorageFormat(recipe=PerTokenFp8())
MATRIX = StorageFormat(
    recipe=Quantised(granularity=Granularity.TENSOR, code=CodeType.E4M3FN, scale=ScaleType.FP32)
)
E8M0 = StorageFormat(
    recipe=Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=CodeType.E4M3FN,
        scale=ScaleType.E8M0,
        e8m0_mode=E8m0Mode.ROUND_UP,
    )
)


def coded(storage: StorageFormat, seed: int) -> EncodeJob:
    return EncodeJob.whole(storage, allocate(storage, (8, 16)), some(seed))


def test_two_slots_share_no_scales_and_a_slots_tensors_are_of_one_shape() -> None:
    one, other = coded(TOKEN, 0), coded(TOKEN, 1)
    shared = replace(other, out={**other.out, "weight_scale": one.out["weight_scale"]})
    refused("jobs[1]: weight_scale of jobs[0] must be apart from weight_scale of", one, shared)
    plain = job(2)
    out = {**one.out, "weight_scale": plain.out["weight"][:1, :8].view(8, 1)}
    refused("jobs[1]: weight of jobs[0] must be apart from", plain, replace(one, out=out))
    buffer = torch.zeros(128)
    wide = EncodeJob(PLAIN, {"weight": buffer.view(8, 16)}, some(3)[:4], ((0, 4), (0, 16)))
    for shape, region in (((16, 8), ((4, 8), (0, 8))), ((2, 4, 16), ((0, 1), (0, 4), (0, 16)))):
        source = torch.zeros(region_shape(region))
        refused(
            "jobs[1]: weight of jobs[0] must be apart from weight of jobs[1]",
            *(wide, EncodeJob(PLAIN, {"weight": buffer.view(shape)}, source, region)),
        )


def test_a_flag_is_no_scale() -> None:
    one = EncodeJob.whole(E8M0, allocate(E8M0, (1, 32)), torch.ones(1, 32))
    flag = one.out["weight_scale"].view(torch.bool).view(1)
    refused("jobs[0]: weight_scale of jobs[0] must be apart from nonfinite", one, nonfinite=flag)


def test_parts_that_cut_a_domain_are_given_one_tensor_of_scales() -> None:
    one, given = coded(MATRIX, 0), torch.full((1, 1), 2.0**-5)
    parts = [replace(rows(one, start, start + 4), scales=given) for start in (0, 4)]
    GROUPED(parts)
    torch.testing.assert_close(MATRIX.decode(one.out), some(9), rtol=2**-4, atol=2**-12)
    other = replace(parts[1], scales=2 * given)
    twice = "jobs[1]: scales ((0, 1), (0, 1)) must be given by one tensor, got those of jobs[0] and"
    refused(twice, parts[0], other)
    # Rows have scales of their own.
    token, scales = coded(TOKEN, 0), torch.ones(8, 1)
    parts = [replace(rows(token, start, start + 4), scales=scales + start) for start in (0, 4)]
    GROUPED(parts)
    assert token.out["weight_scale"][:, 0].tolist() == [1.0] * 4 + [5.0] * 4


def test_parts_that_touch_no_scale_twice_have_scales_of_their_own() -> None:
    storage, shape = MATRIX, (3, 8, 16)
    experts = allocate(storage, shape)
    jobs = [
        EncodeJob(
            *(storage, experts, torch.ones(1, 4, 16), ((at, at + 1), (0, 4), (0, 16))),
            torch.full((3, 1, 1), 2.0**at),
        )
        for at in range(3)
    ]
    GROUPED(jobs)
    assert experts["weight_scale"].flatten().tolist() == [1.0, 2.0, 4.0]
    # One that is whole in its domains, and computes its scales, beside others given theirs.
    token, given = coded(TOKEN, 0), torch.ones(8, 1)
    halves = [
        EncodeJob(TOKEN, token.out, torch.ones(4, 8), ((0, 4), (at, at + 8)), given)
        for at in (0, 8)
    ]
    GROUPED([*halves, replace(rows(token, 4, 8), out=dict(reversed(list(token.out.items()))))])
    assert token.out["weight_scale"][:4].eq(1.0).all()


def test_other_scales_at_the_same_address_are_others() -> None:
    storage = StorageFormat(
        recipe=Quantised(
            granularity=Granularity.BLOCK_128X128, code=CodeType.E4M3FN, scale=ScaleType.FP32
        )
    )
    out, scales = allocate(storage, (256, 256)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    halves = [
        EncodeJob(storage, out, torch.ones(64, 256), ((at, at + 64), (0, 256)), given)
        for at, given in ((0, scales), (64, scales.T))
    ]
    refused("jobs[1]: scales ((0, 1), (0, 2)) must be given by one tensor", *halves)


def test_a_job_that_reads_the_scales_another_one_stores_is_refused_after_one_like_it() -> None:
    one, other = coded(TOKEN, 0), coded(TOKEN, 1)
    for each in (one, other):
        each.out["weight_scale"].fill_(1.0)
    own = replace(one, scales=one.out["weight_scale"])
    message = "jobs[1]: scales must be apart from weight_scale of jobs[0]"
    refused(message, own, replace(other, scales=one.out["weight_scale"]))


def test_a_region_is_a_tuple_of_pairs_and_a_job_is_named_once() -> None:
    for region in ([(0, 8), (0, 16)], ([0, 8], (0, 16)), "rows", 3, ((0, 8, 1), (0, 16))):
        with pytest.raises(ValueError, match=r"^EncodeJob: region must be a tuple of \(start, st"):
            EncodeJob(PLAIN, job(0).out, some(0), cast(Region, region))
    with pytest.raises(ValueError, match=r"^encode_grouped: jobs\[") as caught:
        GROUPED([job(0)] * 50)
    assert str(caught.value).count("jobs[7]: ") == 1


def test_scales_that_are_stored_may_be_given() -> None:
    one = coded(TOKEN, 0)
    GROUPED([one])
    before = checksum_stored(one.out)
    again = replace(one, scales=one.out["weight_scale"])
    GROUPED([again])
    select("encode", dtype=F32)(again)
    assert checksum_stored(one.out) == before


def test_many_parts_of_one_slot_are_looked_at_once_each() -> None:
    columns, out = torch.zeros(4, 4_000), {"weight": torch.zeros(4, 4_000)}
    jobs = [
        EncodeJob(PLAIN, out, columns[:, at : at + 2], ((0, 4), (at, at + 2)))
        for at in range(0, 4_000, 2)
    ]
    GROUPED.prepare(jobs)
    twice = r"jobs\[2000\]: region \(\(0, 4\), \(6, 8\)\) must be of one job, got jobs\[3\]"
    with pytest.raises(ValueError, match=twice):
        GROUPED.prepare([*jobs, jobs[3]])


def test_sources_may_be_one_another_and_lie_between_what_is_written() -> None:
    source = some(3)
    jobs = [replace(job(seed), source=source) for seed in range(3)]
    GROUPED(jobs)
    for one in jobs:
        assert torch.equal(one.out["weight"], source)
    # Columns that take turns with the rows of a slot are bytes of their own.
    buffer = torch.zeros(4, 8, 32)
    out, between = buffer[0, :, :16].contiguous(), buffer[1:, :, 16:]
    GROUPED([EncodeJob.whole(PLAIN, {"weight": out}, between[0])])
    assert torch.equal(out, between[0])
