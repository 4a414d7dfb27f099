"""Tiny random Qwen3 checkpoints in Hugging Face format, made in milliseconds and fully seeded.

The tokenizer writes one token per character: digits, a separator, letters, three special tokens.
Weights are random, so what such a model says means nothing; that it says the same again does.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

CHARACTERS: Final = "0123456789,abcdefghijklmnopqrstuvwxyz "
SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>")
NUM_TOKEN_IDS: Final = len(CHARACTERS) + len(SPECIAL_TOKENS)
EOS_TOKEN_ID: Final = NUM_TOKEN_IDS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """Sizes of a random Qwen3; vocab_size beyond NUM_TOKEN_IDS is padding."""

    seed: int = 0
    vocab_size: int = 48
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = True
    scale: float = 0.2

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": EOS_TOKEN_ID,
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its checkpoint name; the same for the same seed and sizes."""
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * self.scale

        def norm(size: int) -> Tensor:
            return 1.0 + torch.randn(size, generator=generator) * 0.1

        hidden, inner = self.hidden_size, self.intermediate_size
        tensors = {"model.embed_tokens.weight": random(self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            attention = prefix + "self_attn."
            tensors |= {
                prefix + "input_layernorm.weight": norm(hidden),
                attention + "q_proj.weight": random(self.num_heads * self.head_dim, hidden),
                attention + "k_proj.weight": random(self.num_kv_heads * self.head_dim, hidden),
                attention + "v_proj.weight": random(self.num_kv_heads * self.head_dim, hidden),
                attention + "o_proj.weight": random(hidden, self.num_heads * self.head_dim),
                attention + "q_norm.weight": norm(self.head_dim),
                attention + "k_norm.weight": norm(self.head_dim),
                prefix + "post_attention_layernorm.weight": norm(hidden),
                prefix + "mlp.gate_proj.weight": random(inner, hidden),
                prefix + "mlp.up_proj.weight": random(inner, hidden),
                prefix + "mlp.down_proj.weight": random(hidden, inner),
            }
        tensors["model.norm.weight"] = norm(hidden)
        if not self.tie_word_embeddings:
            tensors["lm_head.weight"] = random(self.vocab_size, hidden)
        return tensors


def build_tokenizer() -> Tokenizer:
    """One token per character; a character it does not know is an error."""
    vocab = {character: i for i, character in enumerate(CHARACTERS)}
    specials = {token: len(CHARACTERS) + i for i, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocab | specials))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_tiny_checkpoint(directory: Path, model: TinyModel | None = None) -> str:
    """Write config.json, generation_config.json, tokenizer.json, model.safetensors; the path."""
    chosen = TinyModel() if model is None else model
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(chosen.config()), encoding="utf-8")
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": EOS_TOKEN_ID}), encoding="utf-8"
    )
    build_tokenizer().save(str(directory / "tokenizer.json"))
    save_file(chosen.tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)
