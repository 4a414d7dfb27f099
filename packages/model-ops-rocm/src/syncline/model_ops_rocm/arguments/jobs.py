"""Which of many jobs write what another one writes or reads; knows no backend.

Cheap on purpose where nothing is wrong, which one look at all addresses shows.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch

from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.memory import address_of, extent_of, share_bytes
from syncline.model_ops_rocm.regions import Region, common_region, region_numel

Fault = tuple[int, Exception]


class Bounds(NamedTuple):
    """Addresses of the first byte and after the last, int64 [N, T]: of T tensors of N jobs, or of
    all tensors in one row."""

    starts: torch.Tensor
    ends: torch.Tensor
    num_written: int  # the first ones; the others are read

    @property
    def written(self) -> torch.Tensor:
        """int64 [M, 2]."""
        return self._pairs(slice(self.num_written))

    @property
    def read(self) -> torch.Tensor:
        """Likewise."""
        return self._pairs(slice(self.num_written, None))

    def _pairs(self, tensors: slice) -> torch.Tensor:
        return torch.stack((self.starts[:, tensors], self.ends[:, tensors]), dim=-1).view(-1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A tensor that is written or read, and the jobs that do: none for the flag of all."""

    start: int
    end: int
    name: str
    tensor: torch.Tensor
    jobs: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} of jobs[{self.jobs[0]}]" if self.jobs else self.name


def faults_of_jobs(
    jobs: SequenceABC[EncodeJob], nonfinite: torch.Tensor | None, bounds: Bounds | None = None
) -> list[Fault]:
    """Each job that writes what another one, or itself, writes or reads: no order is promised.

    Jobs may store parts of one slot: its tensors are then the same ones, their regions apart, and
    scales that two of them touch are given to both by the same tensor. Names each job once.
    `bounds`, where the caller knows them, are those of every tensor that is written and read.
    """
    extents = [] if nonfinite is None else [extent_of(nonfinite)]
    flag = torch.tensor(extents, dtype=torch.int64).view(-1, 2)
    if bounds is None:
        bounds = _bounds_of(jobs)
    if _share_nothing(bounds, flag):
        return []
    are_apart, is_one_twice = _look(bounds.written, bounds.read, flag)
    if are_apart and not is_one_twice:
        return []
    which = _with_a_shared_start(jobs) if are_apart else list(range(len(jobs)))
    written = _written_by(jobs, which)
    faults = [fault for span in written if len(span.jobs) > 1 for fault in _of_parts(jobs, span)]
    if not are_apart and nonfinite is not None:
        written.append(_Span(*extent_of(nonfinite), "nonfinite", nonfinite))
    faults.extend(_shared(written, [] if are_apart else _read_by(jobs)))
    named: dict[int, Exception] = {}
    for index, error in faults:
        named.setdefault(index, error)
    return sorted(named.items(), key=itemgetter(0))


def _with_a_shared_start(jobs: SequenceABC[EncodeJob]) -> list[int]:
    starts = Counter(tensor.data_ptr() for job in jobs for tensor in job.out.values())
    return [
        index
        for index, job in enumerate(jobs)
        if any(starts[tensor.data_ptr()] > 1 for tensor in job.out.values())
    ]


def _written_by(jobs: SequenceABC[EncodeJob], which: list[int]) -> list[_Span]:
    """Each slot's tensors once, with every job that stores a part of it."""
    found: dict[object, _Span] = {}
    for index in which:
        job = jobs[index]
        slot = frozenset(
            (name, tensor.data_ptr(), tensor.shape, tensor.dtype)
            for name, tensor in job.out.items()
        )
        for name, tensor in job.out.items():
            key = job.storage_format, slot, name
            if key not in found:
                found[key] = _Span(*extent_of(tensor), name, tensor)
            found[key].jobs.append(index)
    return list(found.values())


def _read_by(jobs: SequenceABC[EncodeJob]) -> list[_Span]:
    """What jobs read, once each."""
    found: dict[object, _Span] = {}
    for index, job in enumerate(jobs):
        for name, tensor in job.read().items():
            start, end = extent_of(tensor)
            key = name, start, tensor.shape, tensor.stride(), tensor.dtype
            found.setdefault(key, _Span(start, end, name, tensor)).jobs.append(index)
    return list(found.values())


def _share_nothing(bounds: Bounds, flag: torch.Tensor) -> bool:
    """Whether no tensor reaches into another one: so it is but for parts and shared sources."""
    is_some = bounds.ends > bounds.starts
    starts, order = torch.cat((bounds.starts[is_some], flag[:, 0])).sort()
    ends = torch.cat((bounds.ends[is_some], flag[:, 1])).take(order)
    return not bool((starts[1:] < ends[:-1]).any())


def _look(stored: torch.Tensor, sources: torch.Tensor, flag: torch.Tensor) -> tuple[bool, bool]:
    """Whether nothing written reaches into anything else, and whether a tensor is stored twice."""
    stored, sources = _some(stored), _some(sources)
    stored = stored[stored[:, 0].argsort()]
    is_new = torch.ones(len(stored), dtype=torch.bool)
    is_new[1:] = (stored[1:] != stored[:-1]).any(dim=1)
    once = torch.cat((stored[is_new], _some(flag)))
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
    starts, ends = torch.tensor(written + read, dtype=torch.int64).view(1, -1, 2).unbind(-1)
    return Bounds(starts, ends, len(written))


def _shared(written: list[_Span], read: list[_Span]) -> Iterator[Fault]:
    """What is written over something else, in the order of addresses."""
    are_written, are_read = list[_Span](), list[_Span]()
    spans = [(one.start, True, one) for one in written]
    spans += [(one.start, False, one) for one in read]
    for start, is_written, span in sorted(spans, key=itemgetter(0)):
        are_written = [one for one in are_written if one.end > start]
        over = next((one for one in are_written if share_bytes(one.tensor, span.tensor)), None)
        if is_written:
            if over is not None:
                yield max(*over.jobs[:1], *span.jobs[:1], 0), _refusal(str(over), span)
            are_read = [one for one in are_read if one.end > start]
            for reader in are_read:
                if share_bytes(reader.tensor, span.tensor):
                    yield reader.jobs[0], _refusal(reader.name, span)
            are_written.append(span)
        else:
            if over is not None:
                yield span.jobs[0], _refusal(span.name, over)
            are_read.append(span)


def _refusal(name: str, other: _Span) -> Exception:
    return ValueError(f"{name} must be apart from {other}, got tensors that share bytes")


def _of_parts(jobs: SequenceABC[EncodeJob], span: _Span) -> Iterator[Fault]:
    """Of jobs that store parts of one tensor."""
    if span.name == WEIGHT:
        regions = {index: jobs[index].region for index in span.jobs}
        for first, last, common in _meetings(regions, {index: index for index in regions}):
            got = f"jobs[{first}] and jobs[{last}]"
            yield last, ValueError(f"region {common} must be of one job, got {got}")
        return
    given = {index: _place_of(jobs[index].scales) for index in span.jobs}
    if len(set(given.values())) == 1:
        return
    shape = jobs[span.jobs[0]].check()
    touched = {index: _scales_of(jobs[index], shape) for index in span.jobs}
    for first, last, common in _meetings(touched, given):
        got = f"those of jobs[{first}] and jobs[{last}]"
        yield last, ValueError(f"scales {common} must be given by one tensor, got {got}")


def _place_of(scales: torch.Tensor | None) -> object:
    return scales if scales is None else (address_of(scales), scales.stride())


def _scales_of(job: EncodeJob, shape: tuple[int, ...]) -> Region:
    """Which scales of the slot's grid the job's region touches."""
    storage = job.storage_format
    padded = shape if storage.padding is None else storage.padding.padded_shape(shape)
    return storage.recipe.scale_region(padded, storage.padded_region(job.region))[WEIGHT_SCALE]


def _meetings(
    regions: Mapping[int, Region], kinds: Mapping[int, object]
) -> Iterator[tuple[int, int, Region]]:
    """Of each job whose region meets one before it of another kind: both, and where they meet."""
    ndim = len(next(iter(regions.values())))
    # Along the dimension that tells most of them apart.
    along = max(
        range(ndim), key=lambda dim: len({one[dim] for one in regions.values()}), default=None
    )
    before: list[int] = []
    for index in sorted(regions, key=lambda one: () if along is None else regions[one][along]):
        region = regions[index]
        if along is not None:
            before = [one for one in before if regions[one][along][1] > region[along][0]]
        for one in before:
            common = common_region(regions[one], region)
            if kinds[one] != kinds[index] and region_numel(common):
                first, last = sorted((one, index))
                yield first, last, common
                break
        before.append(index)
