"""Decode steps from captured graphs: which sizes exist, how a step is padded to one, and replay.

A graph computes hidden states for a fixed number of rows; the logits and the sampling stay outside.
Rows that fill it up are the reserved row: no KV to attend to, and writes only into the reserved
block. Where no graph fits, the runner runs the step eagerly, with the same result up to rounding.
Capturing runs the model for real, on reserved rows alone. Knows no plan and no request.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from syncline.engine.memory import LayerCache
from syncline.engine.models.base import Model, ModelInputs
from syncline.engine.runner.settings import RunnerSettings
from syncline.graph_lifecycle import CaptureRequest, GraphKey, GraphRegistry, RecordedStore
from syncline.model_ops_rocm import AttentionMetadata

STORE: Final = "decode"
MAX_GRAPHS: Final = 8


def graph_sizes(max_num_seqs: int, block_size: int) -> tuple[int, ...]:
    """Numbers of rows to capture: doubling, then in steps of a block, at most MAX_GRAPHS of them.

    Never more than block_size apart, so that every padding row has a slot of its own in the
    reserved block.
    """
    sizes = [1]
    while sizes[-1] < max_num_seqs and len(sizes) < MAX_GRAPHS:
        sizes.append(min(sizes[-1] + min(sizes[-1], block_size), max_num_seqs))
    return tuple(sizes)


class DecodeGraphs:
    """Captured decode steps of one model, owned by the registry."""

    __slots__ = ("_caches", "_model", "_registry", "_settings", "_sizes")

    def __init__(
        self,
        registry: GraphRegistry,
        model: Model,
        caches: list[LayerCache],
        settings: RunnerSettings,
    ) -> None:
        self._registry = registry
        self._model = model
        self._caches = caches
        self._settings = settings
        self._sizes: dict[GraphKey, int] = {
            (STORE, size): size for size in graph_sizes(settings.max_num_seqs, settings.block_size)
        }
        registry.add_store(STORE, RecordedStore(STORE))

    def capture(self) -> None:
        """Capture all sizes, the largest first, or none."""
        sizes = reversed(self._sizes.items())
        self._registry.capture_all(self._request(key, size) for key, size in sizes)

    def requests(self, keys: Iterable[GraphKey]) -> list[CaptureRequest]:
        """How to capture graphs of these keys again."""
        return [self._request(key, self._sizes[key]) for key in keys]

    def _request(self, key: GraphKey, size: int) -> CaptureRequest:
        return CaptureRequest(key=key, store=STORE, fn=self._step, inputs=self._pad({}, size))

    def hidden_states(self, inputs: ModelInputs) -> Tensor | None:
        """The step's hidden states, valid until the next step; None when no graph fits it."""
        num_rows = inputs.token_ids_T.shape[0]
        key = next((key for key, size in self._sizes.items() if size >= num_rows), None)
        if key is None or key not in self._registry.keys:
            return None
        named = {
            "token_ids": inputs.token_ids_T,
            "positions": inputs.positions_T,
            "slot_mapping": inputs.slot_mapping_T,
            "seq_lens": inputs.attention.seq_lens,
            "block_tables": inputs.attention.block_tables,
        }
        outputs = self._registry.replay(key, self._pad(named, self._sizes[key]))
        return outputs["hidden"][:num_rows]

    def _step(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        num_rows = inputs["token_ids"].shape[0]
        hidden_TH = self._model.forward(
            ModelInputs(
                token_ids_T=inputs["token_ids"],
                positions_T=inputs["positions"],
                slot_mapping_T=inputs["slot_mapping"],
                attention=AttentionMetadata(
                    query_start_loc=torch.arange(
                        num_rows + 1, dtype=torch.int32, device=self._settings.device
                    ),
                    seq_lens=inputs["seq_lens"],
                    block_tables=inputs["block_tables"],
                    num_decode_rows=num_rows,
                ),
                out_S=None,
            ),
            self._caches,
        )
        return {"hidden": hidden_TH}

    def _pad(self, named: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
        """`named` with reserved rows up to `size`, and block tables of the widest row possible."""
        settings = self._settings
        reserved = settings.reserved_block
        first_slot = reserved * settings.block_size
        # Padding rows of a replay have a slot each. A capture may have more rows than the block
        # has slots; which of their writes stays is left open, and nobody reads it.
        slots = first_slot + torch.arange(size, device=settings.device) % settings.block_size
        padded = {
            "token_ids": torch.zeros(size, dtype=torch.int32, device=settings.device),
            "positions": torch.zeros(size, dtype=torch.int64, device=settings.device),
            "slot_mapping": slots,
            "seq_lens": torch.zeros(size, dtype=torch.int32, device=settings.device),
            "block_tables": torch.full(
                (size, settings.max_blocks_per_seq),
                reserved,
                dtype=torch.int32,
                device=settings.device,
            ),
        }
        for name, tensor in named.items():
            padded[name][tuple(slice(extent) for extent in tensor.shape)] = tensor
        return padded
