"""What is on record of AITER's functions: names, order of parameters, faults by version.

Unit: one function. Data alone: nothing here was run on an AMD GPU, and nothing imports AITER. A
function that is not here is not called.
Source: ROCm/aiter e4048607a (August 2026), read; the names of positional parameters are as they are
written there or shorter, so their number and order are checked, and a name where it is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from syncline.model_ops_rocm.aiter.distribution import release_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AiterFunction:
    """How this package calls a function: what goes by position, and what by name."""

    name: str  # with a dot: an attribute of an object, such as `tgemm.mm`
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    places: tuple[str, ...] = ("aiter",)  # modules to look in, in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A case in which a function gives wrong numbers."""

    function: str
    case: str
    fixed_in: tuple[int, ...] | None  # the first release known to be right; None: none is known

    def is_in(self, version: str) -> bool:
        """Whether a version must be taken to have it; one that cannot be read has it."""
        return self.fixed_in is None or release_of(version) < self.fixed_in


PARTIAL_16_PAGES: Final = KnownFault(
    function="pa_fwd_asm",
    case="a context of 16 pages of which the last is partial, 241 to 255 tokens at page 16",
    fixed_in=None,
)
KNOWN_FAULTS: Final = (PARTIAL_16_PAGES,)

_RECORD: Final = (
    AiterFunction(
        name="rmsnorm2d_fwd",
        positional=("x", "w", "eps"),
        keywords=("use_model_sensitive_rmsnorm",),
    ),
    AiterFunction(name="silu_and_mul", positional=("out", "x")),
    AiterFunction(
        name="rope_cached_positions_2c_fwd_inplace",
        positional=(
            *("q", "k", "cos", "sin", "positions"),
            *("rotate_style", "reuse_freqs_front_part", "nope_first"),
        ),
    ),
    AiterFunction(
        name="tgemm.mm",
        positional=("A", "B", "bias", "otype"),
        keywords=("scale_a", "scale_b"),
        places=("aiter", "aiter.tuned_gemm"),
    ),
    AiterFunction(name="gemm_a8w8", positional=("XQ", "WQ", "xs", "ws", "bias", "dtype")),
    AiterFunction(
        name="gemm_a8w8_bpreshuffle",
        positional=("XQ", "WQ", "xs", "ws"),
        keywords=("dtype",),
    ),
    AiterFunction(
        name="gemm_a8w8_blockscale",
        positional=("XQ", "WQ", "xs", "ws"),
        keywords=("dtype",),
    ),
    AiterFunction(
        name="gemm_a8w8_blockscale_bpreshuffle",
        positional=("XQ", "WQ", "xs", "ws"),
        keywords=("dtype",),
    ),
    AiterFunction(
        name="reshape_and_cache",
        positional=("k", "v", "kc", "vc", "slots", "kv_cache_dtype", "k_scale", "v_scale"),
        keywords=("asm_layout",),
    ),
    AiterFunction(
        name="reshape_and_cache_flash",
        positional=("k", "v", "kc", "vc", "slots", "kv_cache_dtype", "k_scale", "v_scale"),
    ),
    AiterFunction(
        name="pa_fwd_asm",
        positional=(
            *("Q", "K", "V", "block_tables", "context_lens", "block_tables_stride0", "max_qlen"),
            *("K_QScale", "V_QScale", "out_"),
        ),
    ),
    AiterFunction(
        name="flash_attn_varlen_func",
        positional=(
            *("q", "k", "v", "cu_q", "cu_k", "max_q", "max_k", "min_seqlen_q", "dropout"),
            *("scale", "softcap", "causal", "window"),
        ),
        keywords=("block_table", "out"),
    ),
    AiterFunction(
        name="topk_softmax",
        positional=("weights", "ids", "token_expert_indices", "gating", "renorm"),
    ),
    AiterFunction(
        name="fused_moe",
        positional=("hidden", "w1", "w2", "topk_weight", "topk_ids"),
        keywords=("expert_mask", "activation", "quant_type"),
        places=("aiter.fused_moe",),
    ),
    AiterFunction(name="get_hip_quant", positional=("qType",)),
    AiterFunction(
        name="rmsnorm_quant",
        positional=("out", "x", "scale", "w", "eps", "group_size", "shuffle_scale", "gemma"),
    ),
)
RECORD: Final[Mapping[str, AiterFunction]] = {one.name: one for one in _RECORD}

# The functions of each op; with several, each serves some of its calls, and the op is there if one
# of them is.
OP_FUNCTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "rms_norm": ("rmsnorm2d_fwd",),
    "rotary_embedding": ("rope_cached_positions_2c_fwd_inplace",),
    "silu_and_mul": ("silu_and_mul",),
    "linear": ("tgemm.mm",),
    "linear_quantised": (
        "gemm_a8w8",
        "gemm_a8w8_bpreshuffle",
        "gemm_a8w8_blockscale",
        "gemm_a8w8_blockscale_bpreshuffle",
        "tgemm.mm",
    ),
    "quantise_activation": ("get_hip_quant",),
    "rms_norm_quant": ("rmsnorm_quant",),
    "kv_write": ("reshape_and_cache", "reshape_and_cache_flash"),
    "paged_attention": ("pa_fwd_asm", "flash_attn_varlen_func"),
    "moe_route": ("topk_softmax",),
    "moe_experts": ("fused_moe",),
}
# The enumerations whose members an op passes; without one of them it is not there.
OP_ENUMERATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "quantise_activation": ("QuantType",),
    "moe_experts": ("QuantType", "ActivationType"),
}
# Why ops are not there, where that is not for want of a function.
_ABSENT: Final[Mapping[str, str]] = {
    "silu_and_mul_quant": "the parameters of AITER's silu_and_mul_quant are not on record",
    "moe_sort": (
        "AITER's moe_sorting packs slot and token into one number, and its parameters are not on"
        " record; fused_moe sorts by itself"
    ),
    "sample": "AITER's samplers take other random numbers than the ones that are written down",
}
NO_FUNCTION: Final = "AITER has no function for it that is on record"


def why_absent(op: str) -> str | None:
    """None for an op that AITER has."""
    return None if op in OP_FUNCTIONS else _ABSENT.get(op, NO_FUNCTION)
