"""Where the eight int4 of a 32-bit word lie, as values; knows no scale and no tile order.

Unit: one int4, in an int8 container of -8..7 before packing. Not a permutation of elements, so no
`WeightLayout`: shuffle the container, then pack it.
Source: ROCm/aiter e4048607a `aiter/int4_utils.py`, `aiter/ops/shuffle.py`. Differs: it has an
inverse, and refuses a value that is no int4, whose high bits AITER drops or spills.
"""

from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.checks import refuse

_PER_WORD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Packing:
    """`order[i]` is the element, of eight neighbours, in nibble i; nibble 0 is the lowest."""

    name: str
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(_PER_WORD)):
            raise ValueError(f"Int4Packing: order must permute 0..7, got {self.order}")

    def pack(self, container: torch.Tensor) -> torch.Tensor:
        """int8 [..., K], K % 8 == 0, values in -8..7 -> uint8 [..., K / 2]."""
        if container.dtype != torch.int8:
            refuse(self.name, "container", "be torch.int8", container.dtype)
        if container.ndim == 0 or container.shape[-1] % _PER_WORD != 0:
            limit = f"be [..., K] with K % {_PER_WORD} == 0"
            refuse(self.name, "container", limit, list(container.shape))
        if container.numel():
            lowest, highest = (int(bound) for bound in container.aminmax())
            if lowest < -8 or highest > 7:
                refuse(self.name, "container", "be in -8..7", f"{lowest}..{highest}")
        nibbles = _by_word(container.view(torch.uint8) & 0xF)[..., list(self.order)]
        return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).flatten(-2)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [..., K / 2] -> int8 [..., K], the exact inverse of `pack`."""
        if packed.dtype != torch.uint8:
            refuse(self.name, "packed", "be torch.uint8", packed.dtype)
        if packed.ndim == 0 or packed.shape[-1] % (_PER_WORD // 2) != 0:
            limit = f"be [..., K / 2] with K % {_PER_WORD} == 0"
            refuse(self.name, "packed", limit, list(packed.shape))
        nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        back = sorted(range(_PER_WORD), key=self.order.__getitem__)
        words = _by_word(nibbles)[..., back].flatten(-2)
        # Sign extension: 8..15 are -8..-1.
        return ((words ^ 8) - 8).view(torch.int8)


def _by_word(elements: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [..., K / 8, 8]."""
    *lead, num_elements = elements.shape
    return elements.reshape(*lead, num_elements // _PER_WORD, _PER_WORD)


# convert_int8_to_uint32_int4; also two per byte, the even element low.
INT4_SEQUENTIAL: Final = Int4Packing(name="int4_sequential", order=(0, 1, 2, 3, 4, 5, 6, 7))
# convert_int8_to_uint32_int4, then rearrange_4bit_elements.
INT4_EVENS_FIRST: Final = Int4Packing(name="int4_evens_first", order=(0, 2, 4, 6, 1, 3, 5, 7))
# pack_int8_to_packed_int4: byte i holds elements i and i + 4.
INT4_HALVES: Final = Int4Packing(name="int4_halves", order=(0, 4, 1, 5, 2, 6, 3, 7))
