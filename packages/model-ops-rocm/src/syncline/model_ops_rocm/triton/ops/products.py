"""What the wrappers of products share: tiles of the result, and sums in several parts.

Unit: one product [M, N]. A product that is split along K writes its parts, in float32, into a
workspace; a second kernel adds them in their order, so that the bits depend on no race.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.checks import require_workspace
from syncline.model_ops_rocm.layouts import RowMajor, WeightLayout
from syncline.model_ops_rocm.triton.configs import CONFIGS
from syncline.model_ops_rocm.triton.configs.base import ConfigKey
from syncline.model_ops_rocm.triton.geometry import matrix_of
from syncline.model_ops_rocm.triton.kernels.linear import sum_splits_kernel
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER
from syncline.model_ops_rocm.triton.targets import LaunchConfig

_SUM_BLOCK: Final = 512
_CHUNK_BYTES: Final = 16


def chunk_of(layout: WeightLayout, weight: torch.Tensor) -> int:
    """Elements of a row that the 16x16 shuffle keeps together; 0 for row-major."""
    return 0 if layout == RowMajor() else _CHUNK_BYTES // weight.itemsize


def prefetch(config: LaunchConfig, *even: bool) -> int:
    """Columns of a weight to ask for ahead, where its rows are whole tiles."""
    return config.constants["PREFETCH"] if overlaps(config) and all(even) else 0


def overlaps(config: LaunchConfig) -> bool:
    """Whether the kernel is launched before the one ahead of it has ended, and waits for it."""
    return bool(config.launch_pdl) and not IS_INTERPRETED


def split_bytes(op: str, weight: torch.Tensor, max_tokens: int) -> int:
    """The largest workspace of any row of the tables that up to `max_tokens` rows can fall into."""
    wanted = (op, LAUNCHER.arch, weight.dtype)
    largest = 0
    for key, config in CONFIGS.items():
        if key[:3] == wanted and config.constants.get("SPLITS", 1) > 1:
            num_rows = min(key.up_to, max_tokens)
            largest = max(largest, config.constants["SPLITS"] * num_rows * weight.shape[0] * 4)
    return largest


class Target(NamedTuple):
    """Where a product's kernel stores: the result, or the parts of its sums."""

    tensor: torch.Tensor
    strides: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product by the configuration `chosen`; nothing is launched for an empty one."""

    op: str
    chosen: tuple[ConfigKey, LaunchConfig]
    num_rows: int
    num_columns: int
    bias: torch.Tensor | None
    out: torch.Tensor

    @property
    def is_empty(self) -> bool:
        return self.num_rows == 0 or self.num_columns == 0

    @property
    def splits(self) -> int:
        return self.chosen[1].constants["SPLITS"]

    @property
    def grid(self) -> tuple[int, int]:
        constants = self.chosen[1].constants
        tiles_m = -(-self.num_rows // constants["BLOCK_M"])
        return tiles_m * -(-self.num_columns // constants["BLOCK_N"]), self.splits

    @property
    def adds_bias(self) -> bool:
        """Whether the product's kernel does; else the sum of its parts."""
        return self.bias is not None and self.splits == 1

    @property
    def bias_or_out(self) -> torch.Tensor:
        """A tensor to pass, read only if there is a bias."""
        return self.out if self.bias is None else self.bias

    @property
    def bias_stride(self) -> int:
        return 0 if self.bias is None else self.bias.stride(0)

    def target(self, workspace: torch.Tensor | None) -> Target:
        """A `workspace` that is too small is refused; without one, parts get new memory."""
        if self.splits == 1:
            written = matrix_of(self.op, "out", self.out)
            return Target(self.out, (written.stride, written.last_stride))
        shape = (self.splits, self.num_rows, self.num_columns)
        num_bytes = self.splits * self.num_rows * self.num_columns * 4
        if workspace is None:
            parts = torch.empty(shape, dtype=torch.float32, device=self.out.device)
        else:
            used = require_workspace(self.op, workspace, num_bytes)[:num_bytes]
            parts = used.view(torch.float32).view(shape)
        return Target(parts, (self.num_columns, 1))

    def finish(self, target: Target) -> None:
        """Add the parts, if there are any."""
        if self.splits == 1:
            return
        written = matrix_of(self.op, "out", self.out)
        key, config = self.chosen
        LAUNCHER.launch(
            sum_splits_kernel,
            (self.num_rows, -(-self.num_columns // _SUM_BLOCK)),
            (key, LaunchConfig(num_warps=4, launch_pdl=config.launch_pdl)),
            (
                *(target.tensor, self.bias_or_out, self.out, self.num_rows, self.num_columns),
                *(written.stride, written.last_stride, self.bias_stride),
            ),
            {
                "HAS_BIAS": self.bias is not None,
                "SPLITS": self.splits,
                "BLOCK_N": _SUM_BLOCK,
                "OVERLAP": overlaps(config),
            },
        )
