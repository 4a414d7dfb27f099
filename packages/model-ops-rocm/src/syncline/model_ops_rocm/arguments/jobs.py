"""Which of many jobs write what another one writes or reads; knows no backend.

Cheap on purpose where nothing is wrong, which one look at all addresses shows.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

import torch

from syncline.model_ops_rocm.formats.fitting import tensors_of
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.recipes import WEIGHT
from syncline.model_ops_rocm.memory import extent_of, share_bytes
from syncline.model_ops_rocm.regions import Region, region_numel

Fault = tuple[int, Exception]
# Of what is written and of what is read: int64 [N, 2], the addresses of the first byte and after
# the last.
Bounds = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class _Written:
    """A tensor, and the jobs that store regions of it: none for the flag of all."""

    name: str
    tensor: torch.Tensor
    jobs: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} of jobs[{self.jobs[0]}]" if self.jobs else self.name


def faults_of_jobs(
    jobs: SequenceABC[EncodeJob], nonfinite: torch.Tensor | None, bounds: Bounds | None = None
) -> list[Fault]:
    """Each job that writes what another one, or itself, writes or reads: no order is promised.

    `bounds`, where the caller knows them, are those of every tensor that is written and read.
    """
    are_apart, is_one_twice = _look(*(_bounds_of(jobs) if bounds is None else bounds), nonfinite)
    if are_apart and not is_one_twice:
        return []
    written: dict[tuple[int, int], _Written] = {}
    for index, job in enumerate(jobs):
        for name, tensor in job.out.items():
            if (extent := extent_of(tensor))[1]:
                written.setdefault(extent, _Written(name, tensor)).jobs.append(index)
    faults: list[Fault] = []
    for one in written.values():
        if len(one.jobs) > 1 and one.name == WEIGHT:
            faults.extend(_written_twice(jobs, one.jobs))
    if not are_apart:
        if nonfinite is not None:
            written[extent_of(nonfinite)] = _Written("nonfinite", nonfinite)
        faults.extend(_shared(jobs, written))
    return faults


def _look(
    stored: torch.Tensor, sources: torch.Tensor, nonfinite: torch.Tensor | None
) -> tuple[bool, bool]:
    """Whether nothing written reaches into anything else, and whether a tensor is stored twice."""
    stored, sources = _some(stored), _some(sources)
    stored = stored[stored[:, 0].argsort()]
    is_new = torch.ones(len(stored), dtype=torch.bool)
    is_new[1:] = (stored[1:] != stored[:-1]).any(dim=1)
    flag = torch.tensor([] if nonfinite is None else [extent_of(nonfinite)], dtype=torch.int64)
    once = torch.cat((stored[is_new], _some(flag.view(-1, 2))))
    bounds = torch.cat((once, sources))
    order = bounds[:, 0].argsort()
    starts, ends = bounds[order].unbind(1)
    is_written = order < len(once)
    # What is read may overlap; into what is written, nothing that begins before it reaches.
    reach = ends.cummax(0).values[:-1]
    reach_of_written = torch.where(is_written, ends, 0).cummax(0).values[:-1]
    reached = starts[1:] < torch.where(is_written[1:], reach, reach_of_written)
    return not bool(reached.any()), not bool(is_new.all())


def _some(bounds: torch.Tensor) -> torch.Tensor:
    """Those that hold anything, and are somewhere."""
    return bounds[(bounds[:, 0] > 0) & (bounds[:, 1] > bounds[:, 0])]


def _bounds_of(jobs: SequenceABC[EncodeJob]) -> Bounds:
    written = [extent_of(tensor) for job in jobs for tensor in job.out.values()]
    read = [
        extent_of(tensor) for job in jobs for tensor in tensors_of(job.source, job.scales).values()
    ]
    return (
        torch.tensor(written, dtype=torch.int64).view(-1, 2),
        torch.tensor(read, dtype=torch.int64).view(-1, 2),
    )


def _shared(
    jobs: SequenceABC[EncodeJob], written: dict[tuple[int, int], _Written]
) -> Iterator[Fault]:
    extents = list(written)
    for at, extent in enumerate(extents):
        other = written[extent]
        for index in _over(extents[:at], extent):
            one = written[extents[index]]
            if share_bytes(one.tensor, other.tensor):
                yield max(*one.jobs[:1], *other.jobs[:1], 0), _refusal(str(one), other)
    for job_index, job in enumerate(jobs):
        for name, tensor in tensors_of(job.source, job.scales).items():
            for index in _over(extents, extent_of(tensor)):
                other = written[extents[index]]
                if share_bytes(other.tensor, tensor):
                    yield job_index, _refusal(name, other)


def _over(extents: list[tuple[int, int]], bounds: tuple[int, int]) -> Iterator[int]:
    for index, (start, end) in enumerate(extents):
        if start < bounds[1] and bounds[0] < end:
            yield index


def _refusal(name: str, other: _Written) -> Exception:
    return ValueError(f"{name} must be apart from {other}, got tensors that share bytes")


def _written_twice(jobs: SequenceABC[EncodeJob], which: list[int]) -> Iterator[Fault]:
    """Jobs whose regions of one tensor overlap."""
    order = sorted(which, key=lambda index: jobs[index].region)
    for at, index in enumerate(order):
        region = jobs[index].region
        for other in order[at + 1 :]:
            if region and jobs[other].region[0][0] >= region[0][1]:
                break
            if region_numel(common := _common(region, jobs[other].region)):
                got = f"jobs[{index}] and jobs[{other}]"
                yield other, ValueError(f"region {common} must be of one job, got {got}")


def _common(one: Region, other: Region) -> Region:
    starts = (max(a[0], b[0]) for a, b in zip(one, other, strict=True))
    stops = (min(a[1], b[1]) for a, b in zip(one, other, strict=True))
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))
