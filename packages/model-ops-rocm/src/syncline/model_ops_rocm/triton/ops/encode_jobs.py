"""Many jobs sorted into launches, and what each launch reads of them; launches nothing.

Unit: one table. What is checked and worked out of a job is kept for the jobs like it, of the same
format, shapes, strides and region: of those only the tensors themselves are looked at.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from syncline.model_ops_rocm.arguments.jobs import Bounds
from syncline.model_ops_rocm.arguments.storing import ENCODE_GROUPED
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE, TensorSpec
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.memory import extent_of
from syncline.model_ops_rocm.regions import region_numel
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.encode_facts import Scales
from syncline.model_ops_rocm.triton.encode_plan import Part, SlotPlan, parts_of
from syncline.model_ops_rocm.triton.encode_table import (
    Numbers,
    numbers_of_padding,
    numbers_of_part,
)
from syncline.model_ops_rocm.triton.kernels.encode_grouped import (
    amax_grouped_kernel,
    encode_grouped_kernel,
    fill_grouped_kernel,
)
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Kernel
from syncline.model_ops_rocm.triton.ops.encode import check_job, mode_of
from syncline.model_ops_rocm.triton.ops.encode_kept import converts, copies_of
from syncline.model_ops_rocm.triton.ops.encode_launch import (
    Chosen,
    amax_facts,
    chosen_for,
    paddings_of,
    plan_of,
    row_dtype,
    tensors_of,
    tile_of,
    tiles_of,
    tiles_of_padding,
)

# In the order of their launches: a later stage reads what an earlier one leaves.
MAXIMA, TILES, PADDING = range(3)
_WEIGHT, _SCALE, _SOURCE, _SOURCE_SCALE = range(4)  # of a job's addresses


@dataclass(slots=True, kw_only=True, eq=False)
class Kind:
    """The rows of one launch, as they are found."""

    stage: int
    kernel: Kernel
    chosen: Chosen
    constants: Mapping[str, object]
    samples: tuple[torch.Tensor, ...]  # of one of the jobs, for their types
    num_tiles: int = 0
    # Of each row, and which of the numbers that the table knows stand behind them.
    addresses: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.numbers)


class _Row(NamedTuple):
    """What the rows of jobs that are alike have in common."""

    kind: Kind
    numbers: int  # which of those that the table knows
    num_tiles: int
    source: int = _SOURCE  # which of the job's addresses, and how many bytes from it on
    source_offset: int = 0
    weight: int = _WEIGHT
    source_scale_offset: int = 0
    maxima_at: int | None = None  # bytes from the job's maxima on, where they count


class _Found(NamedTuple):
    """What a job needs: rows of launches, and maxima to be made first."""

    rows: list[_Row]
    num_maxima: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Like:
    """What jobs that differ in their tensors alone have in common."""

    spec: dict[str, TensorSpec]
    device: torch.device
    scales: TensorSpec | None
    num_maxima: int
    rows: tuple[_Row, ...]
    number: int  # among the likenesses

    def fits(self, job: EncodeJob) -> bool:
        """Whether the job's tensors are what those of the first one were."""
        out, spec, device, source = job.out, self.spec, self.device, job.source
        if isinstance(source, CodedSource):
            if source.weight.scale.device != device:
                return False
            source = source.weight.codes
        if source.device != device or len(out) != len(spec):
            return False
        for name, wanted in spec.items():
            tensor = out.get(name)
            if tensor is None or not _is(tensor, wanted, device):
                return False
        if job.scales is None or self.scales is None:
            return job.scales is None
        return _is(job.scales, self.scales, device)


def _is(tensor: torch.Tensor, wanted: TensorSpec, device: torch.device) -> bool:
    return (
        tensor.shape == wanted.shape
        and tensor.dtype is wanted.dtype
        and tensor.device == device
        and tensor.is_contiguous()
    )


class JobTable:
    """Sorts jobs into kinds; knows them by what they are like.

    `base` is the address of the maxima of all jobs, which are counted in `num_maxima`.
    """

    __slots__ = (
        *("_base", "_extents", "_kinds", "_like", "_nonfinite", "_numbers", "_sizes"),
        "num_maxima",
    )

    def __init__(self, nonfinite: torch.Tensor | None, base: int) -> None:
        self._nonfinite = nonfinite
        self._base = base
        self._kinds: dict[object, Kind] = {}
        self._like: dict[object, _Like] = {}
        self._numbers: list[Numbers] = []
        # Of each job, what it is like and where its tensors are; of each likeness, their bytes.
        self._extents = array("q")
        self._sizes: list[tuple[int, int, int, int, int]] = []
        self.num_maxima = 0

    @property
    def kinds(self) -> list[Kind]:
        found = (kind for kind in self._kinds.values() if kind.num_rows)
        return sorted(found, key=lambda kind: kind.stage)

    @property
    def num_rows(self) -> int:
        return sum(kind.num_rows for kind in self._kinds.values())

    def bounds(self) -> Bounds:
        """Of every tensor that the jobs write, and that they read."""
        if not self._extents:
            nothing = torch.empty(0, 2, dtype=torch.int64)
            return nothing, nothing
        sizes = torch.tensor(self._sizes, dtype=torch.int64)
        extents = torch.frombuffer(self._extents, dtype=torch.int64).view(-1, 1 + sizes.shape[1])
        starts = extents[:, 1:]
        bounds = torch.stack((starts, starts + sizes[extents[:, 0]]), dim=-1)
        return bounds[:, :2].reshape(-1, 2), bounds[:, 2:].reshape(-1, 2)

    def write(self, rows: torch.Tensor) -> None:
        """Every row of the kinds in their order, int64 [num_rows, fields] on the host."""
        # Through arrays: PyTorch looks at every number of a list.
        addresses = array("q", chain.from_iterable(kind.addresses for kind in self.kinds))
        which = array("q", chain.from_iterable(kind.numbers for kind in self.kinds))
        known = torch.tensor(self._numbers, dtype=torch.int64)
        split = rows.shape[1] - known.shape[1]
        rows[:, :split] = torch.frombuffer(addresses, dtype=torch.int64).view(-1, split)
        rows[:, split:] = known[torch.frombuffer(which, dtype=torch.int64)]

    def add(self, job: EncodeJob) -> None:
        """Raises what is wrong with the job, and has then added nothing of it."""
        source, out, scales, coded, codes_of = job.source, job.out, job.scales, 0, None
        if isinstance(source, CodedSource):
            scale = source.weight.scale
            coded, codes_of = scale.data_ptr(), (source.granularity, scale.dtype, scale.stride())
            source = source.weight.codes
        weight, scale_out = out.get(WEIGHT), out.get(WEIGHT_SCALE)
        weight_at = -1 if weight is None else weight.data_ptr()
        scale_at = weight_at if scale_out is None else scale_out.data_ptr()
        at = weight_at, scale_at, source.data_ptr(), coded
        key = (
            *(id(job.storage_format), job.region, source.dtype, source.shape, source.stride()),
            *(codes_of, scales is None, at[_SOURCE] % 16 == 0, weight_at % 16 == 0),
            scales is not None and scales.data_ptr() == scale_at,
        )
        like = self._like.get(key)
        if like is None or not like.fits(job):
            like = self._like[key] = self._first(job)
        given_at = scale_at if scales is None else scales.data_ptr()
        self._extents.extend((like.number, *at, given_at))
        maxima_at = self._base + 4 * self.num_maxima
        self.num_maxima += like.num_maxima
        for row in like.rows:
            kind, read = row.kind, row.maxima_at
            kind.addresses.extend(
                (
                    *(kind.num_tiles, at[row.source] + row.source_offset, at[row.weight], scale_at),
                    given_at if read is None else maxima_at + read,
                    coded + row.source_scale_offset,
                )
            )
            kind.numbers.append(row.numbers)
            kind.num_tiles += row.num_tiles

    def _first(self, job: EncodeJob) -> _Like:
        """Checks all there is to check."""
        shape = job.check(nonfinite=self._nonfinite, allows_meta=LAUNCHER.is_compiling)
        check_job(ENCODE_GROUPED, job, self._nonfinite)
        source, scales = job.source, job.scales
        values = source.weight.codes if isinstance(source, CodedSource) else source
        if isinstance(source, CodedSource) and not source.weight.scale.is_contiguous():
            stride = f"strides {source.weight.scale.stride()}"
            refuse(ENCODE_GROUPED, "source scale", "be contiguous", stride)
        mode = mode_of(job, shape)
        if mode == "keep" and converts(job):
            limit = "have the type that is stored: another is converted with a look at the host"
            refuse(ENCODE_GROUPED, "source codes", limit, values.dtype)
        if region_numel(job.region) == 0:
            found = _Found([], 0)
        elif mode == "keep":
            found = self._kept(job, shape)
        else:
            found = self._encoded(job, shape, mode)
        self._sizes.append(_sizes_of(job, values))
        return _Like(
            number=len(self._sizes) - 1,
            spec=job.storage_format.storage_spec(shape),
            device=values.device,
            scales=scales if scales is None else _spec(scales),
            num_maxima=found.num_maxima,
            rows=tuple(found.rows),
        )

    def _encoded(self, job: EncodeJob, shape: tuple[int, ...], mode: Scales) -> _Found:
        """Of numbers, which may come as codes."""
        plan, source, dtype = plan_of(job.storage_format, shape, mode, job.source)
        weight, scale, given, flag = tensors_of(job.out, (job.scales, self._nonfinite))
        parts = parts_of(
            *(plan, job.storage_format.padded_region(job.region), job.region, source, weight)
        )
        sources = source.values, source.values if source.scales is None else source.scales
        chosen, found = chosen_for(plan, dtype, ENCODE_GROUPED), _Found([], 0)
        maxima = LAUNCHER.config(ENCODE_GROUPED, row_dtype(dtype), ANY_WIDTH, "maxima")
        numel = plan.grid[0] * plan.grid[1]
        for part in parts:
            offset = None
            if mode == "amax":
                given = torch.empty(0, dtype=torch.int32, device=weight.device)
                # The part's own maxima lie one after another; the kernel counts all of the slot's.
                offset = 4 * (found.num_maxima - part.first * numel)
                found = found._replace(num_maxima=found.num_maxima + part.matrices * numel)
                found.rows.append(self._maxima(plan, part, maxima, (*sources, given), offset))
            samples = (*sources, weight, scale, given, flag)
            found.rows.append(self._tiles(plan, part, chosen, samples)._replace(maxima_at=offset))
        if mode != "none":
            found.rows.extend(self._paddings(job, shape))
        return found

    def _kept(self, job: EncodeJob, shape: tuple[int, ...]) -> _Found:
        """Of codes that are copied, with their scales."""
        _, _, _, flag = tensors_of(job.out, (None, self._nonfinite))
        places, rows = ((_SOURCE, _WEIGHT), (_SOURCE_SCALE, _SCALE)), list[_Row]()
        for copy, (source, weight) in zip(
            copies_of(job, shape, ENCODE_GROUPED), places, strict=True
        ):
            samples = (copy.source.values, copy.source.values, copy.out, copy.out, copy.out, flag)
            for part in copy.parts:
                row = self._tiles(copy.plan, part, copy.chosen, samples)
                rows.append(row._replace(source=source, weight=weight))
        return _Found([*rows, *self._paddings(job, shape)], 0)

    def _tiles(
        self, plan: SlotPlan, part: Part, chosen: Chosen, samples: tuple[torch.Tensor, ...]
    ) -> _Row:
        tile = tile_of(chosen, plan)
        constants = {
            "FACTS": part.facts,
            "BLOCK_COLUMNS": tile.block_columns,
            "ACROSS": tile.across,
        }
        kind = self._kind(TILES, encode_grouped_kernel, chosen, constants, samples)
        return self._row(kind, plan, part, tiles_of(part, tile))

    def _maxima(
        self,
        plan: SlotPlan,
        part: Part,
        chosen: Chosen,
        samples: tuple[torch.Tensor, ...],
        offset: int,
    ) -> _Row:
        constants = {"FACTS": amax_facts(part.facts)}
        kind = self._kind(MAXIMA, amax_grouped_kernel, chosen, constants, samples)
        tiles = tiles_of(part, tile_of(chosen, plan))
        return self._row(kind, plan, part, tiles)._replace(maxima_at=offset)

    def _paddings(self, job: EncodeJob, shape: tuple[int, ...]) -> Iterator[_Row]:
        """Of scales that nothing is known of."""
        chosen = LAUNCHER.config(ENCODE_GROUPED, torch.uint8, ANY_WIDTH, "fill")
        samples = (as_bits(job.out[WEIGHT_SCALE]),)
        for padding in paddings_of(job, shape):
            constants = {"PLACES": padding.places}
            kind = self._kind(PADDING, fill_grouped_kernel, chosen, constants, samples)
            tiles = tiles_of_padding(padding, chosen)
            for first, matrices, _ in padding.runs:
                numbers = numbers_of_padding(padding.boxes, tiles, first, padding.scale)
                yield _Row(kind, self._known(numbers), tiles[0] * tiles[1] * matrices)

    def _row(self, kind: Kind, plan: SlotPlan, part: Part, tiles: tuple[int, int]) -> _Row:
        source, source_scale = kind.samples[:2]
        return _Row(
            kind,
            self._known(numbers_of_part(part, tiles, plan.scale, plan.grid)),
            tiles[0] * tiles[1] * part.matrices,
            source_offset=part.source_at * source.itemsize,
            source_scale_offset=part.scale_at * source_scale.itemsize,
        )

    def _known(self, numbers: Numbers) -> int:
        self._numbers.append(numbers)
        return len(self._numbers) - 1

    def _kind(
        self,
        stage: int,
        kernel: Kernel,
        chosen: Chosen,
        constants: Mapping[str, object],
        samples: tuple[torch.Tensor, ...],
    ) -> Kind:
        types = tuple(sample.dtype for sample in samples)
        key = stage, chosen[0], tuple(constants.items()), types
        if key not in self._kinds:
            self._kinds[key] = Kind(
                stage=stage, kernel=kernel, chosen=chosen, constants=constants, samples=samples
            )
        return self._kinds[key]


def _sizes_of(job: EncodeJob, values: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Bytes of weight, scales, source, its scales and given scales; 0 for what there is not."""
    scale, source, given = job.out.get(WEIGHT_SCALE), job.source, job.scales
    start, end = extent_of(values)
    return (
        job.out[WEIGHT].nbytes,
        0 if scale is None else scale.nbytes,
        end - start,
        source.weight.scale.nbytes if isinstance(source, CodedSource) else 0,
        # Those that are stored are given where they are.
        0 if given is None or "scales" not in job.read() else given.nbytes,
    )


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype)
