"""KVPool: the tensors of one layer's cache in a layout, their sizes, and the address of each slot.

Unit: one layer. A slot is `block_id * block_size + offset`, the same number whether blocks are the
manager's or the kernels'. Knows no owner of a block and no step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.formats import TensorSpec
from syncline.model_ops_rocm.kv.layout import KVLayout, KVScale, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """`num_blocks` blocks of the manager's `block_size` in one layout; compared by value."""

    layout: KVLayout
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field, value in (
            ("num_blocks", self.num_blocks),
            ("block_size", self.block_size),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
        ):
            if value < 1:
                raise ValueError(f"KVPool: {field} must be positive, got {value}")
        self.layout.kernel_blocks_per_block(self.block_size)
        self.layout.check_head_dim(self.head_dim)

    @property
    def num_kernel_blocks(self) -> int:
        return self.num_blocks * self.layout.kernel_blocks_per_block(self.block_size)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def logical_shape(self) -> tuple[int, int, int, int]:
        """[NB, K, BS, D], of keys and of values, whatever their order."""
        return (
            self.num_kernel_blocks,
            self.num_kv_heads,
            self.layout.kernel_block_size,
            self.head_dim,
        )

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The logical shape of the scales of keys, and of values: [1], [K] or [NB, K, BS]."""
        if self.layout.scale == KVScale.TOKEN:
            return self.logical_shape[:3]
        return (1,) if self.layout.scale == KVScale.TENSOR else (self.num_kv_heads,)

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors to allocate: "k", "v", and with scales "k_scale" and "v_scale"."""
        specs: dict[str, TensorSpec] = {}
        sides: tuple[Side, Side] = ("k", "v")
        for side in sides:
            stored = self.layout.digits(side).stored_sizes(self.logical_shape)
            shape = (self.num_kernel_blocks, *stored)
            specs[side] = TensorSpec(shape=shape, dtype=self.layout.dtype)
        if self.layout.scale != KVScale.NONE:
            shape = self.scale_shape
            if self.layout.scale == KVScale.TOKEN:
                shape = self.layout.scale_digits().stored_sizes(shape)
            for side in sides:
                specs[f"{side}_scale"] = TensorSpec(shape=shape, dtype=torch.float32)
        return specs

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs().values())

    @property
    def bytes_per_block(self) -> int:
        """What one more of the manager's blocks costs; scales that do not grow are left out."""
        per_slot = 2 * self.num_kv_heads * self.head_dim * self.layout.dtype.itemsize
        if self.layout.scale == KVScale.TOKEN:
            per_slot += 2 * self.num_kv_heads * torch.float32.itemsize
        return per_slot * self.block_size

    def address(self, side: Side, slot: int, head: int, dim: int) -> int:
        """Where one element is, in elements from the start of "k" or "v"."""
        block, offset = divmod(slot, self.layout.kernel_block_size)
        return self.layout.digits(side).address(self.logical_shape, (block, head, offset, dim))

    def scale_address(self, slot: int, head: int) -> int:
        """Where an element's scale is. LayoutError for a layout without scales."""
        if self.layout.scale == KVScale.NONE:
            raise LayoutError(
                layout=self.layout.describe(), precondition="scales", got="a layout without"
            )
        if self.layout.scale != KVScale.TOKEN:
            return 0 if self.layout.scale == KVScale.TENSOR else head
        block, offset = divmod(slot, self.layout.kernel_block_size)
        return self.layout.scale_digits().address(self.scale_shape, (block, head, offset))

    def addresses(self, side: Side, slots: torch.Tensor) -> torch.Tensor:
        """`address` of every head and dimension at int64 slots [T]: int64 [T, K, D]."""
        block_shape = self.logical_shape[1:]
        numel = math.prod(block_shape)
        positions = torch.arange(numel, device=slots.device)
        stored = self.layout.digits(side).in_stored_order(positions.view(block_shape))
        inside = torch.empty_like(positions)
        inside[stored.reshape(-1)] = positions
        size = self.layout.kernel_block_size
        per_slot = inside.view(block_shape).transpose(0, 1)
        return (slots // size * numel).view(-1, 1, 1) + per_slot[slots % size]

    def to_logical(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """A stored tensor as [NB, K, BS, D], or a scale in its logical shape; new storage."""
        self._check_tensor(name, stored)
        if name in ("k", "v"):
            digits = self.layout.digits("k" if name == "k" else "v")
            shape: tuple[int, ...] = self.logical_shape
        elif self.layout.scale == KVScale.TOKEN:
            digits, shape = self.layout.scale_digits(), self.scale_shape
        else:
            return stored.clone()
        return digits.in_logical_order(stored, shape).reshape(shape).clone()

    def from_logical(self, name: str, logical: torch.Tensor) -> torch.Tensor:
        """The exact inverse of `to_logical`."""
        spec = self.specs()[self._known(name)]
        shape = self.logical_shape if name in ("k", "v") else self.scale_shape
        if tuple(logical.shape) != tuple(shape) or logical.dtype != spec.dtype:
            self._refuse(name, f"{spec.dtype} {list(shape)}", logical)
        if name in ("k", "v"):
            ordered = self.layout.digits("k" if name == "k" else "v").in_stored_order(logical)
        elif self.layout.scale == KVScale.TOKEN:
            ordered = self.layout.scale_digits().in_stored_order(logical)
        else:
            ordered = logical
        return ordered.clone(memory_format=torch.contiguous_format)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """LayoutError unless `tensors` are exactly what `specs` says, contiguous."""
        if tensors.keys() != self.specs().keys():
            raise LayoutError(
                layout=self.layout.describe(),
                precondition=f"tensors named {sorted(self.specs())}",
                got=str(sorted(tensors)),
            )
        for name, tensor in tensors.items():
            self._check_tensor(name, tensor)

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> None:
        spec = self.specs()[self._known(name)]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype or tensor.is_meta:
            self._refuse(name, f"{spec.dtype} {list(spec.shape)}", tensor)
        if not tensor.is_contiguous():
            raise LayoutError(
                layout=self.layout.describe(),
                precondition=f"{name} in contiguous storage",
                got=f"strides {tensor.stride()}",
            )

    def _known(self, name: str) -> str:
        if name not in self.specs():
            raise LayoutError(
                layout=self.layout.describe(),
                precondition=f"a tensor named one of {sorted(self.specs())}",
                got=name,
            )
        return name

    def _refuse(self, name: str, wanted: str, tensor: torch.Tensor) -> None:
        where = " on meta" if tensor.is_meta else ""
        raise LayoutError(
            layout=self.layout.describe(),
            precondition=f"{name} of {wanted}",
            got=f"{tensor.dtype} {list(tensor.shape)}{where}",
        )
