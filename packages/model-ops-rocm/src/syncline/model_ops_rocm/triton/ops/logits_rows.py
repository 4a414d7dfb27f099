"""What every op of the logits does first by Triton: the pass over tiles, and the filters' cuts.

The workspace holds what is known of each tile and of each row.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.logits import SAMPLE
from syncline.model_ops_rocm.checks import refuse, workspace_of
from syncline.model_ops_rocm.contracts.logits import VOCAB_TILE, Distribution, Vocabulary
from syncline.model_ops_rocm.triton.configs.logits import (
    KEPT_PROGRAMS,
    RARE_PROGRAMS,
    SHIFTS,
    tiles_of_a_program,
)
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.logits import tile_stats_kernel
from syncline.model_ops_rocm.triton.kernels.logits_bracket import bracket_kernel
from syncline.model_ops_rocm.triton.kernels.logits_collect import collect_kernel, kept_kernel
from syncline.model_ops_rocm.triton.kernels.logits_filter import filter_kernel
from syncline.model_ops_rocm.triton.kernels.logits_pairs import collect_pairs_kernel
from syncline.model_ops_rocm.triton.kernels.logits_settle import settle_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Kernel, overlaps, require_reachable

MAX_TILES: Final = 1_024
MAX_SHARDS: Final = 1_024
# Of more rows at once, the others' logits are read at every step of the search.
MAX_COLLECTED: Final = 1_024
REGIONS: Final = 32
CAPACITY: Final = 640
_ALIGNED_ENTRIES: Final = 32
_ENTRY_BYTES: Final = 4


def num_tiles_of(logits_RV: torch.Tensor) -> int:
    return -(-logits_RV.shape[1] // VOCAB_TILE)


class Stats(NamedTuple):
    """The workspace: entries of four bytes, a section for each name."""

    maxima: torch.Tensor  # float32 of a tile, as the next three
    sums: torch.Tensor
    weights: torch.Tensor
    ties: torch.Tensor  # int32 of a tile, as the next one
    ends: torch.Tensor
    cuts: torch.Tensor  # float32 of a row, as the next two
    lows: torch.Tensor
    highs: torch.Tensor
    quotas: torch.Tensor  # int32 of a row
    found: torch.Tensor  # float32, CAPACITY for each region of a row


_INTEGERS: Final = ("ties", "ends", "quotas")


def _sizes(logits_RV: torch.Tensor) -> list[int]:
    num_rows, tiles = logits_RV.shape[0], logits_RV.shape[0] * num_tiles_of(logits_RV)
    found = min(num_rows, MAX_COLLECTED) * REGIONS * CAPACITY
    # A kernel is compiled for how its pointers are aligned, which the number of rows must not move.
    return [
        -(-size // _ALIGNED_ENTRIES) * _ALIGNED_ENTRIES
        for size in (*[tiles] * 5, *[num_rows] * 4, found)
    ]


def stats_bytes(logits_RV: torch.Tensor) -> int:
    """What `begin` needs for so many rows and columns."""
    return _ENTRY_BYTES * sum(_sizes(logits_RV))


class RowPass(NamedTuple):
    """One call's rows: the operands that its kernels share."""

    op: str
    logits_RV: torch.Tensor
    distribution: Distribution
    vocabulary: Vocabulary
    num_real: int
    marks_R: torch.Tensor | None  # negative: a padding row
    stats: Stats

    @property
    def num_tiles(self) -> int:
        return num_tiles_of(self.logits_RV)

    @property
    def num_shards(self) -> int:
        partials_SRP = self.vocabulary.partials_SRP
        return 0 if partials_SRP is None else partials_SRP.shape[0]

    @property
    def temperature(self) -> torch.Tensor:
        """Of each row, or something that no kernel reads."""
        temperature_R = self.distribution.temperature_R
        return self.stats.maxima if temperature_R is None else temperature_R

    @property
    def marks(self) -> torch.Tensor:
        return self.stats.maxima if self.marks_R is None else self.marks_R

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is known of tiles and rows, as row kernels take it."""
        stats, partials_SRP = self.stats, self.vocabulary.partials_SRP
        partials = stats.maxima if partials_SRP is None else partials_SRP
        return stats.maxima, stats.sums, stats.ties, stats.cuts, stats.quotas, partials

    @property
    def sizes(self) -> tuple[int, ...]:
        """Strides and sizes, as row kernels take them."""
        num_rows, num_columns = self.logits_RV.shape
        counts = num_rows, num_columns, self.num_real, self.num_tiles
        return *self.logits_RV.stride(), *counts, self.vocabulary.first_id

    def finish(self, kernel: Kernel, args: tuple[object, ...], **constants: object) -> None:
        """One program per row."""
        num_shards = self.num_shards
        chosen = LAUNCHER.config(self.op, self.logits_RV.dtype, self.logits_RV.shape[1], "row")
        known = {
            "HAS_TEMPERATURE": self.distribution.temperature_R is not None,
            "IS_FILTERED": self.distribution.is_filtered,
            "TILE_SLOTS": power_of_two(self.num_tiles),
            "SHARD_SLOTS": power_of_two(num_shards) if num_shards else 0,
            "TILE": VOCAB_TILE,
            "OVERLAP": overlaps(chosen[1]),
        }
        LAUNCHER.launch(kernel, (self.logits_RV.shape[0],), chosen, args, known | constants)

    def _launch(
        self,
        kind: str,
        kernel: Kernel,
        args: tuple[object, ...],
        constants: Mapping[str, object],
        num_parts: int = 1,
    ) -> None:
        """A kernel of `sample`'s tables: so many programs to a row."""
        num_rows, num_columns = self.logits_RV.shape
        chosen = LAUNCHER.config(SAMPLE, self.logits_RV.dtype, num_columns, kind)
        known = {
            "HAS_TEMPERATURE": self.distribution.temperature_R is not None,
            "TILE": VOCAB_TILE,
            "OVERLAP": overlaps(chosen[1]),
        }
        LAUNCHER.launch(kernel, (num_rows, num_parts), chosen, args, {**known, **constants})

    @property
    def _columns(self) -> tuple[int, ...]:
        sizes = self.logits_RV.shape[1], self.num_real, self.num_tiles
        return *self.logits_RV.stride(), *sizes

    @property
    def _is_in_pairs(self) -> bool:
        """Whether `collect` takes two logits at a time: of 16 bits, in rows of whole 32 bytes."""
        logits_RV = self.logits_RV
        row_stride, last_stride = logits_RV.stride()
        is_even = logits_RV.shape[1] % 2 == 0 and row_stride % 16 == 0 and last_stride == 1
        is_even &= logits_RV.element_size() == 2 and logits_RV.data_ptr() % 16 == 0
        chosen = LAUNCHER.config(SAMPLE, logits_RV.dtype, logits_RV.shape[1], "collect")
        # Which is so on NVIDIA alone, and not where kernels are interpreted.
        return is_even and overlaps(chosen[1])

    def launch_tiles(self) -> None:
        """The pass over the logits."""
        stats = self.stats
        tiles_each = tiles_of_a_program(self.logits_RV.shape[0], self.num_tiles)
        args = (self.logits_RV, self.temperature, self.marks, stats.maxima, stats.sums)
        known = {
            "HAS_MARKS": self.marks_R is not None,
            "IS_FILTERED": self.distribution.is_filtered,
        }
        num_parts = -(-self.num_tiles // tiles_each)
        self._launch(
            "tiles", tile_stats_kernel, (*args, *self._columns, tiles_each), known, num_parts
        )

    def launch_filters(self) -> None:
        """Find each row's cut; its tiles' sums become those of what lies above it."""
        stats, logits_RV, filters = self.stats, self.logits_RV, self.distribution[1:]
        region_tiles = -(-self.num_tiles // REGIONS)
        num_regions = -(-self.num_tiles // region_tiles)
        marks: dict[str, object] = {"HAS_MARKS": self.marks_R is not None}
        places: dict[str, object] = {"REGIONS": REGIONS, "CAPACITY": CAPACITY}
        names = ("HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P")
        asked: dict[str, object] = {
            name: one is not None for name, one in zip(names, filters, strict=True)
        }
        asked |= marks | {"TILE_SLOTS": power_of_two(self.num_tiles)}
        tensors = tuple(stats.maxima if one is None else one for one in filters)
        given = (self.temperature, self.marks, *tensors)
        row = (stats.maxima, stats.sums, stats.cuts, stats.quotas, stats.lows)
        found = (stats.found, stats.ends, stats.weights)
        sizes = (*self._columns, region_tiles)
        args = (logits_RV, *given, *row, stats.highs, *self._columns, MAX_COLLECTED)
        shift: dict[str, object] = {"SHIFT": SHIFTS[logits_RV.dtype]}
        self._launch("bracket", bracket_kernel, args, asked | shift)
        args = (self.temperature, stats.maxima, stats.lows, stats.highs, *found)
        places_found = places | {"GROUP": 16 // logits_RV.element_size()}
        if self._is_in_pairs:
            args = (logits_RV, logits_RV.view(torch.int32), *args, sizes[0], *sizes[2:])
            self._launch("collect", collect_pairs_kernel, args, places_found, num_regions)
        else:
            args = (logits_RV, *args, *sizes)
            self._launch("collect", collect_kernel, args, places_found, num_regions)
        args = (*given, *row, stats.highs, *found, *sizes[3:], MAX_COLLECTED)
        self._launch("settle", settle_kernel, args, asked | places | shift)
        self._launch("filter", filter_kernel, (logits_RV, *given, *row, *sizes[:-1]), asked)
        args = (logits_RV, self.temperature, self.marks, *row[:2], stats.ties, *row[2:3])
        is_rare = asked["HAS_TOP_K"] or asked["HAS_TOP_P"]
        tiles_each = -(-self.num_tiles // (RARE_PROGRAMS if is_rare else KEPT_PROGRAMS))
        num_parts = -(-self.num_tiles // tiles_each)
        args = (*args, stats.lows, *found, *self._columns, tiles_each, region_tiles)
        self._launch("kept", kept_kernel, args, marks | places, num_parts)


class Operands(NamedTuple):
    """What a call was given, checked."""

    logits_RV: torch.Tensor
    distribution: Distribution
    vocabulary: Vocabulary
    num_real: int
    marks_R: torch.Tensor | None
    workspace: torch.Tensor | None


def begin(op: str, given: Operands, **tensors: torch.Tensor | None) -> RowPass:
    """Take the workspace apart, and launch what comes before a row's own program.

    `tensors` are the call's others, which must be on the device too.
    """
    logits_RV, distribution, vocabulary, num_real, marks_R, workspace = given
    if num_tiles_of(logits_RV) > MAX_TILES:
        limit = f"have up to {MAX_TILES * VOCAB_TILE} columns"
        refuse(op, "logits", limit, list(logits_RV.shape))
    if vocabulary.partials_SRP is not None and vocabulary.partials_SRP.shape[0] > MAX_SHARDS:
        shape = list(vocabulary.partials_SRP.shape)
        refuse(op, "vocabulary.partials", f"have up to {MAX_SHARDS} shards", shape)
    sizes = _sizes(logits_RV)
    num_bytes = _ENTRY_BYTES * sum(sizes)
    workspace = workspace_of(op, workspace, num_bytes, logits_RV.device)
    require_reachable(
        op,
        logits=logits_RV,
        workspace=workspace,
        partials=vocabulary.partials_SRP,
        **distribution._asdict(),
        **tensors,
    )
    sections = torch.split(workspace[:num_bytes].view(torch.int32), sizes)
    stats = Stats(
        *(
            section if name in _INTEGERS else section.view(torch.float32)
            for name, section in zip(Stats._fields, sections, strict=True)
        )
    )
    started = RowPass(op, logits_RV, distribution, vocabulary, num_real, marks_R, stats)
    if logits_RV.shape[0]:
        started.launch_tiles()
        if distribution.is_filtered:
            started.launch_filters()
    return started
