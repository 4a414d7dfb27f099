"""Contracts of the ops between attention layers; knows no backend. Legend: package docstring."""

from typing import Protocol

import torch

from syncline.model_ops_rocm.layouts.base import WeightLayout


class RMSNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        residual_TH: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise x [..., H] with weight [H], so qk-norm is the same op on [T, N, D].

        With `residual_TH` (x's shape), x + residual, rounded to their dtype, is written back into
        it, and that rounded sum is what is normalised.
        Rounding, as in transformers' Qwen3: float32 inside, the normalised value rounded to
        x's dtype, then multiplied by weight in that dtype. eps > 0, dimensionless.
        """
        ...


class RotaryEmbedding(Protocol):
    """Rotary position embedding, neox style: the first half of a head pairs with the second."""

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(q, k), each rotated by the angle of its token's absolute position; new, or `out`.

        `cos_sin_cache` [P, D]: cos of the D/2 angles, then their sin, any floating dtype of those
        above; it is rounded to q's dtype first, and products and sums are in that dtype, as in
        transformers' Qwen3. `positions_T` int64 or int32 [T], tokens, 0 <= position < P; one
        outside is a ValueError where the device can tell (the CPU does), else the token is NaN.
        """
        ...


class SiluAndMul(Protocol):
    """SwiGLU's activation: silu(gate) * up."""

    def __call__(self, x_T2I: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., 2I] holds I gates, then I ups; the result is [..., I].

        silu is rounded to x's dtype before the product, as in transformers' Qwen3.
        """
        ...


class Linear(Protocol):
    """y = x @ weight^T + bias, from the bytes of the weight as they are stored."""

    def __call__(
        self,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        layout: WeightLayout,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [..., K_in], weight stored in `layout` with logical shape [N_out, K_in], bias [N_out].

        The layout is an argument, never a flag on the tensor: a weight that is stored shuffled and
        read as row-major gives wrong numbers, which no op can notice.
        Sums in float32 or better, one rounding to x's dtype; the order of the sum is the backend's.
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
