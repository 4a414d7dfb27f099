"""Every recorded vector of AITER's quantisers, bit for bit, by the compatible functions.

NaN codes are compared as NaN: the byte of 0 / 0 depends on the platform. Where a scale is the NaN
255 the codes of its block mean nothing, and padding of shuffled scales is not compared.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from syncline.model_ops_rocm.reference import aiter_compat as compat

E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
DTYPES = {"e4m3fn": E4M3FN, "e4m3fnuz": E4M3FNUZ, "i8": torch.int8}
Tensors = Mapping[str, torch.Tensor]
Outputs = dict[str, torch.Tensor]


def cases_of(name: str) -> dict[str, Outputs]:
    """The cases of one recorded file, tensors in their own dtype but packed fp4 and e8m0 raw."""
    folder = os.environ.get("SYNCLINE_GOLDEN_DIR")
    if folder is None:
        pytest.skip("SYNCLINE_GOLDEN_DIR is not set: no recorded vectors to compare with")
    safetensors = pytest.importorskip("safetensors", reason="reads the recorded vectors")
    cases: dict[str, Outputs] = {}
    with safetensors.safe_open(str(Path(folder) / f"{name}.safetensors"), framework="pt") as file:
        for case in json.loads(file.metadata()["cases"]):
            tensors = cases.setdefault(case["case"], {})
            for key, about in case["tensors"].items():
                tensor = file.get_tensor(f"{case['case']}.{key}")
                if about["dtype"].startswith("float8_e4m3"):
                    tensor = tensor.view(getattr(torch, about["dtype"]))
                tensors[key] = tensor
    assert cases, name
    return cases


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bits, except that every NaN equals every NaN."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    equal = got.view(integers) == wanted.view(integers)
    if got.is_floating_point():
        equal |= got.float().isnan() & wanted.float().isnan()
    return bool(equal.all())


def dtype_in(case: str) -> torch.dtype:
    return DTYPES[next(part for part in case.split("_") if part in DTYPES)]


def per_token(case: str, t: Tensors) -> Outputs:
    dtype_max = 7.0 if "dtypeMax7" in case else None
    codes, scale = compat.pertoken_quant(
        t["x"], dtype_in(case), scale=t.get("scale_in"), dtype_max=dtype_max
    )
    return {"y": codes, "scale": scale}


def per_tensor(case: str, t: Tensors) -> Outputs:
    codes, scale = compat.per_tensor_quant(t["x"], dtype_in(case), scale=t.get("scale_in"))
    return {"y": codes, "scale": scale}


def per_1x128(case: str, t: Tensors) -> Outputs:
    codes, scale = compat.per_1x128_quant(t["x"], dtype_in(case))
    return {"y": codes, "scale": scale}


def per_128x128(case: str, t: Tensors) -> Outputs:
    quantise = (
        compat.weight_per_128x128_quant
        if case.startswith("aiter")
        else compat.atom_per_128x128_quant
    )
    codes, scale = quantise(t["x"], dtype_in(case))
    return {"y": codes, "scale": scale}


def mxfp4(case: str, t: Tensors) -> Outputs:
    mode = re.search(r"mode(\d)", case)
    codes, scale = compat.per_1x32_f4_quant(
        t["x"],
        mode=int(mode[1]) if mode else 1,
        shuffle="shuffle" in case,
        pack_dim=0 if "packdim0" in case else -1,
    )
    if case == "bf16_mode2_edge":
        # The block with the NaN scale: its codes are not specified.
        unspecified = (t["scale"] == 255).repeat_interleave(16, dim=-1)
        assert int(unspecified.sum()) == 16
        codes = torch.where(unspecified, t["y"], codes)
    return {"y": codes, "scale": scale}


def mxfp8(case: str, t: Tensors) -> Outputs:
    dtype = E4M3FNUZ if case.startswith("gfx942") else E4M3FN
    codes, scale = compat.per_1x32_f8_quant(t["x"], dtype, e8m0=case.endswith("e8m0"))
    return {"y": codes, "scale": scale}


def int4(case: str, t: Tensors) -> Outputs:
    codes, scale = compat.per_1x32_i4_quant(t["x"])
    return {"y": codes, "scale": scale}


def primitives(case: str, t: Tensors) -> Outputs:
    if case.startswith("floatx"):
        exponent_bits, mantissa_bits = int(case[-3]), int(case[-1])
        return {"y": compat.f32_to_floatx(t["x"], exponent_bits, mantissa_bits)}
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mxfp4_to_f32_all": compat.mxfp4_to_f32,
        "e8m0_to_f32_all": compat.e8m0_to_f32,
        "f32_to_mxfp4_edges": compat.f32_to_mxfp4,
    }
    y = functions.get(case, compat.f32_to_mxfp4)(t["x"])
    if case == "e8m0_to_f32_all":
        assert torch.equal(y.view(torch.int32), t["y"].view(torch.int32))
    return {"y": y}


MODES = {"RoundDown": 0, "RoundUp": 1, "Even": 2, "Ceil": 3}
KINDS = {"FP4_E2M1": 0, "FP8_E4M3": 1, "FP8_E4M3_FNUZ": 2}


def e8m0_modes(case: str, t: Tensors) -> Outputs:
    head, _, tail = case.partition("_")
    mode, kind = (int(case[-1]), 0) if head == "nonfinite" else (MODES[head], KINDS[tail])
    return {"e8m0": compat.f32_to_mx_e8m0_scale(t["amax"], mode, kind)}


def atom(case: str, t: Tensors) -> Outputs:
    if case == "normalize_e8m0_scale":
        codes = torch.zeros(1).to(E4M3FN)
        return {"w_scale_out": compat.atom_normalize_e4m3fn_to_e4m3fnuz(codes, t["w_scale"])[1]}
    if case.startswith("normalize"):
        codes, scale = compat.atom_normalize_e4m3fn_to_e4m3fnuz(t["w"], t["w_scale"])
        return {"w_out": codes, "w_scale_out": scale, "in_scale_out": t["in_scale"] * 2}
    if case.startswith("requant"):
        codes, scale = compat.atom_requantize_with_max_scale(
            t["w"], t["w_scale"], (4, 4), normalize=case != "requant_fn"
        )
        return {"w_out": codes, "max_scale": scale}
    return {"y": compat.atom_dequant_mxfp8(t["x"], t["s"].view(torch.uint8))}


FILES: dict[str, Callable[[str, Tensors], Outputs]] = {
    "quant_per_token": per_token,
    "quant_per_tensor": per_tensor,
    "quant_per_1x128": per_1x128,
    "quant_128x128": per_128x128,
    "quant_per_1x32_mxfp4": mxfp4,
    "quant_per_1x32_mxfp8": mxfp8,
    "quant_per_1x32_int4": int4,
    "fp4_e8m0_primitives": primitives,
    "mx_e8m0_scale_modes": e8m0_modes,
    "atom_fp8_fixups": atom,
}
INPUTS = {"x", "amax", "w", "s", "w_scale", "in_scale", "scale_in"}


@pytest.mark.golden
@pytest.mark.parametrize("file", FILES)
def test_every_case_of_the_file_is_reproduced(file: str) -> None:
    failed = []
    for case, tensors in cases_of(file).items():
        inputs = {key: value.clone() for key, value in tensors.items()}
        got = FILES[file](case, inputs)
        assert got.keys() == tensors.keys() - INPUTS, case
        # The inputs that were given are as they were: none of these functions writes in place.
        assert all(same(inputs[key], tensors[key]) for key in tensors)
        failed += [(case, key) for key in got if not same(got[key], tensors[key])]
    assert not failed
