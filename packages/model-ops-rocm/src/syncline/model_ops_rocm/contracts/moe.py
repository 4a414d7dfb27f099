"""Contracts of mixture of experts; knows no backend, no rank and no collective.

Letters: T tokens, E experts, k experts of a token (top-k), R replicas, H hidden, I intermediate.
A *pair* is one expert of one token; pair p is slot p % k of token p // k. An expert is named by its
place in the stacked weights at hand, its *id*; the id -1 says that the pair is not computed here.
"""

from collections.abc import Sequence as SequenceABC
from typing import NamedTuple, Protocol

import torch

from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts.base import WeightLayout


class ExpertMap(NamedTuple):
    """The ids of a model's experts, which may be replicated, elsewhere, or both.

    Expert e of the router has the ids replicas_ER[e, :num_replicas_E[e]], and a token at position
    p takes entry p % num_replicas_E[e]: which one does not depend on what else is in the step. An
    entry -1, or an expert without replicas, is not computed here. Further entries are never read.
    """

    replicas_ER: torch.Tensor  # int32[E, R], ids or -1; contiguous
    num_replicas_E: torch.Tensor  # int32[E], in [0, R]; contiguous


class SortedPairs(NamedTuple):
    """Pairs by group, each group's padded to whole blocks; C is `sorted_capacity(...)`.

    Within a group pairs are in ascending order. Entries that are no pair hold T * k, and blocks
    behind the last have the group -1, so that work over all C // block_size blocks is right for
    every routing.
    """

    pairs: torch.Tensor  # int32[C], pair numbers
    block_groups: torch.Tensor  # int32[C // block_size], groups
    counts: torch.Tensor  # int32[num_groups], pairs of each group, without padding
    places: torch.Tensor  # int32[T, k], where in `pairs` each pair is; -1 if it was skipped


def sorted_capacity(num_pairs: int, num_groups: int, block_size: int) -> int:
    """The entries that any routing of `num_pairs` pairs may need, a multiple of `block_size`."""
    blocks = (num_pairs + num_groups * (block_size - 1)) // block_size
    return min(num_pairs, blocks) * block_size


class MoeRoute(Protocol):
    """Which experts a token goes to, and with what weight: softmax, then the k largest."""

    def __call__(
        self,
        logits_TE: torch.Tensor,
        top_k: int,
        *,
        renormalise: bool = True,
        expert_map: ExpertMap | None = None,
        positions_T: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32 [T, k], ids int32 [T, k]), the largest logit first; new, or `out`.

        Of equal logits the lower expert comes first; a NaN counts as the lowest. The weights are
        the softmax over all E in float32; with `renormalise` divided by the sum of the token's k.
        A NaN, or nothing but -inf, in a token's logits makes its weights NaN.

        `expert_map` turns experts into ids; without it the id is the expert. `positions_T` int64 or
        int32 [T]: the token's position in its sequence, which chooses the replica, and is needed
        where R > 1. A token at a negative position is padding: its ids are -1 and its weights 0.
        1 <= k <= E.
        """
        ...


class MoeSort(Protocol):
    """Order a step's pairs by expert, or by the rank that has the expert."""

    def __call__(
        self,
        ids_TK: torch.Tensor,
        num_groups: int,
        *,
        block_size: int = 1,
        group_size: int = 1,
        out: SortedPairs | None = None,
    ) -> SortedPairs:
        """ids int32 [T, k], contiguous; the group of an id is id // group_size.

        `group_size` 1 sorts by expert, for projections in blocks of `block_size` pairs; the number
        of experts of a rank sorts by rank, for an exchange between ranks: with `block_size` 1,
        rank r receives the `counts[r]` pairs behind those of the ranks before it, as `moe_permute`
        lays them out, and `moe_combine` with `places` takes what comes back.
        A pair with the id -1 is skipped. Another id outside of [0, num_groups * group_size) is a
        ValueError where the device can tell (the CPU does), else it is skipped too.
        `block_size` is a power of two; C and num_groups * group_size are at most 2^30.
        """
        ...


class MoePermute(Protocol):
    """Copy tokens into the order of sorted pairs, as ranks exchange them."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        pairs_C: torch.Tensor,
        *,
        group_size: int = 1,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [C, H] of x's dtype, ids int32 [C]): each pair's token, and its id in its group.

        `pairs_C` int32 [C] as `moe_sort` gives them, ids int32 [T, k], both contiguous; the id in a
        group is id % group_size, what the rank that receives the row calls the expert. An entry
        that is no pair has a row of zeros and the id -1, so that it costs that rank nothing.
        """
        ...


class MoeCombine(Protocol):
    """Sum the results of a token's experts."""

    def __call__(
        self,
        y_CH: torch.Tensor,
        weights_TK: torch.Tensor,
        places_TK: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """sum over slots j of weights[t, j] * y[places[t, j]], as [T, H] of y's dtype.

        weights float32 and places int32 [T, k], contiguous. A place outside of [0, C), such as -1,
        adds nothing and is not read; a token without any is a row of zeros. Products and sums in
        float32, in order of the slots, each rounded; one rounding to y's dtype.
        """
        ...


class MoeExperts(Protocol):
    """What a layer's experts make of a step's tokens: gate and up, SwiGLU, down, weighted sum."""

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        """What `layout` may be, the preferred one first; see `Linear`."""
        ...

    def workspace_bytes(
        self, w13: torch.Tensor, top_k: int, max_tokens: int, dtype: torch.dtype
    ) -> int:
        """What `workspace` must hold for up to `max_tokens` tokens x of `dtype`."""
        ...

    def __call__(  # noqa: PLR0913 - all that a layer's experts are
        self,
        x_TH: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        *,
        layout: WeightLayout,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        recipe: Quantised | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, H]; w13 [E, 2I, H], I gate rows, then I up rows; w2 [E, H, I]; the result [T, H].

        Each expert's slice of w13 and w2 is stored in `layout`; both are contiguous. weights
        float32 and ids int32 [T, k], contiguous, as `moe_route` gives them; weights apply to the
        results, not to x. A pair with the id -1 is skipped; another id outside of [0, E) is a
        ValueError where the device can tell (the CPU does), else it is skipped too.

        Rounding: the sums of a projection in float32 or better, in the backend's order. Gate and up
        are rounded to x's dtype, and so is silu, before the product, as in `SiluAndMul`, and the
        product. The down projection of each pair is rounded to x's dtype; then the sum over slots
        is `MoeCombine`'s. It is the same on every path, so k and order of the slots matter, which
        ranks share the experts does not, but for the rounding of their sum.

        `scales` for weights in float8_e4m3fn or float8_e4m3fnuz: float32, one per row, [E, 2I, 1]
        and [E, H, 1], or one per 128 x 128, [E, ceil(2I / 128), ceil(H / 128)] and
        [E, ceil(H / 128), ceil(I / 128)], contiguous. A weight is code * scale. Without scales the
        weights have x's dtype.

        `recipe`, given with scales, also encodes what is multiplied with the weights: x, and what
        SwiGLU gives in x's dtype, as `QuantiseActivation` does. Its codes are of the weights' type,
        its scales float32, per token where the weights have one per row, else per 1x128. Codes then
        multiply codes, as in `LinearQuantised`; a backend refuses it where no hardware does.
        Without it nothing but weights is quantised.

        `batch_invariant`: a token's result has the same bits whatever else is in the step.
        `workspace` uint8, at least `workspace_bytes(w13, k, T, x's dtype)`, aligned to 16 bytes.
        """
        ...
