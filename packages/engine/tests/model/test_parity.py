"""The engine's Qwen3 against transformers' in float32, through a paged, poisoned cache."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from syncline.engine.layers import Ops
from syncline.engine.layers.rope import fill_cos_sin
from syncline.engine.load import NobodyReads
from syncline.engine.memory import allocate_kv_pool
from syncline.engine.models.base import ModelInputs
from syncline.engine.models.config import ModelConfig
from syncline.engine.models.registry import build_model
from syncline.engine.weights import WeightBuilder
from syncline.graph_lifecycle import PoisonArena, Tag
from syncline.model_ops_rocm import AttentionMetadata
from syncline.weight_sync import Update

TOLERANCE = 1e-4
BLOCK_SIZE = 4
NUM_BLOCKS = 40
MAX_LEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    hidden_size: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    tied: bool = False
    bias: bool = False
    rope_theta: float = 10_000.0
    layout: Literal["row_major", "shuffle_16x16"] = "row_major"


CASES = {
    "plain": Case(),
    "tied": Case(tied=True),
    "gqa 1": Case(num_kv_heads=4),
    "gqa 4": Case(num_kv_heads=1),
    "narrow heads": Case(hidden_size=48, head_dim=8),
    "wide heads": Case(hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=32),
    "attention bias": Case(bias=True),
    "long rope": Case(rope_theta=1e6),
    "shuffled": Case(hidden_size=64, layout="shuffle_16x16"),
    "shuffled, tied, gqa 4": Case(num_kv_heads=1, tied=True, layout="shuffle_16x16"),
}


def reference(case: Case) -> Qwen3ForCausalLM:
    """transformers' model with random weights, norms and biases included."""
    torch.manual_seed(1)
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=48,
            hidden_size=case.hidden_size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=case.num_heads,
            num_key_value_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            max_position_embeddings=MAX_LEN,
            rope_parameters={"rope_type": "default", "rope_theta": case.rope_theta},
            tie_word_embeddings=case.tied,
            attention_bias=case.bias,
            initializer_range=0.3,
        )
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


class PagedModel:
    """The engine's model with every sequence's blocks scattered over a pool that starts as NaN."""

    def __init__(self, case: Case, weights: dict[str, Tensor]) -> None:
        config = ModelConfig(
            architecture="Qwen3ForCausalLM",
            vocab_size=48,
            hidden_size=case.hidden_size,
            intermediate_size=64,
            num_layers=2,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            max_position_embeddings=MAX_LEN,
            rms_norm_eps=1e-6,
            rope_theta=case.rope_theta,
            has_attention_bias=case.bias,
            has_tied_embeddings=case.tied,
            dtype_name="float32",
        )
        arena = PoisonArena()
        cos_sin = arena.allocate("cos_sin", (MAX_LEN, case.head_dim), torch.float32, tag=Tag.STATIC)
        fill_cos_sin(cos_sin, case.rope_theta)
        ops = Ops.select(backend="torch", device=torch.device("cpu"), dtype=torch.float32)
        builder = WeightBuilder(arena, torch.float32, case.layout)
        self.model = build_model(config, ops, builder, cos_sin)
        update = Update.begin(builder.name_table(), 0, guard=NobodyReads())
        for name, tensor in weights.items():
            update.put(name, tensor)
        update.commit()
        self.caches = allocate_kv_pool(
            arena, config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32
        )
        generator = torch.Generator().manual_seed(2)
        self.tables = torch.randperm(NUM_BLOCKS, generator=generator).view(4, -1)

    def step(self, sequences: list[Tensor], spans: list[tuple[int, int, int]]) -> list[Tensor]:
        """Compute [start, stop) of some sequences, decodes first; the logits of each span."""
        rows = torch.tensor([row for row, start, stop in spans for _ in range(start, stop)])
        positions = torch.tensor([p for _, start, stop in spans for p in range(start, stop)])
        starts = [0]
        for _, start, stop in spans:
            starts.append(starts[-1] + stop - start)
        lens = [stop for _, _, stop in spans]
        attention = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=self.tables[[row for row, _, _ in spans]].to(torch.int32),
            num_decode_rows=sum(stop - start == 1 for _, start, stop in spans),
            query_start_list=starts,
            seq_len_list=lens,
        )
        ids = torch.cat([sequences[row][start:stop] for row, start, stop in spans])
        blocks = self.tables[rows, positions // BLOCK_SIZE]
        with torch.inference_mode():
            hidden = self.model.forward(
                ModelInputs(
                    token_ids_T=ids,
                    positions_T=positions,
                    slot_mapping_T=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
                    attention=attention,
                    out_S=None,
                ),
                self.caches,
            )
            logits = self.model.compute_logits(hidden)
        return list(torch.split(logits, [stop - start for _, start, stop in spans]))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_every_kind_of_step(name: str) -> None:
    case = CASES[name]
    theirs = reference(case)
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 48, (n,), generator=generator) for n in (23, 9, 17, 1)]
    with torch.no_grad():
        expected = [theirs(ids[None]).logits[0] for ids in sequences]
    ours = PagedModel(case, dict(theirs.state_dict()))
    steps = (
        [(0, 0, 9)],  # a first prefill chunk
        [(0, 9, 15), (1, 0, 8)],  # a chunk with cached context beside a whole prefill
        [(1, 8, 9), (0, 15, 20), (2, 0, 5), (3, 0, 1)],  # a decode, and chunks of all kinds
        [(0, 20, 21), (2, 5, 16)],
        [(0, 21, 22), (2, 16, 17)],  # decodes alone, of different lengths
        [(0, 22, 23)],
    )
    for spans in steps:
        spans = sorted(spans, key=lambda span: span[2] - span[1] > 1)
        for (row, start, stop), logits in zip(spans, ours.step(sequences, spans), strict=True):
            torch.testing.assert_close(logits, expected[row][start:stop], rtol=0.0, atol=TOLERANCE)


def test_only_the_asked_tokens_come_back_in_the_order_asked() -> None:
    case = CASES["plain"]
    ours = PagedModel(case, dict(reference(case).state_dict()))
    sequence = torch.arange(10)
    (whole,) = ours.step([sequence], [(0, 0, 10)])
    positions = torch.arange(10)
    attention = AttentionMetadata(
        query_start_loc=torch.tensor([0, 10], dtype=torch.int32),
        seq_lens=torch.tensor([10], dtype=torch.int32),
        block_tables=ours.tables[:1].to(torch.int32),
        num_decode_rows=0,
        query_start_list=[0, 10],
        seq_len_list=[10],
    )
    inputs = ModelInputs(
        token_ids_T=sequence,
        positions_T=positions,
        slot_mapping_T=ours.tables[0, positions // BLOCK_SIZE] * BLOCK_SIZE
        + positions % BLOCK_SIZE,
        attention=attention,
        out_S=torch.tensor([9, 2]),
    )
    with torch.inference_mode():
        logits = ours.model.compute_logits(ours.model.forward(inputs, ours.caches))
    torch.testing.assert_close(logits, whole[[9, 2]], rtol=0.0, atol=1e-5)
