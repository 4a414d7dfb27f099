"""What a runner gives a model and asks of it, whatever the architecture."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from syncline.engine.memory import LayerCache
from syncline.model_ops_rocm import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """One step of T tokens: what to compute, where its keys and values go, who attends to what.

    Every token has a slot of its own: none is -1.
    """

    token_ids_T: Tensor
    positions_T: Tensor  # int64
    slot_mapping_T: Tensor
    attention: AttentionMetadata
    out_S: Tensor | None  # int64, the tokens whose hidden states are returned; None = all


class Model(Protocol):
    """A decoder whose weights are slots of a WeightBuilder."""

    def forward(self, inputs: ModelInputs, caches: list[LayerCache]) -> Tensor:
        """Normalised hidden states [S, H] of the tokens `out_S`; fills the caches on the way."""
        ...

    def compute_logits(self, hidden_SH: Tensor) -> Tensor:
        """[S, embedding rows]; which of them are padding, only the sampling pipeline knows."""
        ...
