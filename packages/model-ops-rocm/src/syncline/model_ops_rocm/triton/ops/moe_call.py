"""One call of the experts, as every way of computing it takes it: operands, memory, constants."""

from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.moe import SCALE_BLOCK, ExpertShapes, is_per_row
from syncline.model_ops_rocm.contracts.moe import SortedPairs, sorted_capacity
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.triton.configs.moe import MAX_BLOCK_PAIRS
from syncline.model_ops_rocm.triton.launch import Chosen

_ALIGNMENT: Final = 256
Encoded = tuple[torch.Tensor, torch.Tensor]  # codes, scales


class ExpertCall(NamedTuple):
    """Operands that were checked, and a workspace of `workspace_bytes`."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    routing: tuple[torch.Tensor, torch.Tensor]  # weights, ids
    scales: tuple[torch.Tensor, torch.Tensor] | None
    recipe: Quantised | None
    out: torch.Tensor
    shapes: ExpertShapes
    workspace: torch.Tensor
    chunk: int  # elements of 16 bytes in the shuffle, or 0 for row-major

    @property
    def scales_or_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors to pass, read only if there are scales."""
        return (self.w13, self.w2) if self.scales is None else self.scales

    @property
    def scale_depth(self) -> int:
        """Columns that share a scale: 0 if there are none, 1 for all of a row."""
        if self.scales is None:
            return 0
        return 1 if is_per_row(self.scales[0], self.w13) else SCALE_BLOCK

    def constants(self, chosen: Chosen) -> dict[str, object]:
        """Of every kernel of a projection; its steps have no more columns than share a scale."""
        block_k = chosen[1].constants["BLOCK_K"]
        return {
            "NUM_EXPERTS": self.shapes.num_experts,
            "HIDDEN": self.shapes.hidden,
            "INTERMEDIATE": self.shapes.intermediate,
            "CHUNK": self.chunk,
            "SCALE": self.scale_depth,
            "BLOCK_K": min(block_k, SCALE_BLOCK) if self.scale_depth > 1 else block_k,
        }

    def activated(self) -> torch.Tensor:
        """[T * k, I], in the workspace."""
        return self._numbers(0, self.x.dtype, self.shapes.num_pairs, self.shapes.intermediate)

    def y(self) -> torch.Tensor:
        """[T * k, H], in the workspace."""
        return self._numbers(1, self.x.dtype, self.shapes.num_pairs, self.shapes.hidden)

    def sort(self, block_size: int) -> SortedPairs:
        """In the workspace, for blocks of so many pairs; without places."""
        shapes = self.shapes
        capacity = sorted_capacity(shapes.num_pairs, shapes.num_experts, block_size)
        return SortedPairs(
            self._numbers(2, torch.int32, capacity),
            self._numbers(3, torch.int32, capacity // block_size),
            self._numbers(4, torch.int32, shapes.num_experts),
            self.routing[1],
        )

    def codes_of_x(self, recipe: Quantised) -> Encoded:
        """In the workspace."""
        return self._codes(5, recipe, self.shapes.num_tokens, self.shapes.hidden)

    def codes_of_activated(self, recipe: Quantised) -> Encoded:
        """In the workspace."""
        return self._codes(7, recipe, self.shapes.num_pairs, self.shapes.intermediate)

    def _codes(self, part: int, recipe: Quantised, rows: int, columns: int) -> Encoded:
        per_row = 1 if self.scale_depth == 1 else -(-columns // SCALE_BLOCK)
        return (
            self._numbers(part, recipe.dtype, rows, columns),
            self._numbers(part + 1, torch.float32, rows, per_row),
        )

    def _numbers(self, part: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        sizes = bytes_of_parts(self.shapes, self.x.dtype, is_fp8=self.scales is not None)
        start, count = sum(sizes[:part]), dtype.itemsize * torch.Size(shape).numel()
        return self.workspace[start : start + count].view(dtype).view(shape)


def bytes_of_parts(shapes: ExpertShapes, dtype: torch.dtype, *, is_fp8: bool) -> tuple[int, ...]:
    """Of the workspace: activations, results of pairs, and a sort in the largest blocks; codes and
    scales of x and of the activations, which weights in fp8 may ask for."""
    capacity = shapes.num_pairs + shapes.num_experts * (MAX_BLOCK_PAIRS - 1)
    parts = [
        shapes.num_pairs * shapes.intermediate * dtype.itemsize,
        shapes.num_pairs * shapes.hidden * dtype.itemsize,
        *(4 * capacity, 4 * capacity, 4 * shapes.num_experts),
    ]
    if is_fp8:
        parts += _bytes_of_codes(shapes.num_tokens, shapes.hidden)
        parts += _bytes_of_codes(shapes.num_pairs, shapes.intermediate)
    return tuple(-(-part // _ALIGNMENT) * _ALIGNMENT for part in parts)


def _bytes_of_codes(rows: int, columns: int) -> tuple[int, int]:
    return rows * columns, 4 * rows * -(-columns // SCALE_BLOCK)
