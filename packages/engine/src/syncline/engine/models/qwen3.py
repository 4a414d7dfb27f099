"""Qwen3, dense: the architecture in one file, over flattened tokens and a paged KV cache.

Source: transformers 5.24, `modeling_qwen3.py`, with q, k, v and gate, up stacked. Knows no request,
no row and no sampling; `ModelInputs` says where each token is and what it may look at.

Shapes: T tokens of a step, H hidden, N query heads, K key/value heads, D head dimension, I inner
size of the MLP, V embedding rows, S tokens whose hidden states are asked for, P positions,
B blocks and C slots of a block.
"""

import torch
from torch import Tensor

from syncline.engine.layers import Embedding, Linear, Ops, RMSNorm
from syncline.engine.memory import LayerCache
from syncline.engine.models.base import ModelInputs
from syncline.engine.models.config import ModelConfig
from syncline.engine.weights import WeightBuilder
from syncline.model_ops_rocm import RowMajor


class Qwen3Attention:
    """Grouped-query attention with a norm on every query and key head before the rotation."""

    __slots__ = ("_config", "_k_norm", "_o_proj", "_ops", "_q_norm", "_qkv_proj", "_scale")

    def __init__(self, config: ModelConfig, ops: Ops, builder: WeightBuilder, name: str) -> None:
        self._config = config
        self._ops = ops
        self._scale = config.head_dim**-0.5
        self._qkv_proj = Linear(
            ops,
            builder,
            f"{name}.qkv_proj",
            {
                f"{name}.q_proj": config.q_size,
                f"{name}.k_proj": config.kv_size,
                f"{name}.v_proj": config.kv_size,
            },
            config.hidden_size,
            has_bias=config.has_attention_bias,
        )
        self._o_proj = Linear(
            ops,
            builder,
            f"{name}.o_proj",
            {f"{name}.o_proj": config.hidden_size},
            config.q_size,
            has_bias=config.has_attention_bias,
        )
        eps = config.rms_norm_eps
        self._q_norm = RMSNorm(ops, builder, f"{name}.q_norm", config.head_dim, eps)
        self._k_norm = RMSNorm(ops, builder, f"{name}.k_norm", config.head_dim, eps)

    def __call__(
        self, x_TH: Tensor, inputs: ModelInputs, cache: LayerCache, cos_sin_PD: Tensor
    ) -> Tensor:
        config = self._config
        qkv = self._qkv_proj(x_TH).view(x_TH.shape[0], -1, config.head_dim)
        q_TND, k_TKD, v_TKD = torch.split(
            qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        q_TND, k_TKD = self._ops.rotary_embedding(
            self._q_norm(q_TND), self._k_norm(k_TKD), cos_sin_PD, inputs.positions_T
        )
        self._ops.kv_write(
            k_TKD, v_TKD, cache.k_BKCD, cache.v_BKCD, inputs.slot_mapping_T, may_skip=False
        )
        o_TND = self._ops.paged_attention(
            q_TND, cache.k_BKCD, cache.v_BKCD, inputs.attention, scale=self._scale
        )
        return self._o_proj(o_TND.view(x_TH.shape[0], -1))


class Qwen3MLP:
    """SwiGLU."""

    __slots__ = ("_down_proj", "_gate_up_proj", "_ops")

    def __init__(self, config: ModelConfig, ops: Ops, builder: WeightBuilder, name: str) -> None:
        inner = config.intermediate_size
        self._ops = ops
        self._gate_up_proj = Linear(
            ops,
            builder,
            f"{name}.gate_up_proj",
            {f"{name}.gate_proj": inner, f"{name}.up_proj": inner},
            config.hidden_size,
        )
        self._down_proj = Linear(
            ops, builder, f"{name}.down_proj", {f"{name}.down_proj": config.hidden_size}, inner
        )

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._down_proj(self._ops.silu_and_mul(self._gate_up_proj(x_TH)))


class Qwen3Layer:
    """Norm, attention, norm, MLP; the residual stream is carried in `residual_TH`, in place."""

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(self, config: ModelConfig, ops: Ops, builder: WeightBuilder, name: str) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._attention_norm = RMSNorm(ops, builder, f"{name}.input_layernorm", hidden, eps)
        self._attention = Qwen3Attention(config, ops, builder, f"{name}.self_attn")
        self._mlp_norm = RMSNorm(ops, builder, f"{name}.post_attention_layernorm", hidden, eps)
        self._mlp = Qwen3MLP(config, ops, builder, f"{name}.mlp")

    def __call__(
        self,
        x_TH: Tensor | None,
        residual_TH: Tensor,
        inputs: ModelInputs,
        cache: LayerCache,
        cos_sin_PD: Tensor,
    ) -> Tensor:
        """`x_TH` is what the layer before left to be added; None in front of the first layer."""
        if x_TH is None:
            x_TH = self._attention_norm(residual_TH)
        else:
            x_TH = self._attention_norm(x_TH, residual_TH)
        x_TH = self._attention(x_TH, inputs, cache, cos_sin_PD)
        return self._mlp(self._mlp_norm(x_TH, residual_TH))


class Qwen3Model:
    """`forward` to hidden states, `compute_logits` from them; builds every slot when made."""

    __slots__ = ("_cos_sin_PD", "_embed", "_head", "_layers", "_norm", "_ops")

    def __init__(
        self, config: ModelConfig, ops: Ops, builder: WeightBuilder, cos_sin_PD: Tensor
    ) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self._ops = ops
        self._cos_sin_PD = cos_sin_PD
        self._embed = Embedding(ops, builder, "model.embed_tokens", vocab, hidden)
        self._layers = [
            Qwen3Layer(config, ops, builder, f"model.layers.{index}")
            for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(ops, builder, "model.norm", hidden, config.rms_norm_eps)
        if config.has_tied_embeddings:
            self._head = self._embed.weight
            builder.aliases["lm_head.weight"] = "model.embed_tokens.weight"
        else:
            self._head = builder.table("lm_head.weight", vocab, hidden)

    def forward(self, inputs: ModelInputs, caches: list[LayerCache]) -> Tensor:
        """Normalised hidden states of the tokens `inputs.out_S`; fills the caches on the way."""
        residual_TH = self._embed(inputs.token_ids_T)
        x_TH: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x_TH = layer(x_TH, residual_TH, inputs, cache, self._cos_sin_PD)
        assert x_TH is not None, "a model has at least one layer"
        if inputs.out_S is None:
            return self._norm(x_TH, residual_TH)
        return self._norm(x_TH[inputs.out_S], residual_TH[inputs.out_S])

    def compute_logits(self, hidden_SH: Tensor) -> Tensor:
        """[S, V], padded vocabulary rows included: only the pipeline knows which they are."""
        return self._ops.linear(hidden_SH, self._head, None, layout=RowMajor())
