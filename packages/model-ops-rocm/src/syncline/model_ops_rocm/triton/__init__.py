"""The `triton` backend as the registry sees it: which ops it has, where, and why not here.

Triton itself is imported by `load`, `prepare` and `sealed` alone: to list what there is, or to
import this package, needs none of it.
"""

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arch import detect_arch
from syncline.model_ops_rocm.backends import (
    Backend,
    OpEntry,
    why_not_arch,
    why_not_installed,
)
from syncline.model_ops_rocm.checks import FLOAT_DTYPES
from syncline.model_ops_rocm.errors import BackendUnavailableError
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS

_PACKAGE: Final = "triton"
_VERSION: Final = ">=3.6,<3.8"
# What ROCm builds of PyTorch bring is imported as `triton` too.
_OTHER_PACKAGES: Final = ("triton-rocm", "pytorch-triton-rocm", "pytorch-triton")


class _Op(NamedTuple):
    module: str
    name: str
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES


_OPS: Final[Mapping[str, _Op]] = {
    "rms_norm": _Op("norm", "rms_norm"),
    "rotary_embedding": _Op("rotary", "rotary_embedding"),
    "silu_and_mul": _Op("activation", "silu_and_mul"),
    "embedding": _Op("rows", "embedding"),
    "gather_rows": _Op("rows", "gather_rows"),
    "linear": _Op("linear", "LINEAR_OP"),
    "linear_quantised": _Op("linear_quantised", "LINEAR_QUANTISED_OP"),
    "kv_write": _Op("kv", "kv_write"),
    "kv_copy_blocks": _Op("kv", "KV_COPY_BLOCKS"),
    "advance": _Op("advance", "advance"),
    "quantise_activation": _Op("quantise", "quantise_activation"),
    "rms_norm_quant": _Op("norm", "rms_norm_quant"),
    "silu_and_mul_quant": _Op("activation", "silu_and_mul_quant"),
    "qk_norm_rope_kv_write": _Op("heads", "qk_norm_rope_kv_write"),
    "paged_attention": _Op("attention", "PAGED"),
    "merge_states": _Op("merge", "merge_states"),
    "encode": _Op("encode", "ENCODE_BY_TRITON"),
    "encode_grouped": _Op("encode_grouped", "ENCODE_GROUPED_BY_TRITON"),
    "amax_into": _Op("encode", "amax_into"),
    "verify_drafts": _Op("verify", "VERIFY_DRAFTS"),
    "moe_route": _Op("moe_routing", "moe_route"),
    "moe_sort": _Op("moe_routing", "moe_sort"),
    "moe_permute": _Op("moe_routing", "moe_permute"),
    "moe_combine": _Op("moe_routing", "moe_combine"),
    "moe_experts": _Op("moe_experts", "MOE_EXPERTS_OP"),
    "apply_logits_rules": _Op("logits_rules", "apply_logits_rules"),
    "count_tokens": _Op("logits_rules", "count_tokens"),
    "sample": _Op("logits", "SAMPLE_OP"),
    "token_logprobs": _Op("logits", "TOKEN_LOGPROBS_OP"),
    "top_logprobs": _Op("logits", "TOP_LOGPROBS_OP"),
    "logits_partials": _Op("logits", "LOGITS_PARTIALS_OP"),
    "combine_partials": _Op("logits", "combine_partials"),
}


def _why_not(arch: str) -> str | None:
    why = why_not_arch(arch, SUPPORTED_ARCHS) or _why_not_installed()
    if why is not None:
        return why
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, so kernels would be interpreted on the CPU"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    found = detect_arch()
    return None if found == arch else f"the GPU here is {found}, not {arch}"


def _why_not_installed() -> str | None:
    why = why_not_installed(_PACKAGE)
    if any(why_not_installed(package) is None for package in _OTHER_PACKAGES):
        return None
    return why


def _load() -> Mapping[str, object]:
    try:
        importlib.import_module("triton")
    except Exception as error:
        raise BackendUnavailableError(
            backend="triton",
            package=_PACKAGE,
            version=_VERSION,
            why=f"import triton raised {type(error).__name__}: {error}",
        ) from error
    return {op: _implementation(op) for op in _OPS}


def _implementation(op: str) -> object:
    entry = _OPS[op]
    return vars(importlib.import_module(f"{__name__}.ops.{entry.module}"))[entry.name]


def _prepare(op: object, examples: Iterable[Mapping[str, object]]) -> None:
    from syncline.model_ops_rocm.triton.launch import LAUNCHER

    assert callable(op)
    with LAUNCHER.compiling() as compiled:
        for example in examples:
            op(**example)
    for one in compiled:
        one.load()


@contextmanager
def sealed() -> Iterator[None]:
    """Inside, a launch that would compile raises NotPreparedError, with nothing launched.

    What a process enters once its ops are prepared: a rank that compiled in the middle of a step
    would keep the others waiting for seconds.
    """
    from syncline.model_ops_rocm.triton.launch import LAUNCHER

    with LAUNCHER.sealed():
        yield


BACKEND: Final = Backend(
    name="triton",
    package=_PACKAGE,
    version=_VERSION,
    entries=tuple(
        OpEntry(op=op, archs=SUPPORTED_ARCHS, dtypes=entry.dtypes) for op, entry in _OPS.items()
    ),
    why_not=_why_not,
    load=_load,
    prepare=_prepare,
)
