"""What the wrappers of products share: tiles of the result, and sums in several parts.

Unit: one product [M, N]. A product that is split along K writes its parts, in float32, into a
workspace; the program that is last, given `counters`, or a second kernel adds them in their order,
so that the bits depend on no race.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.checks import require_counters, workspace_of
from syncline.model_ops_rocm.layouts import RowMajor, WeightLayout
from syncline.model_ops_rocm.triton.configs import CONFIGS
from syncline.model_ops_rocm.triton.geometry import matrix_of
from syncline.model_ops_rocm.triton.kernels.linear import sum_splits_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, Chosen
from syncline.model_ops_rocm.triton.targets import LaunchConfig

_SUM_BLOCK: Final = 512
# The bucket of the tables that one row would be in.
_FEW_ROWS: Final = 16
_CHUNK_BYTES: Final = 16


def may_be_one_row(num_rows: int) -> bool:
    """Whether x is one row, or a call is prepared that stands for such ones, too."""
    return num_rows == 1 or (LAUNCHER.is_preparing and num_rows <= _FEW_ROWS)


def chunk_of(layout: WeightLayout, weight: torch.Tensor) -> int:
    """Elements of a row that the 16x16 shuffle keeps together; 0 for row-major."""
    return 0 if layout == RowMajor() else _CHUNK_BYTES // weight.itemsize


def prefetch(config: LaunchConfig, *even: bool) -> int:
    """Columns of a weight to ask for ahead, where its rows are whole tiles."""
    return config.constants["PREFETCH"] if overlaps(config) and all(even) else 0


def head(config: LaunchConfig, num_columns: int, depth: int, *, is_row_major: bool) -> int:
    """Columns of a weight to read ahead of the loop, where all tiles and parts have so many."""
    constants = config.constants
    num_blocks, rest = divmod(depth, constants["BLOCK_K"] * constants["SPLITS"])
    is_even = rest == 0 and num_columns % constants["BLOCK_N"] == 0
    fits = num_blocks * constants["BLOCK_K"] >= constants["HEAD"]
    return constants["HEAD"] if is_row_major and is_even and fits else 0


def overlaps(config: LaunchConfig) -> bool:
    """Whether the kernel is launched before the one ahead of it has ended, and waits for it."""
    return bool(config.launch_pdl) and not IS_INTERPRETED


def _split_rows(op: str, weight: torch.Tensor) -> Iterator[tuple[int, Mapping[str, int]]]:
    """(the most rows of x, constants) of each row of the tables that splits products with it."""
    wanted = (op, LAUNCHER.arch, weight.dtype)
    for key, config in CONFIGS.items():
        if key[:3] == wanted and config.constants.get("SPLITS", 1) > 1:
            yield key.up_to, config.constants


def split_bytes(op: str, weight: torch.Tensor, max_tokens: int) -> int:
    """The largest workspace of any row of the tables that up to `max_tokens` rows can fall into."""
    each = (
        constants["SPLITS"] * min(up_to, max_tokens) * weight.shape[0] * 4
        for up_to, constants in _split_rows(op, weight)
    )
    return max(each, default=0)


def num_counters(op: str, weight: torch.Tensor, max_tokens: int) -> int:
    """The most tiles whose parts are merged in their launch, likewise."""
    each = (
        _num_tiles(min(up_to, max_tokens), weight.shape[0], constants)
        for up_to, constants in _split_rows(op, weight)
        if constants.get("MERGES")
    )
    return max(each, default=0)


def _num_tiles(num_rows: int, num_columns: int, constants: Mapping[str, int]) -> int:
    return -(-num_rows // constants["BLOCK_M"]) * -(-num_columns // constants["BLOCK_N"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product by the configuration `chosen`; nothing is launched for an empty one."""

    op: str
    chosen: Chosen
    num_rows: int
    num_columns: int
    bias: torch.Tensor | None
    out: torch.Tensor
    counters: torch.Tensor | None

    def __post_init__(self) -> None:
        if self.counters is not None:
            require_counters(self.op, self.counters, self.grid[0] if self.merges else 0)

    @property
    def is_empty(self) -> bool:
        return self.num_rows == 0 or self.num_columns == 0

    @property
    def splits(self) -> int:
        return self.chosen[1].constants.get("SPLITS", 1)

    @property
    def grid(self) -> tuple[int, int]:
        constants = self.chosen[1].constants
        return _num_tiles(self.num_rows, self.num_columns, constants), self.splits

    @property
    def merges(self) -> bool:
        """Whether the product's kernel adds the parts; else a second one does, if there are any."""
        may_merge = self.splits > 1 and self.chosen[1].constants.get("MERGES") == 1
        return may_merge and self.counters is not None

    @property
    def adds_bias(self) -> bool:
        """Whether the product's kernel does; else the sum of its parts."""
        return self.bias is not None and (self.splits == 1 or self.merges)

    @property
    def bias_or_out(self) -> torch.Tensor:
        """A tensor to pass, read only if there is a bias."""
        return self.out if self.bias is None else self.bias

    @property
    def bias_stride(self) -> int:
        return 0 if self.bias is None else self.bias.stride(0)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Between rows and between columns of the result, and of the bias."""
        written = matrix_of(self.op, "out", self.out)
        return written.stride, written.last_stride, self.bias_stride

    def parts(self, workspace: torch.Tensor | None) -> torch.Tensor:
        """Where they lie; a `workspace` that is too small is refused, without one it is new memory.

        Of a product in one part, a tensor to pass, which nobody reads.
        """
        if self.splits == 1:
            return self.out
        num_bytes = self.splits * self.num_rows * self.num_columns * 4
        memory = workspace_of(self.op, workspace, num_bytes, self.out.device)
        return memory[:num_bytes].view(torch.float32)

    @property
    def counters_or_out(self) -> torch.Tensor:
        """A tensor to pass, used only if the kernel `merges`."""
        return self.counters if self.counters is not None and self.merges else self.out

    def finish(self, parts: torch.Tensor) -> None:
        """Add the parts, if there are any left."""
        if self.splits == 1 or self.merges:
            return
        key, config = self.chosen
        LAUNCHER.launch(
            sum_splits_kernel,
            (self.num_rows, -(-self.num_columns // _SUM_BLOCK)),
            (key, LaunchConfig(num_warps=4, launch_pdl=config.launch_pdl)),
            (
                *(parts, self.bias_or_out, self.out, self.num_rows, self.num_columns),
                *self.strides,
            ),
            {
                "HAS_BIAS": self.bias is not None,
                "SPLITS": self.splits,
                "BLOCK_N": _SUM_BLOCK,
                "OVERLAP": overlaps(config),
            },
        )
