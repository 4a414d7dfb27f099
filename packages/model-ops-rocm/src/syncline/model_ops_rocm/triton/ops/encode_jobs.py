"""Many jobs sorted into launches, and what each launch reads of them; launches nothing.

Unit: one table. What is checked and worked out of a job is kept for the jobs like it, of the same
format, region, types, shapes, strides and alignment: of those only addresses are looked at.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from itertools import chain
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.jobs import Bounds
from syncline.model_ops_rocm.arguments.storing import ENCODE_GROUPED
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.errors import OpError
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.memory import extent_of
from syncline.model_ops_rocm.regions import region_numel
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.encode_facts import Scales
from syncline.model_ops_rocm.triton.encode_plan import Part, SlotPlan, parts_of
from syncline.model_ops_rocm.triton.encode_table import numbers_of_padding, numbers_of_part
from syncline.model_ops_rocm.triton.kernels.encode_grouped import (
    amax_grouped_kernel,
    encode_grouped_kernel,
    fill_grouped_kernel,
)
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Chosen, Kernel
from syncline.model_ops_rocm.triton.ops.encode import check_job, mode_of
from syncline.model_ops_rocm.triton.ops.encode_kept import converts, copies_of
from syncline.model_ops_rocm.triton.ops.encode_launch import (
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
from syncline.model_ops_rocm.triton.ops.encode_rows import (
    GIVEN_AT,
    MAXIMA_AT,
    MAXIMUM_BYTES,
    NUM_ADDRESSES,
    NUM_TENSORS,
    SCALE_AT,
    SOURCE_AT,
    SOURCE_SCALE_AT,
    WEIGHT_AT,
    Kind,
    Need,
    Row,
    int64,
    write_rows,
)

# In the order of their launches: a later stage reads what an earlier one leaves.
MAXIMA, TILES, PADDING = range(3)
_VECTOR: Final = 16  # bytes


class _Like(NamedTuple):
    """What jobs that differ in their tensors' addresses alone have in common."""

    number: int  # among all
    need: Need
    sizes: tuple[int, int, int, int, int]  # bytes of each tensor, 0 for what there is not


class JobTable:
    """Sorts jobs into kinds; knows them by what they are like. Filled once, by `add`."""

    __slots__ = ("_alike", "_jobs", "_kinds", "_likes", "_nonfinite", "num_maxima", "num_rows")

    def __init__(self, nonfinite: torch.Tensor | None) -> None:
        self._nonfinite = nonfinite
        self._kinds: dict[object, Kind] = {}
        self._likes: list[_Like] = []
        self._alike: dict[object, _Like] = {}
        # Of each job, what it is like and its addresses.
        self._jobs = int64(()), int64(()).view(0, NUM_ADDRESSES)
        self.num_maxima = self.num_rows = 0

    @property
    def kinds(self) -> list[Kind]:
        found = (kind for kind in self._kinds.values() if kind.num_rows)
        return sorted(found, key=lambda kind: kind.stage)

    def bounds(self) -> Bounds:
        """Of every tensor that the jobs write, and that they read."""
        which, addresses = self._jobs
        sizes = int64(chain.from_iterable(like.sizes for like in self._likes))
        starts = addresses[:, :NUM_TENSORS]
        ends = starts + sizes.view(-1, NUM_TENSORS).index_select(0, which)
        return Bounds(starts, ends, SOURCE_AT)

    def write(self, rows: torch.Tensor, maxima: int) -> None:
        """Every row of the kinds in their order, int64 [num_rows, fields] on the host.

        `maxima` is the address of those of all jobs, of which there are `num_maxima`.
        """
        write_rows(rows, self.kinds, [like.need for like in self._likes], self._jobs, maxima)

    def add(self, jobs: SequenceABC[EncodeJob]) -> dict[int, Exception]:
        """What is wrong with each job that is; nothing is added unless all are right."""
        refused: dict[int, Exception] = {}
        likes: dict[object, _Like] = {}
        numbers: list[int] = []
        addresses: list[int] = []
        last: object = None
        num_maxima = number = more_maxima = 0
        # Every tensor of a model comes through here: each property is asked for once, and all stand
        # in one tuple, which for most jobs is that of the job before.
        for index, job in enumerate(jobs):
            source, out, scales, source_scale_at, codes = job.source, job.out, job.scales, 0, None
            if isinstance(source, CodedSource):
                own, source_scale_at = source.weight.scale, source.weight.scale.data_ptr()
                is_aligned = source_scale_at % _VECTOR == 0
                codes = source.granularity, own.dtype, own.device, own.stride(), is_aligned
                source = source.weight.codes
            # What stands for a tensor that is missing is told from it by the names.
            names = len(out), WEIGHT in out, WEIGHT_SCALE in out
            weight = out.get(WEIGHT, source)
            scale = out.get(WEIGHT_SCALE, weight)
            weight_at, scale_at, source_at = weight.data_ptr(), scale.data_ptr(), source.data_ptr()
            given, given_at = None, scale_at
            if scales is not None:
                given_at = scales.data_ptr()
                form = scales.shape, scales.dtype, scales.device, scales.is_contiguous()
                given = *form, given_at == scale_at
            key = (
                id(job.storage_format),
                job.region,
                names,
                codes,
                given,
                source_at % _VECTOR == 0,
                weight_at % _VECTOR == 0,
                scale_at % _VECTOR == 0,
                source.dtype,
                source.device,
                source.shape,
                source.stride(),
                weight.dtype,
                weight.device,
                weight.shape,
                weight.is_contiguous(),
                scale.dtype,
                scale.device,
                scale.shape,
                scale.is_contiguous(),
            )
            if key != last:
                like = likes.get(key)
                if like is None:
                    try:
                        like = likes[key] = self._like(job, key[1:])
                    except (ValueError, OpError) as error:
                        refused[index] = error
                        continue
                last, number, more_maxima = key, like.number, like.need.num_maxima
            numbers.append(number)
            maxima_at = MAXIMUM_BYTES * num_maxima
            addresses += weight_at, scale_at, source_at, source_scale_at, given_at, maxima_at
            num_maxima += more_maxima
        if not refused:
            self._jobs = int64(numbers), int64(addresses).view(-1, NUM_ADDRESSES)
            self.num_maxima = num_maxima
            self._count(numbers)
        return refused

    def _count(self, numbers: list[int]) -> None:
        for number, count in Counter(numbers).items():
            need = self._likes[number].need
            self.num_rows += count * len(need.rows)
            for row in need.rows:
                row.kind.num_rows += count
                row.kind.num_tiles += count * row.num_tiles

    def _like(self, job: EncodeJob, facts: tuple[object, ...]) -> _Like:
        """Of a format that is another object, and may be equal to one before."""
        key = job.storage_format, facts
        if key not in self._alike:
            self._alike[key] = self._first(job)
        return self._alike[key]

    def _first(self, job: EncodeJob) -> _Like:
        """Checks all there is to check."""
        shape = job.check(nonfinite=self._nonfinite, allows_meta=LAUNCHER.is_compiling)
        check_job(ENCODE_GROUPED, job, self._nonfinite)
        source = job.source
        values = source.weight.codes if isinstance(source, CodedSource) else source
        if isinstance(source, CodedSource) and not source.weight.scale.is_contiguous():
            stride = f"strides {source.weight.scale.stride()}"
            refuse(ENCODE_GROUPED, "source scale", "be contiguous", stride)
        mode = mode_of(job, shape)
        if mode == "keep" and converts(job):
            limit = "have the type that is stored: another is converted with a look at the host"
            refuse(ENCODE_GROUPED, "source codes", limit, values.dtype)
        if region_numel(job.region) == 0:
            need = Need([], 0)
        elif mode == "keep":
            need = self._kept(job, shape)
        else:
            need = self._encoded(job, shape, mode)
        like = _Like(len(self._likes), need, _sizes_of(job, values))
        self._likes.append(like)
        return like

    def _encoded(self, job: EncodeJob, shape: tuple[int, ...], mode: Scales) -> Need:
        """Of numbers, which may come as codes."""
        plan, source, dtype = plan_of(job.storage_format, shape, mode, job.source)
        weight, scale, given, flag = tensors_of(job.out, (job.scales, self._nonfinite))
        parts = parts_of(
            *(plan, job.storage_format.padded_region(job.region), job.region, source, weight)
        )
        sources = source.values, source.values if source.scales is None else source.scales
        chosen, found = chosen_for(plan, dtype, ENCODE_GROUPED), Need([], 0)
        maxima = LAUNCHER.config(ENCODE_GROUPED, row_dtype(dtype), ANY_WIDTH, "maxima")
        numel = plan.grid[0] * plan.grid[1]
        for part in parts:
            read, offset = GIVEN_AT, 0
            if mode == "amax":
                given = torch.empty(0, dtype=torch.int32, device=weight.device)
                # The part's own maxima lie one after another; the kernel counts all of the slot's.
                read, offset = MAXIMA_AT, MAXIMUM_BYTES * (found.num_maxima - part.first * numel)
                found = found._replace(num_maxima=found.num_maxima + part.matrices * numel)
                found.rows.append(self._maxima(plan, part, maxima, (*sources, given), offset))
            samples = (*sources, weight, scale, given, flag)
            row = self._tiles(plan, part, chosen, samples)
            found.rows.append(row._replace(read=read, read_offset=offset))
        if mode != "none":
            found.rows.extend(self._paddings(job, shape))
        return found

    def _kept(self, job: EncodeJob, shape: tuple[int, ...]) -> Need:
        """Of codes that are copied, with their scales."""
        _, _, _, flag = tensors_of(job.out, (None, self._nonfinite))
        places, rows = ((SOURCE_AT, WEIGHT_AT), (SOURCE_SCALE_AT, SCALE_AT)), list[Row]()
        for copy, (source, weight) in zip(
            copies_of(job, shape, ENCODE_GROUPED), places, strict=True
        ):
            samples = (copy.source.values, copy.source.values, copy.out, copy.out, copy.out, flag)
            for part in copy.parts:
                row = self._tiles(copy.plan, part, copy.chosen, samples)
                rows.append(row._replace(source=source, weight=weight))
        return Need([*rows, *self._paddings(job, shape)], 0)

    def _tiles(
        self, plan: SlotPlan, part: Part, chosen: Chosen, samples: tuple[torch.Tensor, ...]
    ) -> Row:
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
    ) -> Row:
        constants = {"FACTS": amax_facts(part.facts)}
        kind = self._kind(MAXIMA, amax_grouped_kernel, chosen, constants, samples)
        tiles = tiles_of(part, tile_of(chosen, plan))
        return self._row(kind, plan, part, tiles)._replace(read=MAXIMA_AT, read_offset=offset)

    def _paddings(self, job: EncodeJob, shape: tuple[int, ...]) -> Iterator[Row]:
        """Of scales that nothing is known of."""
        chosen = LAUNCHER.config(ENCODE_GROUPED, torch.uint8, ANY_WIDTH, "fill")
        samples = (as_bits(job.out[WEIGHT_SCALE]),)
        for padding in paddings_of(job, shape):
            constants = {"PLACES": padding.places}
            kind = self._kind(PADDING, fill_grouped_kernel, chosen, constants, samples)
            tiles = tiles_of_padding(padding, chosen)
            for first, matrices, _ in padding.runs:
                numbers = numbers_of_padding(padding.boxes, tiles, first, padding.scale)
                yield Row(kind, numbers, tiles[0] * tiles[1] * matrices)

    def _row(self, kind: Kind, plan: SlotPlan, part: Part, tiles: tuple[int, int]) -> Row:
        source, source_scale = kind.samples[:2]
        return Row(
            kind,
            numbers_of_part(part, tiles, plan.scale, plan.grid),
            tiles[0] * tiles[1] * part.matrices,
            source_offset=part.source_at * source.itemsize,
            source_scale_offset=part.scale_at * source_scale.itemsize,
        )

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
