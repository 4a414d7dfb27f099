"""The `torch` backend as the registry sees it: which op is which function, where.

Knows no arguments. PyTorch runs these on every architecture; the tests run them on a CPU.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from syncline.model_ops_rocm.arch import KNOWN_ARCHS
from syncline.model_ops_rocm.backends import Backend, OpEntry
from syncline.model_ops_rocm.checks import FLOAT_DTYPES
from syncline.model_ops_rocm.reference.activation import silu_and_mul
from syncline.model_ops_rocm.reference.advance import advance
from syncline.model_ops_rocm.reference.attention import TorchPagedAttention, merge_states
from syncline.model_ops_rocm.reference.fused import (
    qk_norm_rope_kv_write,
    quantise_activation,
    rms_norm_quant,
    silu_and_mul_quant,
)
from syncline.model_ops_rocm.reference.kv import TorchKVCopyBlocks, kv_write
from syncline.model_ops_rocm.reference.linear import TorchLinear
from syncline.model_ops_rocm.reference.linear_quantised import TorchLinearQuantised
from syncline.model_ops_rocm.reference.logits import (
    TorchLogitsPartials,
    TorchSample,
    TorchTokenLogprobs,
    TorchTopLogprobs,
    combine_partials,
)
from syncline.model_ops_rocm.reference.logits_rules import apply_logits_rules, count_tokens
from syncline.model_ops_rocm.reference.moe_experts import TorchMoeExperts
from syncline.model_ops_rocm.reference.moe_routing import (
    moe_combine,
    moe_permute,
    moe_route,
    moe_sort,
)
from syncline.model_ops_rocm.reference.norm import rms_norm
from syncline.model_ops_rocm.reference.rotary import rotary_embedding
from syncline.model_ops_rocm.reference.rows import embedding, gather_rows
from syncline.model_ops_rocm.reference.storing import ENCODE, ENCODE_GROUPED, amax_into
from syncline.model_ops_rocm.reference.verify import TorchVerifyDrafts

_IMPLEMENTATIONS: Final[Mapping[str, object]] = {
    "rms_norm": rms_norm,
    "rotary_embedding": rotary_embedding,
    "silu_and_mul": silu_and_mul,
    "linear": TorchLinear(),
    "linear_quantised": TorchLinearQuantised(),
    "embedding": embedding,
    "gather_rows": gather_rows,
    "kv_write": kv_write,
    "kv_copy_blocks": TorchKVCopyBlocks(),
    "paged_attention": TorchPagedAttention(),
    "advance": advance,
    "quantise_activation": quantise_activation,
    "rms_norm_quant": rms_norm_quant,
    "silu_and_mul_quant": silu_and_mul_quant,
    "qk_norm_rope_kv_write": qk_norm_rope_kv_write,
    "merge_states": merge_states,
    "encode": ENCODE,
    "encode_grouped": ENCODE_GROUPED,
    "amax_into": amax_into,
    "verify_drafts": TorchVerifyDrafts(),
    "moe_route": moe_route,
    "moe_sort": moe_sort,
    "moe_permute": moe_permute,
    "moe_combine": moe_combine,
    "moe_experts": TorchMoeExperts(),
    "apply_logits_rules": apply_logits_rules,
    "count_tokens": count_tokens,
    "sample": TorchSample(),
    "token_logprobs": TorchTokenLogprobs(),
    "top_logprobs": TorchTopLogprobs(),
    "logits_partials": TorchLogitsPartials(),
    "combine_partials": combine_partials,
}


def _why_not(arch: str) -> str | None:
    return None


def _prepare(op: object, examples: Iterable[Mapping[str, object]]) -> None:
    """PyTorch's kernels are compiled already."""


def _load() -> Mapping[str, object]:
    return _IMPLEMENTATIONS


BACKEND: Final = Backend(
    name="torch",
    package="torch",
    version=torch.__version__,
    entries=tuple(
        OpEntry(op=op, archs=KNOWN_ARCHS, dtypes=FLOAT_DTYPES) for op in _IMPLEMENTATIONS
    ),
    why_not=_why_not,
    load=_load,
    prepare=_prepare,
)
