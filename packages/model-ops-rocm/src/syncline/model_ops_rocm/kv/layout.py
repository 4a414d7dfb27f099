"""KVLayout: order, dtype, kernel block size and scales of a KV cache, compared by value.

Unit: one layer; a kernel block is `kernel_block_size` token slots. Knows no number of blocks and no
head. Dimensions by name: NB kernel blocks, K KV heads, BS slots of a block, D head_dim, and
x = 16 / itemsize elements, which are one load of a lane.
Source: ROCm/aiter e4048607a `op_tests/test_kvcache.py`, `csrc/kernels/cache_kernels.cu`: the two
AITER orders are reshape_and_cache without and with asm_layout.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

import torch

from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.layouts import REST, DigitOrder

Side = Literal["k", "v"]

_LOAD_BYTES = 16
_CODES: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, *_CODES)


class KVOrder(StrEnum):
    """What storage counts through, slowest first."""

    NHD = "nhd"  # k and v [NB, BS, K, D]
    HND = "hnd"  # k and v [NB, K, BS, D]
    HND_D_MAJOR_KEYS = "hnd_d_major_keys"  # k [NB, K, D, BS], v [NB, K, BS, D]
    AITER_X = "aiter_x"  # k [NB, K, D / x, BS, x], v [NB, K, D, BS]
    AITER_X_SHUFFLED_V = "aiter_x_shuffled_v"  # k as above, v [NB, K, BS / x, D, x]


class KVScale(StrEnum):
    """Which elements share a float32 scale. Keys and values have their own."""

    NONE = "none"  # what is stored is the number
    TENSOR = "tensor"  # one for the layer: [1]
    HEAD = "head"  # one per KV head: [K]
    TOKEN = "token"  # one per slot and KV head


_PLAIN = DigitOrder(((REST,), (REST,), (REST,)), (0, 1, 2))
_SLOT_FIRST = DigitOrder(((REST,), (REST,), (REST,)), (1, 0, 2))
_D_MAJOR = DigitOrder(((REST,), (REST,), (REST,)), (0, 2, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One per pool: every op that touches the pool takes it, or the pool is not built."""

    order: KVOrder
    dtype: torch.dtype
    kernel_block_size: int
    scale: KVScale = KVScale.NONE

    def __post_init__(self) -> None:
        # A string of the right spelling would compare equal, and then be no member.
        if not isinstance(self.order, KVOrder):
            raise ValueError(f"KVLayout: order must be a KVOrder, got {self.order!r}")
        if not isinstance(self.scale, KVScale):
            raise ValueError(f"KVLayout: scale must be a KVScale, got {self.scale!r}")
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"KVLayout: dtype must be one of {[str(known) for known in _DTYPES]},"
                f" got {self.dtype}"
            )
        if self.kernel_block_size < 1:
            raise ValueError(
                f"KVLayout: kernel_block_size must be positive, got {self.kernel_block_size}"
            )
        if self.scale != KVScale.NONE and self.dtype not in _CODES:
            raise ValueError(
                f"KVLayout: scale must be none for {self.dtype}, whose range needs no scale,"
                f" got {self.scale}"
            )
        if self.order == KVOrder.AITER_X_SHUFFLED_V and self.kernel_block_size % self.x != 0:
            raise ValueError(
                f"KVLayout: kernel_block_size must be a multiple of {self.x} for"
                f" {self.order} of {self.dtype}, got {self.kernel_block_size}"
            )

    @property
    def x(self) -> int:
        """Elements of 16 bytes."""
        return _LOAD_BYTES // self.dtype.itemsize

    def describe(self) -> str:
        """A name that differs where the stored bytes do: the `kv_format` of a prefix cache."""
        dtype = str(self.dtype).removeprefix("torch.")
        scale = "" if self.scale == KVScale.NONE else f"/{self.scale}_scale"
        return f"{self.order}/{dtype}/{self.kernel_block_size}{scale}"

    def kernel_blocks_per_block(self, block_size: int) -> int:
        """Kernel blocks in one of the manager's. LayoutError unless they fill it."""
        if block_size < 1 or block_size % self.kernel_block_size != 0:
            raise LayoutError(
                layout=self.describe(),
                precondition=f"a block_size that is a multiple of {self.kernel_block_size}",
                got=str(block_size),
            )
        return block_size // self.kernel_block_size

    def kernel_block_tables(self, block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
        """The manager's tables [R, M] in kernel blocks, [R, M * ratio]; slots stay what they are.

        Entries that are no block stay negative.
        """
        ratio = self.kernel_blocks_per_block(block_size)
        parts = torch.arange(ratio, dtype=block_tables.dtype, device=block_tables.device)
        return (block_tables.unsqueeze(-1) * ratio + parts).flatten(-2)

    def check_head_dim(self, head_dim: int) -> None:
        if self.order in (KVOrder.AITER_X, KVOrder.AITER_X_SHUFFLED_V) and head_dim % self.x != 0:
            raise LayoutError(
                layout=self.describe(),
                precondition=f"a head_dim that is a multiple of {self.x}",
                got=str(head_dim),
            )

    def require_accepted(self, op: str, accepted: SequenceABC["KVLayout"]) -> None:
        """LayoutError unless an op that takes the `accepted` layouts takes this one."""
        if self not in accepted:
            listed = ", ".join(layout.describe() for layout in accepted)
            raise LayoutError(
                layout=self.describe(), precondition=f"{op} to take it", got=listed or "nothing"
            )

    def digits(self, side: Side) -> DigitOrder:
        """The order of keys or values: of the digits of [K, BS, D], block by block."""
        if self.order == KVOrder.NHD:
            return _SLOT_FIRST
        if self.order == KVOrder.HND:
            return _PLAIN
        if self.order == KVOrder.HND_D_MAJOR_KEYS:
            return _D_MAJOR if side == "k" else _PLAIN
        if side == "k":
            return DigitOrder(((REST,), (REST,), (REST, self.x)), (0, 2, 1, 3))
        if self.order == KVOrder.AITER_X:
            return _D_MAJOR
        return DigitOrder(((REST,), (REST, self.x), (REST,)), (0, 1, 3, 2))

    def scale_digits(self) -> DigitOrder:
        """The order of a scale per token: of [NB, K, BS], all blocks together.

        [NB, BS, K] beside NHD; [K, NB, BS], which AITER shapes [K, slots], beside AITER_X;
        [NB, K, BS] otherwise.
        """
        if self.order == KVOrder.NHD:
            return _D_MAJOR
        return _SLOT_FIRST if self.order == KVOrder.AITER_X else _PLAIN
