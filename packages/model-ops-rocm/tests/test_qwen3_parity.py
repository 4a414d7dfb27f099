"""The ops together against transformers' Qwen3: logits within 1e-4 in float32, op by op and whole.

The model below is written from the ops alone, so a disagreement is an op's, not an engine's.
"""

from collections.abc import Sequence as SequenceABC

import pytest
import torch

from syncline.model_ops_rocm import AttentionMetadata, RowMajor, Shuffle16x16, WeightLayout, select
from syncline.model_ops_rocm.testing import make_metadata

transformers = pytest.importorskip("transformers", reason="the model to agree with")
qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")

BLOCK_SIZE = 4
rms_norm = select("rms_norm", dtype=torch.float32)
rotary_embedding = select("rotary_embedding", dtype=torch.float32)
silu_and_mul = select("silu_and_mul", dtype=torch.float32)
linear = select("linear", dtype=torch.float32)
embedding = select("embedding", dtype=torch.float32)
kv_write = select("kv_write", dtype=torch.float32)
paged_attention = select("paged_attention", dtype=torch.float32)


class Model:
    """Qwen3 from the ops, with its cache; every sequence owns its blocks from the start."""

    def __init__(self, config: object, weights: dict[str, torch.Tensor], layout: WeightLayout):
        self.config = config
        self.layout = layout
        self.weights = weights
        self.num_heads: int = config.num_attention_heads  # type: ignore[attr-defined]  # untyped
        self.num_kv_heads: int = config.num_key_value_heads  # type: ignore[attr-defined]  # untyped
        self.head_dim: int = config.head_dim  # type: ignore[attr-defined]  # untyped
        self.num_layers: int = config.num_hidden_layers  # type: ignore[attr-defined]  # untyped
        self.eps: float = config.rms_norm_eps  # type: ignore[attr-defined]  # untyped
        inverse = 10_000.0 ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(64).float()[:, None] * inverse
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        shape = (40, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        self.caches = [
            (torch.full(shape, float("nan")), torch.full(shape, float("nan")))
            for _ in range(self.num_layers)
        ]
        self.tables = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:30]
        self.tables = self.tables.view(3, 10).int()

    def project(self, x: torch.Tensor, name: str, *parts: str) -> torch.Tensor:
        fused = torch.cat([self.weights[f"{name}.{part}.weight"] for part in parts])
        return linear(x, self.layout.apply(fused), layout=self.layout)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Logits [T, V] of one step."""
        blocks = self.tables[rows, positions // BLOCK_SIZE]
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        hidden = embedding(ids, self.weights["model.embed_tokens.weight"])
        widths = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            normed = self.norm(hidden, f"{name}.input_layernorm")
            qkv = self.project(normed, f"{name}.self_attn", "q_proj", "k_proj", "v_proj")
            q, k, v = torch.split(qkv.view(len(ids), -1, self.head_dim), widths, dim=1)
            q = self.norm(q, f"{name}.self_attn.q_norm")
            k = self.norm(k, f"{name}.self_attn.k_norm")
            q, k = rotary_embedding(q, k, self.cos_sin, positions)
            k_cache, v_cache = self.caches[layer]
            kv_write(k, v, k_cache, v_cache, slots)
            attended = paged_attention(q, k_cache, v_cache, meta, scale=self.head_dim**-0.5)
            out = self.project(attended.flatten(1), f"{name}.self_attn", "o_proj")
            post = self.weights[f"{name}.post_attention_layernorm.weight"]
            normed = rms_norm(out, post, self.eps, residual_TH=hidden)
            gated = silu_and_mul(self.project(normed, f"{name}.mlp", "gate_proj", "up_proj"))
            hidden = hidden + self.project(gated, f"{name}.mlp", "down_proj")
        head = "lm_head.weight"
        weight = self.weights.get(head, self.weights["model.embed_tokens.weight"])
        return linear(self.norm(hidden, "model.norm"), weight, layout=RowMajor())

    def run(
        self, sequences: list[torch.Tensor], spans: SequenceABC[tuple[int, int, int]], decodes: int
    ) -> list[torch.Tensor]:
        """One step over (row, start, stop) spans, the first `decodes` of them one token long."""
        ids = torch.cat([sequences[row][start:stop] for row, start, stop in spans])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        rows = torch.cat([torch.full((stop - start,), row) for row, start, stop in spans])
        lens = [stop - start for _, start, stop in spans]
        meta = make_metadata(
            lens,
            [stop for _, _, stop in spans],
            self.tables[[row for row, _, _ in spans]],
            num_decode_rows=decodes,
        )
        return list(torch.split(self.step(ids, positions, rows, meta), lens))


def tiny(heads: int, kv_heads: int, tied: bool, seed: int) -> tuple[object, object]:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    model = qwen3.Qwen3ForCausalLM(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the initial weights, so that attention and norms matter.
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    return config, model


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tied", "layout"),
    [
        (4, 2, True, RowMajor()),
        (4, 4, False, RowMajor()),
        (6, 1, False, RowMajor()),
        (4, 2, False, Shuffle16x16()),
    ],
)
def test_logits_equal_transformers_in_prefill_chunks_and_decode(
    heads: int, kv_heads: int, tied: bool, layout: WeightLayout
) -> None:
    config, reference = tiny(heads, kv_heads, tied, seed=heads)
    sequences = [torch.randint(0, 48, (length,)) for length in (23, 17, 9)]
    with torch.inference_mode():
        expected = [reference(tokens[None]).logits[0] for tokens in sequences]  # type: ignore[operator]  # untyped
        weights = dict(reference.state_dict())  # type: ignore[attr-defined]  # untyped
        if tied:
            del weights["lm_head.weight"]
        model = Model(config, weights, layout)
        spread = max(float(logits.std()) for logits in expected)
        assert spread > 0.5
        # Prefill in chunks, mixed with decodes, until every token has been computed once.
        for decodes, spans in (
            (0, [(0, 0, 13)]),
            (1, [(0, 13, 14), (1, 0, 5)]),
            (1, [(0, 14, 15), (1, 5, 16), (2, 0, 8)]),
            (3, [(0, 15, 16), (1, 16, 17), (2, 8, 9)]),
            (0, [(0, 16, 23)]),
        ):
            for (row, start, stop), logits in zip(
                spans, model.run(sequences, spans, decodes), strict=True
            ):
                assert (logits - expected[row][start:stop]).abs().max() < 1e-4


def test_norm_rotary_and_mlp_equal_transformers_own_functions_bit_for_bit() -> None:
    _, reference = tiny(4, 2, True, seed=1)
    layer = reference.model.layers[0]  # type: ignore[attr-defined]  # untyped
    hidden = torch.randn(7, 64)
    positions = torch.tensor([0, 1, 2, 5, 9, 33, 63])
    with torch.inference_mode():
        norm = layer.input_layernorm
        assert torch.equal(rms_norm(hidden, norm.weight, norm.variance_epsilon), norm(hidden))
        rotary = reference.model.rotary_emb  # type: ignore[attr-defined]  # untyped
        cos, sin = rotary(hidden, positions[None])
        q, k = torch.randn(7, 4, 16), torch.randn(7, 2, 16)
        expected = qwen3.apply_rotary_pos_emb(
            q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin
        )
        every_cos, every_sin = rotary(hidden, torch.arange(64)[None])
        cache = torch.cat((every_cos[0, :, :8], every_sin[0, :, :8]), dim=-1)
        for got, want in zip(rotary_embedding(q, k, cache, positions), expected, strict=True):
            assert torch.equal(got, want[0].transpose(0, 1))
        mlp = layer.mlp
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        gated = silu_and_mul(linear(hidden, gate_up, layout=RowMajor()))
        down = linear(gated, mlp.down_proj.weight, layout=RowMajor())
        assert torch.allclose(down, mlp(hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_as_transformers_does_in_16_bits(dtype: torch.dtype) -> None:
    norm = qwen3.Qwen3RMSNorm(64, 1e-6).to(dtype)
    hidden = torch.randn(9, 64).to(dtype)
    with torch.inference_mode():
        norm.weight.copy_(torch.randn(64))
        result = select("rms_norm", dtype=dtype)(hidden, norm.weight, 1e-6)
        assert torch.equal(result, norm(hidden))
