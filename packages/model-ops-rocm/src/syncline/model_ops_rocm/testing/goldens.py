"""Recorded calls of AITER's functions, read from files of any name; computes nothing.

Unit: one recorded call. What was called is read from the file: the function from its metadata, the
arguments from each case's own text. A recording of the same functions in files of other names, with
other shapes and cases, is read just as well. Whoever reads opens the files, with `safetensors`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch

# What a recorded file calls its function, per name by which the tests ask for it.
FUNCTIONS: Final[Mapping[str, str]] = {
    "shuffle_weight_plain": "shuffle_weight(x, layout=...)",
    "shuffle_weight_layouts": "shuffle_weight(x, layout=(IN,IK))",
    "shuffle_weight_int4": "shuffle_weight(x, (16,16), use_int4=True) and int4 packing",
    "shuffle_weight_pad_k": "shuffle_weight(x, (16,16), pad_k_to=P)",
    "shuffle_weight_guinterleave": ("shuffle_weight(x, layout, is_guinterleave=True, gate_up=...)"),
    "moe_shuffle_weight": "moe_shuffle_weight(src, E, is_guinterleave, gate_up) per gfx",
    "shuffle_weight_gfx1250": "gfx1250 weight/activation shuffles",
    "shuffle_weight_NK": "shuffle_weight_NK(x, inst_N, inst_K, use_int4)",
    "shuffle_scale_e8m0": "shuffle_scale(src) == fp4_utils.e8m0_shuffle(src)",
    "shuffle_scale_guinterleave": "shuffle_scale(src, E, is_guinterleave=True, gate_up)",
    "shuffle_scale_n32k4": "shuffle_scale_n32k4(src, E, is_guinterleave, gate_up)",
    "moe_shuffle_scale": "moe_shuffle_scale(src, E, is_guinterleave, gate_up) per gfx",
    "shuffle_scale_gfx1250": "gfx1250 scale shuffles",
    "shuffle_scale_int4": "shuffle_scale_for_int4(scale, 32)",
    "triton_shuffle_scale": "triton scale shuffles (gemm / moe / batched)",
    "fp4_e8m0_primitives": "fp4 / e8m0 decode+encode tables",
    "mx_e8m0_scale_modes": "f32_to_mx_e8m0_scale(amax, mode, dtype)",
    "quant_per_token": "pertoken_quant(x, quant_dtype=...)",
    "quant_per_tensor": "per_tensor_quant(x, scale=None, quant_dtype=...)",
    "quant_per_1x128": (
        "get_torch_quant(per_1x128) = per_block_quant_wrapper((1,128))(pertoken_quant)"
    ),
    "quant_128x128": "128x128 block weight quantisers",
    "quant_per_1x32_mxfp4": "per_1x32_f4_quant(x, round_mode, shuffle, pack_dim)",
    "quant_per_1x32_mxfp8": "per_1x32_f8_scale_f8_quant(x, scale_type)",
    "quant_per_1x32_int4": "per_1x32_i4_quant(weight, 32)",
    "atom_fp8_fixups": (
        "ATOM normalize_e4m3fn_to_e4m3fnuz / requantize_with_max_scale / dequant_mxfp8"
    ),
    "kv_cache_layout": "reshape_and_cache torch reference (k/v cache layouts)",
    "moe_routing": "biased_grouped_topk_torch / grouped_topk_torch",
    "moe_sorting": "moe_sorting torch reference",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenCase:
    """One recorded call; tensors have the dtypes they were recorded from."""

    file: str
    name: str
    args: str  # as the recording writes them
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.inputs, **self.outputs}


class RecordedFile(Protocol):
    """An open file of safetensors."""

    def metadata(self) -> Mapping[str, str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


def kind_of(stem: str, file: RecordedFile) -> str | None:
    """Which of `FUNCTIONS` a file records, by its function or its name; None for another one."""
    recorded = file.metadata().get("function")
    known = {function: kind for kind, function in FUNCTIONS.items()}
    return known.get(recorded or "", stem if stem in FUNCTIONS else None)


def cases_of(stem: str, file: RecordedFile) -> list[GoldenCase]:
    """All cases of a file."""
    found = []
    for case in json.loads(file.metadata()["cases"]):
        sides: dict[str, dict[str, torch.Tensor]] = {"in": {}, "out": {}}
        for name, facts in case["tensors"].items():
            tensor = file.get_tensor(f"{case['case']}.{name}")
            sides[facts["io"]][name] = tensor.view(getattr(torch, facts["dtype"]))
        found.append(
            GoldenCase(
                file=stem,
                name=case["case"],
                args=case["args"],
                inputs=sides["in"],
                outputs=sides["out"],
            )
        )
    return found


def flag(args: str, name: str) -> bool:
    """`name=True` in the text of a case; False where it is not there."""
    return re.search(rf"\b{name}=True\b", args) is not None


def number(args: str, name: str, default: int | None = None) -> int:
    """`name=123` in the text of a case; ValueError if it is not there and has no default."""
    match = re.search(rf"\b{name}=(\d+)\b", args)
    if match is not None:
        return int(match[1])
    if default is None:
        raise ValueError(f"number: args must have {name}=, got {args!r}")
    return default


def numbers(args: str, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """`name=(1, 2)` or `name=[1,2]` in the text of a case."""
    match = re.search(rf"\b{name}=[(\[]([\d, ]+)[)\]]", args)
    if match is not None:
        return tuple(int(part) for part in match[1].split(","))
    if default is None:
        raise ValueError(f"numbers: args must have {name}=(...), got {args!r}")
    return default
