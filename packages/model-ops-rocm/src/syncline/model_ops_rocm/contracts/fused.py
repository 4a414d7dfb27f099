"""Contracts of the ops that quantise activations or do several steps in one launch.

Legend: package docstring. What a fused op computes is what its parts compute one after another, on
the same backend bit for bit.
"""

from typing import Protocol

import torch

from syncline.model_ops_rocm.contracts.attention import KVScales
from syncline.model_ops_rocm.contracts.dense import NormStyle
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.kv.layout import KVLayout
from syncline.model_ops_rocm.kv.support import KVSupport

Encoded = tuple[torch.Tensor, torch.Tensor]


class QuantiseActivation(Protocol):
    """Activations as codes of fp8 and their scales."""

    def __call__(
        self,
        x_TK: torch.Tensor,
        recipe: Quantised,
        *,
        scale: torch.Tensor | None = None,
        out: Encoded | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> Encoded:
        """(codes, scales) of x [..., K], K >= 1, by `recipe`; new, or `out`.

        Codes have x's shape and the recipe's dtype, e4m3fn or e4m3fnuz: which of them a GPU
        multiplies is for the caller to know. Granularities: token, scales [..., 1]; 1x128 and 1x32,
        scales [..., ceil(K / block)], float32 or e8m0 as the recipe says; tensor, whose scale is
        given as float32 with one entry, on the device, and returned. The recipe decides every bit:
        see `formats.quantised`; all backends give the same.

        A block with an infinity or a NaN has a NaN scale and codes of zero; under a given scale
        such an element has a code of zero, and so has every one if that scale is no positive
        number. In each case `nonfinite`, int32 [1], is set to 1; nothing sets it to 0.
        """
        ...


class RMSNormQuant(Protocol):
    """`RMSNorm`, then `QuantiseActivation` of its result, which is not stored."""

    def __call__(  # noqa: PLR0913 - what its parts take
        self,
        x_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        recipe: Quantised,
        *,
        residual_TH: torch.Tensor | None = None,
        style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
        scale: torch.Tensor | None = None,
        out: Encoded | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> Encoded:
        """Arguments as those two ops have them; the norm's result is rounded to x's dtype first."""
        ...


class SiluAndMulQuant(Protocol):
    """`SiluAndMul`, then `QuantiseActivation` of its result, which is not stored."""

    def __call__(
        self,
        x_T2I: torch.Tensor,
        recipe: Quantised,
        *,
        scale: torch.Tensor | None = None,
        out: Encoded | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> Encoded:
        """Arguments as those two ops have them; the product is rounded to x's dtype first."""
        ...


class QKNormRopeKVWrite(Protocol):
    """What lies between a layer's qkv projection and its attention, for all heads at once."""

    @property
    def kv_support(self) -> KVSupport:
        """The layouts it takes."""
        ...

    def __call__(  # noqa: PLR0913 - what its parts take
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        positions_T: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        layout: KVLayout,
        norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 1e-6,
        style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
        is_interleaved: bool = False,
        kv_scales: KVScales | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rotated q [T, N, D], new or `out`; k and v [T, K, D] go to their slots.

        With `norm_weights`, of q and of k, [D] each, every head is normalised first, as `RMSNorm`
        does. Then q and k are rotated, as `RotaryEmbedding` does.

        The rotated k, and v, are written as `KVWrite` does with this `layout` and these
        `kv_scales`; -1 in `slot_mapping` writes nothing.
        """
        ...
