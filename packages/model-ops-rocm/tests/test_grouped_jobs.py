"""Many weights stored at once: what two jobs must not share is refused by the jobs' places."""

import re
from dataclasses import replace

import pytest
import torch

from syncline.model_ops_rocm import EncodeGrouped, EncodeJob, StorageFormat, Unquantised, select
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
    kept = [one.out["weight"].clone() for one in jobs]
    for call in (GROUPED, GROUPED.prepare):
        with pytest.raises(ValueError, match="^encode_grouped: " + re.escape(match)):
            call(jobs, nonfinite=nonfinite)
    for one, before in zip(jobs, kept, strict=True):
        assert (
            torch.equal(
                one.out["weight"],
                before,
            )
            or before.isnan().any()
        )


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
