"""What every op of the logits does first by Triton: the pass over tiles, and the filters' cuts.

The workspace holds what is known of each tile and of each row.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.logits import SAMPLE
from syncline.model_ops_rocm.checks import refuse, require_workspace
from syncline.model_ops_rocm.contracts.logits import VOCAB_TILE, Distribution, Vocabulary
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.logits import tile_stats_kernel
from syncline.model_ops_rocm.triton.kernels.logits_filter import filter_kernel, kept_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Kernel, require_reachable

MAX_TILES: Final = 1_024
MAX_SHARDS: Final = 1_024
_ALIGNED_ENTRIES: Final = 32
_ENTRY_BYTES: Final = 4


def num_tiles_of(logits_RV: torch.Tensor) -> int:
    return -(-logits_RV.shape[1] // VOCAB_TILE)


class Stats(NamedTuple):
    """The workspace: entries of four bytes, a section for each name."""

    maxima: torch.Tensor  # of a tile, as the next two
    sums: torch.Tensor
    ties: torch.Tensor
    cuts: torch.Tensor  # of a row
    quotas: torch.Tensor


def _sizes(logits_RV: torch.Tensor) -> list[int]:
    num_rows, tiles = logits_RV.shape[0], logits_RV.shape[0] * num_tiles_of(logits_RV)
    # A kernel is compiled for how its pointers are aligned, which the number of rows must not move.
    return [
        -(-size // _ALIGNED_ENTRIES) * _ALIGNED_ENTRIES
        for size in (tiles, tiles, tiles, num_rows, num_rows)
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
        }
        LAUNCHER.launch(kernel, (self.logits_RV.shape[0],), chosen, args, known | constants)

    def _launch(
        self, kind: str, kernel: Kernel, args: tuple[object, ...], constants: Mapping[str, object]
    ) -> None:
        """A kernel of `sample`'s tables: a program per row, or per TILES of its tiles."""
        num_rows, num_columns = self.logits_RV.shape
        chosen = LAUNCHER.config(SAMPLE, self.logits_RV.dtype, num_columns, kind)
        known = {
            "HAS_TEMPERATURE": self.distribution.temperature_R is not None,
            "HAS_MARKS": self.marks_R is not None,
        }
        grid: tuple[int, ...] = (num_rows,)
        if kind in ("tiles", "kept"):
            grid = num_rows, -(-self.num_tiles // chosen[1].constants["TILES"])
        LAUNCHER.launch(kernel, grid, chosen, args, {**known, **constants})

    @property
    def _columns(self) -> tuple[int, ...]:
        sizes = self.logits_RV.shape[1], self.num_real, self.num_tiles
        return *self.logits_RV.stride(), *sizes

    def launch_tiles(self) -> None:
        """The pass over the logits."""
        stats = self.stats
        args = (self.logits_RV, self.temperature, self.marks, stats.maxima, stats.sums)
        self._launch("tiles", tile_stats_kernel, (*args, *self._columns), {"TILE": VOCAB_TILE})

    def launch_filters(self) -> None:
        """Find each row's cut; its tiles' sums become those of what lies above it."""
        stats, logits_RV = self.stats, self.logits_RV
        given = (self.temperature, self.marks)
        filters = self.distribution[1:]
        asked = tuple(stats.maxima if one is None else one for one in filters)
        names = ("HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P")
        flags: dict[str, object] = {
            name: one is not None for name, one in zip(names, filters, strict=True)
        }
        tile: dict[str, object] = {"TILE": VOCAB_TILE}
        found = (stats.maxima, stats.sums, stats.cuts, stats.quotas)
        slots = {"TILE_SLOTS": power_of_two(self.num_tiles)}
        args = (logits_RV, *given, *asked, *found, *self._columns)
        self._launch("filter", filter_kernel, args, flags | tile | slots)
        kept = (stats.maxima, stats.sums, stats.ties, stats.cuts)
        self._launch("kept", kept_kernel, (logits_RV, *given, *kept, *self._columns), tile)


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
    if workspace is None:
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=logits_RV.device)
    require_workspace(op, workspace, num_bytes)
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
            section if name in ("ties", "quotas") else section.view(torch.float32)
            for name, section in zip(Stats._fields, sections, strict=True)
        )
    )
    started = RowPass(op, logits_RV, distribution, vocabulary, num_real, marks_R, stats)
    if logits_RV.shape[0]:
        started.launch_tiles()
        if distribution.is_filtered:
            started.launch_filters()
    return started
