"""Which of many jobs write what another one writes or reads; knows no backend.

Cheap on purpose where nothing is wrong, which one look at all addresses shows.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

import torch

from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.recipes import WEIGHT
from syncline.model_ops_rocm.memory import address_of, extent_of, share_bytes
from syncline.model_ops_rocm.regions import Region, region_numel

Fault = tuple[int, Exception]
# Of what is written and of what is read: int64 [N, 2], the addresses of the first byte and after
# the last.
Bounds = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A tensor that is written or read, and the jobs that do: none for the flag of all."""

    start: int
    end: int
    name: str
    tensor: torch.Tensor
    is_written: bool
    jobs: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} of jobs[{self.jobs[0]}]" if self.jobs else self.name


def faults_of_jobs(
    jobs: SequenceABC[EncodeJob], nonfinite: torch.Tensor | None, bounds: Bounds | None = None
) -> list[Fault]:
    """Each job that writes what another one, or itself, writes or reads: no order is promised.

    Jobs may store parts of one slot: its tensors are then the same ones, their regions apart, and
    scales that two of them touch are given to both by the same tensor.
    `bounds`, where the caller knows them, are those of every tensor that is written and read.
    """
    are_apart, is_one_twice = _look(*(_bounds_of(jobs) if bounds is None else bounds), nonfinite)
    if are_apart and not is_one_twice:
        return []
    written = _written_by(jobs)
    faults: list[Fault] = []
    for span in written:
        if len(span.jobs) > 1:
            faults.extend(_of_parts(jobs, span))
    spans = [*written, *_read_by(jobs)]
    if nonfinite is not None:
        spans.append(_Span(*extent_of(nonfinite), "nonfinite", nonfinite, True))
    faults.extend(_shared(spans))
    return faults


def _written_by(jobs: SequenceABC[EncodeJob]) -> list[_Span]:
    """Each slot's tensors once, with every job that stores a part of it."""
    found: dict[object, _Span] = {}
    for index, job in enumerate(jobs):
        slot = tuple(
            (name, tensor.data_ptr(), tensor.shape, tensor.dtype)
            for name, tensor in job.out.items()
        )
        for name, tensor in job.out.items():
            key = job.storage_format, slot, name
            if key not in found:
                found[key] = _Span(*extent_of(tensor), name, tensor, True)
            found[key].jobs.append(index)
    return list(found.values())


def _read_by(jobs: SequenceABC[EncodeJob]) -> list[_Span]:
    return [
        _Span(*extent_of(tensor), name, tensor, False, [index])
        for index, job in enumerate(jobs)
        for name, tensor in job.read().items()
    ]


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
    read = [extent_of(tensor) for job in jobs for tensor in job.read().values()]
    return (
        torch.tensor(written, dtype=torch.int64).view(-1, 2),
        torch.tensor(read, dtype=torch.int64).view(-1, 2),
    )


def _shared(spans: list[_Span]) -> Iterator[Fault]:
    """Of spans that overlap, of which one is written; in the order of their addresses."""
    before: list[_Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        before = [one for one in before if one.end > span.start]
        for one in before:
            if one.is_written or span.is_written:
                # A source is named first, and the later job blamed.
                first, other = (one, span) if span.is_written else (span, one)
                if share_bytes(first.tensor, other.tensor):
                    index = max(*first.jobs[:1], *other.jobs[:1], 0)
                    index = index if first.is_written else first.jobs[0]
                    named = str(first) if first.is_written else first.name
                    limit = f"{named} must be apart from {other}"
                    yield index, ValueError(f"{limit}, got tensors that share bytes")
        before.append(span)


def _of_parts(jobs: SequenceABC[EncodeJob], span: _Span) -> Iterator[Fault]:
    """Of jobs that store parts of one tensor."""
    if span.name == WEIGHT:
        yield from _written_twice(jobs, span.jobs)
        return
    scales = {job: jobs[job].scales for job in span.jobs}
    places = {None if one is None else address_of(one) for one in scales.values()}
    if len(places) == 1:
        return
    for index in span.jobs:
        # Whole in their domains, regions that are apart touch no scale twice.
        job = jobs[index]
        if not job.storage_format.region_is_encodable(job.check(), job.region):
            limit = f"scales must be those of jobs[{span.jobs[0]}], which stores a part of the slot"
            yield index, ValueError(f"{limit} too, for a region that cuts their domains")


def _written_twice(jobs: SequenceABC[EncodeJob], which: list[int]) -> Iterator[Fault]:
    """Jobs whose regions of one tensor overlap."""
    regions = {index: jobs[index].region for index in which}
    ndim = len(regions[which[0]])
    # Along the dimension that tells most of them apart.
    dims = range(ndim)
    along = max(dims, key=lambda dim: len({one[dim] for one in regions.values()}), default=None)
    before: list[int] = []
    for index in which if along is None else sorted(which, key=lambda one: regions[one][along]):
        region = regions[index]
        if along is not None:
            before = [one for one in before if regions[one][along][1] > region[along][0]]
        for one in before:
            if region_numel(common := _common(regions[one], region)):
                first, last = sorted((one, index))
                got = f"jobs[{first}] and jobs[{last}]"
                yield last, ValueError(f"region {common} must be of one job, got {got}")
        before.append(index)


def _common(one: Region, other: Region) -> Region:
    starts = (max(a[0], b[0]) for a, b in zip(one, other, strict=True))
    stops = (min(a[1], b[1]) for a, b in zip(one, other, strict=True))
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))
