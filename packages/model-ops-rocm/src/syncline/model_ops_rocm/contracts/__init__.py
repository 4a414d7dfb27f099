"""What every op promises, one Protocol per op; knows no backend and runs nothing.

Shape letters: T tokens of a step, N query heads, K key/value heads, H hidden or head width being
normalised, D head_dim, I intermediate, V vocabulary, R rows (sequences), M entries of a block
table, P positions, NB blocks, BS block_size. N is a multiple of K; query head n reads key/value
head n // (N // K).

Common to all: floating tensors of one call share one dtype (float32, bfloat16 or float16) and one
device; strides are free unless a contract says contiguous; `out`, where there is one, has the
result's shape and dtype, shares no byte with an input or another result, and is returned. A bad
argument is a ValueError naming op, argument, value and limit. An op that needs memory of its own
has a `workspace_bytes`, which says how much for the largest shapes, and takes a `workspace`; the
others need none, given `out`. Without a `workspace`, as without `out`, memory is taken anew from
PyTorch's allocator by each call, which a step that is recorded must not do.
An op with `counters_size` takes `counters` as well, int32 and contiguous, by which parts of a
result are merged in the launch that computes them, to the same bits: zero before the first call,
left zero by each, and not shared by calls that may overlap. A result of counters that were not zero
has NaN.
Nothing here keeps a reference to a tensor after it returns, but for `PagedAttention` and its
metadata, and `EncodeGrouped.prepare`.
"""

from syncline.model_ops_rocm.contracts.attention import (
    AttentionMetadata,
    KVCopyBlocks,
    KVScales,
    KVWrite,
    MergeStates,
    PagedAttention,
)
from syncline.model_ops_rocm.contracts.decoding import (
    Advance,
    DecodeFault,
    DecodeInputs,
    DecodeState,
    Rejection,
    VerifyDrafts,
)
from syncline.model_ops_rocm.contracts.dense import (
    Embedding,
    GatherRows,
    NormStyle,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
)
from syncline.model_ops_rocm.contracts.fused import (
    QKNormRopeKVWrite,
    QuantiseActivation,
    RMSNormQuant,
    SiluAndMulQuant,
)
from syncline.model_ops_rocm.contracts.linear import Linear, LinearQuantised
from syncline.model_ops_rocm.contracts.logits import (
    PLAIN,
    SURE_LOGPROB,
    VOCAB_TILE,
    WHOLE,
    CombinePartials,
    Distribution,
    Draw,
    LogitsPartials,
    Sample,
    TokenLogprobs,
    TopLogprobs,
    Vocabulary,
)
from syncline.model_ops_rocm.contracts.logits_rules import (
    IN_PROMPT,
    NO_RULES,
    ApplyLogitsRules,
    CountTokens,
    LogitsRules,
)
from syncline.model_ops_rocm.contracts.moe import (
    ExpertMap,
    MoeCombine,
    MoeExperts,
    MoePermute,
    MoeRoute,
    MoeSort,
    SortedPairs,
    sorted_capacity,
)
from syncline.model_ops_rocm.contracts.storing import (
    AmaxInto,
    Encode,
    EncodeGrouped,
    PreparedEncode,
)

__all__ = [
    "IN_PROMPT",
    "NO_RULES",
    "PLAIN",
    "SURE_LOGPROB",
    "VOCAB_TILE",
    "WHOLE",
    "Advance",
    "AmaxInto",
    "ApplyLogitsRules",
    "AttentionMetadata",
    "CombinePartials",
    "CountTokens",
    "DecodeFault",
    "DecodeInputs",
    "DecodeState",
    "Distribution",
    "Draw",
    "Embedding",
    "Encode",
    "EncodeGrouped",
    "ExpertMap",
    "GatherRows",
    "KVCopyBlocks",
    "KVScales",
    "KVWrite",
    "Linear",
    "LinearQuantised",
    "LogitsPartials",
    "LogitsRules",
    "MergeStates",
    "MoeCombine",
    "MoeExperts",
    "MoePermute",
    "MoeRoute",
    "MoeSort",
    "NormStyle",
    "PagedAttention",
    "PreparedEncode",
    "QKNormRopeKVWrite",
    "QuantiseActivation",
    "RMSNorm",
    "RMSNormQuant",
    "Rejection",
    "RotaryEmbedding",
    "Sample",
    "SiluAndMul",
    "SiluAndMulQuant",
    "SortedPairs",
    "TokenLogprobs",
    "TopLogprobs",
    "VerifyDrafts",
    "Vocabulary",
    "sorted_capacity",
]
