"""Contracts of the ops between attention layers; knows no backend. Legend: package docstring."""

from enum import StrEnum
from typing import Protocol

import torch


class NormStyle(StrEnum):
    """How a normalised value n, which is float32, meets its weight w; models differ in it."""

    ROUND_THEN_WEIGHT = "round_then_weight"  # round(round(n) * w): Llama, Qwen3
    WEIGHT_THEN_ROUND = "weight_then_round"  # round(n * w): OLMo 2
    ONE_PLUS_WEIGHT_THEN_ROUND = "one_plus_weight_then_round"  # round(n * (1 + w)): Gemma


class RMSNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __call__(  # noqa: PLR0913 - what a model may ask for, by keyword
        self,
        x_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        residual_TH: torch.Tensor | None = None,
        style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise x [..., H] with weight [H], so qk-norm is the same op on [T, N, D].

        With `residual_TH` (x's shape), x + residual, rounded to their dtype, is written back into
        it, and that rounded sum is what is normalised.
        Rounding: float32 inside, one rounding to x's dtype where `style` says, and one of the
        product if that comes after it. eps > 0, dimensionless.
        `batch_invariant`: a row's bits do not depend on how many rows share the call.
        """
        ...


class RotaryEmbedding(Protocol):
    """Rotary position embedding of a head's first D_rot dimensions; the rest is copied."""

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        is_interleaved: bool = False,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(q, k), each rotated by the angle of its token's absolute position; new, or `out`.

        Dimension i < D_rot/2 pairs with i + D_rot/2 (neox), or 2i with 2i + 1 if `is_interleaved`
        (GPT-J). `cos_sin_cache` [P, D_rot], D_rot even and at most D: cos of the D_rot/2 angles,
        then their sin, any floating dtype of those above; it is rounded to q's dtype first, and
        products and sums are in that dtype, as in transformers' Qwen3. `positions_T` int64 or int32
        [T], tokens, 0 <= position < P; one outside is a ValueError where the device can tell (the
        CPU does), else the rotated part of the token is NaN.
        """
        ...


class SiluAndMul(Protocol):
    """SwiGLU's activation: silu(gate) * up."""

    def __call__(self, x_T2I: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., 2I] holds I gates, then I ups; the result is [..., I].

        silu is rounded to x's dtype before the product, as in transformers' Qwen3.
        """
        ...


class Embedding(Protocol):
    """Rows of a table by token id."""

    def __call__(
        self,
        ids_T: torch.Tensor,
        weight_VH: torch.Tensor,
        *,
        first_id: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids int64 or int32 [T], 0 <= id < V; the result is [T, H]. No rounding.

        With `first_id` >= 0 the weight is one shard of a table, rows [first_id, first_id + V): an
        id outside of that gives a row of zeros, so that the sum over shards is the whole table's
        row. Without it, an id outside is a ValueError where the device can tell (the CPU does),
        else the row is NaN.
        """
        ...


class GatherRows(Protocol):
    """Some rows of a step's activations, such as the last token of each sequence."""

    def __call__(
        self, x_TH: torch.Tensor, rows_R: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, H], rows int64 or int32 [R]; the result is [R, H]. No rounding.

        0 <= row < T, or -1, a padding entry, whose result is zero. Another one outside is a
        ValueError where the device can tell (the CPU does), else the result is NaN.
        """
        ...
