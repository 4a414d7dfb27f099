"""(op, backend, arch, dtype) -> implementation, or why there is none.

Unit: one op. Knows which backends exist and asks them; a backend's library is imported when that
backend is first selected, never to list what is available.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal, overload

import torch

from syncline.model_ops_rocm.aiter import BACKEND as AITER
from syncline.model_ops_rocm.arch import KNOWN_ARCHS
from syncline.model_ops_rocm.backends import Backend, Missing
from syncline.model_ops_rocm.checks import FLOAT_DTYPES
from syncline.model_ops_rocm.contracts import (
    Advance,
    AmaxInto,
    ApplyLogitsRules,
    CombinePartials,
    CountTokens,
    Embedding,
    Encode,
    EncodeGrouped,
    GatherRows,
    KVCopyBlocks,
    KVWrite,
    Linear,
    LinearQuantised,
    LogitsPartials,
    MergeStates,
    MoeCombine,
    MoeExperts,
    MoePermute,
    MoeRoute,
    MoeSort,
    PagedAttention,
    QKNormRopeKVWrite,
    QuantiseActivation,
    RMSNorm,
    RMSNormQuant,
    RotaryEmbedding,
    Sample,
    SiluAndMul,
    SiluAndMulQuant,
    TokenLogprobs,
    TopLogprobs,
    VerifyDrafts,
)
from syncline.model_ops_rocm.errors import BackendUnavailableError, NoImplementationError
from syncline.model_ops_rocm.reference.backend import BACKEND as TORCH
from syncline.model_ops_rocm.triton import BACKEND as TRITON

OPS: Final[dict[str, type]] = {
    "rms_norm": RMSNorm,
    "rotary_embedding": RotaryEmbedding,
    "silu_and_mul": SiluAndMul,
    "linear": Linear,
    "linear_quantised": LinearQuantised,
    "embedding": Embedding,
    "gather_rows": GatherRows,
    "kv_write": KVWrite,
    "kv_copy_blocks": KVCopyBlocks,
    "paged_attention": PagedAttention,
    "advance": Advance,
    "quantise_activation": QuantiseActivation,
    "rms_norm_quant": RMSNormQuant,
    "silu_and_mul_quant": SiluAndMulQuant,
    "qk_norm_rope_kv_write": QKNormRopeKVWrite,
    "merge_states": MergeStates,
    "encode": Encode,
    "encode_grouped": EncodeGrouped,
    "amax_into": AmaxInto,
    "verify_drafts": VerifyDrafts,
    "moe_route": MoeRoute,
    "moe_sort": MoeSort,
    "moe_permute": MoePermute,
    "moe_combine": MoeCombine,
    "moe_experts": MoeExperts,
    "apply_logits_rules": ApplyLogitsRules,
    "count_tokens": CountTokens,
    "sample": Sample,
    "token_logprobs": TokenLogprobs,
    "top_logprobs": TopLogprobs,
    "logits_partials": LogitsPartials,
    "combine_partials": CombinePartials,
}
BACKENDS: Final[dict[str, Backend]] = {backend.name: backend for backend in (TORCH, TRITON, AITER)}
# From the one that was measured to the one that is right everywhere.
PREFERRED: Final = ("triton", "aiter", "torch")
# What each backend that was selected has loaded.
LOADED: Final[dict[str, Mapping[str, object]]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """One line of `available()`.

    is_offered   whether the backend has it, on whatever machine
    why_not      None if `select` would find an implementation here and now
    """

    op: str
    backend: str
    arch: str
    dtype: torch.dtype
    is_offered: bool
    why_not: str | None


@overload
def select(
    op: Literal["rms_norm"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> RMSNorm: ...
@overload
def select(
    op: Literal["rotary_embedding"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> RotaryEmbedding: ...
@overload
def select(
    op: Literal["silu_and_mul"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> SiluAndMul: ...
@overload
def select(
    op: Literal["linear"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> Linear: ...
@overload
def select(
    op: Literal["linear_quantised"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> LinearQuantised: ...
@overload
def select(
    op: Literal["embedding"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> Embedding: ...
@overload
def select(
    op: Literal["gather_rows"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> GatherRows: ...
@overload
def select(
    op: Literal["kv_write"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> KVWrite: ...
@overload
def select(
    op: Literal["kv_copy_blocks"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> KVCopyBlocks: ...
@overload
def select(
    op: Literal["paged_attention"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> PagedAttention: ...
@overload
def select(
    op: Literal["advance"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> Advance: ...
@overload
def select(
    op: Literal["quantise_activation"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> QuantiseActivation: ...
@overload
def select(
    op: Literal["rms_norm_quant"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> RMSNormQuant: ...
@overload
def select(
    op: Literal["silu_and_mul_quant"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> SiluAndMulQuant: ...
@overload
def select(
    op: Literal["qk_norm_rope_kv_write"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> QKNormRopeKVWrite: ...
@overload
def select(
    op: Literal["merge_states"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> MergeStates: ...
@overload
def select(
    op: Literal["encode"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> Encode: ...
@overload
def select(
    op: Literal["encode_grouped"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> EncodeGrouped: ...
@overload
def select(
    op: Literal["amax_into"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> AmaxInto: ...
@overload
def select(
    op: Literal["verify_drafts"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> VerifyDrafts: ...
@overload
def select(
    op: Literal["moe_route"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> MoeRoute: ...
@overload
def select(
    op: Literal["moe_sort"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> MoeSort: ...
@overload
def select(
    op: Literal["moe_permute"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> MoePermute: ...
@overload
def select(
    op: Literal["moe_combine"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> MoeCombine: ...
@overload
def select(
    op: Literal["moe_experts"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> MoeExperts: ...
@overload
def select(
    op: Literal["apply_logits_rules"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> ApplyLogitsRules: ...
@overload
def select(
    op: Literal["count_tokens"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> CountTokens: ...
@overload
def select(
    op: Literal["sample"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> Sample: ...
@overload
def select(
    op: Literal["token_logprobs"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> TokenLogprobs: ...
@overload
def select(
    op: Literal["top_logprobs"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> TopLogprobs: ...
@overload
def select(
    op: Literal["logits_partials"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> LogitsPartials: ...
@overload
def select(
    op: Literal["combine_partials"], *, backend: str = ..., arch: str = ..., dtype: torch.dtype
) -> CombinePartials: ...
@overload
def select(op: str, *, backend: str = ..., arch: str = ..., dtype: torch.dtype) -> object: ...
def select(op: str, *, backend: str = "torch", arch: str = "cpu", dtype: torch.dtype) -> object:
    """The implementation of `op`, which satisfies the op's contract.

    Imports the backend's library if this is the first use of it. Raises ValueError for a name that
    does not exist, BackendUnavailableError if the backend cannot run on this machine or on `arch`,
    or its library lacks what the op needs, NoImplementationError, listing what there is for the op,
    if it has nothing for the combination.
    """
    _require_name("op", op, list(OPS))
    _require_name("backend", backend, list(BACKENDS))
    chosen = BACKENDS[backend]
    why = chosen.why_not(arch)
    if why is not None:
        raise BackendUnavailableError(
            backend=backend, package=chosen.package, version=chosen.version, why=why
        )
    if backend not in LOADED:
        LOADED[backend] = chosen.load()
    if any(entry.fits(op, arch, dtype) for entry in chosen.entries):
        found = LOADED[backend][op]
        if isinstance(found, Missing):
            raise BackendUnavailableError(
                backend=backend, package=chosen.package, version=chosen.version, why=found.why
            )
        return found
    raise NoImplementationError(
        op=op, backend=backend, arch=arch, dtype=dtype, existing=_existing(op)
    )


def backend_for(
    op: str,
    *,
    arch: str,
    dtype: torch.dtype,
    preferred: SequenceABC[str] = PREFERRED,
) -> str:
    """The first of the `preferred` backends that can do `op` here and now, to be selected by name.

    By what is declared and installed, whatever was selected before: a library that is broken, or
    lacks a function, is not passed over, but refused by `select`. Raises ValueError for an op or a
    backend that does not exist, or no backend, and NoImplementationError with each backend's reason
    if there is none.
    """
    _require_name("op", op, list(OPS))
    for backend in preferred or ("",):
        _require_name("preferred", backend, list(BACKENDS))
    reasons = []
    for backend in preferred:
        why = _why_not(op, backend, arch, dtype, loaded={})
        if why is None:
            return backend
        reasons.append(f"{backend}, but {why}")
    listed = ", ".join(preferred)
    raise NoImplementationError(op=op, backend=listed, arch=arch, dtype=dtype, existing=reasons)


def prepare(
    op: str,
    examples: Iterable[Mapping[str, object]],
    *,
    backend: str = "torch",
    arch: str = "cpu",
    dtype: torch.dtype,
) -> None:
    """Compile all that calls of `op` with these arguments need; run nothing, write nothing.

    Each example is one call's keywords; its tensors may be on the `meta` device, which costs no
    memory. A later call needs no other kernel if its tensors have the example's dtypes, strides,
    last two sizes and whether a storage is over 2 GiB, and are aligned to 16 bytes; the number of
    tokens, blocks, positions or rows may differ. (A `view` of a single token may have other strides
    than one of many; a slice keeps them.) Raises what `select` raises, and what the op does
    for an argument.
    """
    BACKENDS[backend].prepare(select(op, backend=backend, arch=arch, dtype=dtype), examples)


def available(
    *,
    op: str | None = None,
    backend: str | None = None,
    arch: str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Availability, ...]:
    """Every combination, or those that match the arguments, each with its reason why not.

    Imports no backend's library, so a library that is installed and broken, or lacks a function,
    shows as available until it is selected.
    """
    if op is not None:
        _require_name("op", op, list(OPS))
    if backend is not None:
        _require_name("backend", backend, list(BACKENDS))
    return tuple(
        Availability(
            op=one_op,
            backend=one_backend,
            arch=one_arch,
            dtype=one_dtype,
            is_offered=_is_offered(one_op, one_backend, one_arch, one_dtype),
            why_not=_why_not(one_op, one_backend, one_arch, one_dtype),
        )
        for one_op in (OPS if op is None else (op,))
        for one_backend in (BACKENDS if backend is None else (backend,))
        for one_arch in (KNOWN_ARCHS if arch is None else (arch,))
        for one_dtype in (FLOAT_DTYPES if dtype is None else (dtype,))
    )


def _is_offered(op: str, backend: str, arch: str, dtype: torch.dtype) -> bool:
    return any(entry.fits(op, arch, dtype) for entry in BACKENDS[backend].entries)


def _why_not(
    op: str,
    backend: str,
    arch: str,
    dtype: torch.dtype,
    *,
    loaded: Mapping[str, Mapping[str, object]] = LOADED,
) -> str | None:
    """The reason that no machine can change comes first."""
    chosen = BACKENDS[backend]
    of_op = [entry for entry in chosen.entries if entry.op == op]
    if not of_op:
        return chosen.why_absent(op) or "it does not have the op in this version"
    why = chosen.why_not(arch)
    if why is not None:
        return why
    if _is_offered(op, backend, arch, dtype):
        found = loaded.get(backend, {}).get(op)
        return found.why if isinstance(found, Missing) else None
    where = arch if all(arch not in entry.archs for entry in of_op) else f"{arch} and {dtype}"
    return f"it has no {op} for {where} in this version"


def _existing(op: str) -> list[str]:
    return [
        f"{backend.name} on {entry.describe()}"
        for backend in BACKENDS.values()
        for entry in backend.entries
        if entry.op == op
    ]


def _require_name(argument: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    nearest = get_close_matches(name, known, n=1)
    hint = f" (nearest: {nearest[0]})" if nearest else ""
    raise ValueError(f"{argument} must be one of {', '.join(known)}, got {name!r}{hint}")
