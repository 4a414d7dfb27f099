"""Every recorded vector of AITER's quantisers, bit for bit, by the compatible functions.

NaN codes are compared as NaN: the byte of 0 / 0 depends on the platform. Where a scale is the NaN
255 the codes of its block mean nothing, and padding of shuffled scales is not compared.
"""

import re
from collections.abc import Callable, Mapping

import pytest
import torch

from syncline.model_ops_rocm.reference import aiter_compat as compat
from syncline.model_ops_rocm.testing.goldens import GoldenCase, flag, number, numbers

Tensors = Mapping[str, torch.Tensor]
Outputs = dict[str, torch.Tensor]
Goldens = Callable[[str], list[GoldenCase]]


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bits, except that every NaN equals every NaN."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    equal = got.view(integers) == wanted.view(integers)
    if got.is_floating_point():
        equal |= got.float().isnan() & wanted.float().isnan()
    return bool(equal.all())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Packed fp4 and e8m0 as bytes, which is how the compatible functions have them."""
    as_bytes = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    return tensor.view(torch.uint8) if tensor.dtype in as_bytes else tensor


def dtype_max(case: GoldenCase) -> float | None:
    """Of a type whose range is not used up."""
    return float(number(case.args, "dtypeMax", 0)) or None


def per_token(case: GoldenCase, t: Tensors) -> Outputs:
    # Factors per column, by whatever name.
    smooth = [tensor for name, tensor in t.items() if name not in ("x", "scale_in")]
    codes, scale = compat.pertoken_quant(
        t["x"],
        case.outputs["y"].dtype,
        scale=t.get("scale_in"),
        smooth=smooth[0] if smooth else None,
        dtype_max=dtype_max(case),
    )
    return {"y": codes, "scale": scale}


def per_tensor(case: GoldenCase, t: Tensors) -> Outputs:
    dtype = case.outputs["y"].dtype
    codes, scale = compat.per_tensor_quant(
        t["x"], dtype, scale=t.get("scale_in"), dtype_max=dtype_max(case)
    )
    return {"y": codes, "scale": scale}


def per_1x128(case: GoldenCase, t: Tensors) -> Outputs:
    codes, scale = compat.per_1x128_quant(t["x"], case.outputs["y"].dtype)
    return {"y": codes, "scale": scale}


def per_128x128(case: GoldenCase, t: Tensors) -> Outputs:
    is_atom = "quantize_weight_to_fp8_128x128_blockscale" in case.args
    quantise = compat.atom_per_128x128_quant if is_atom else compat.weight_per_128x128_quant
    codes, scale = quantise(t["x"], case.outputs["y"].dtype)
    return {"y": codes, "scale": scale}


def mxfp4(case: GoldenCase, t: Tensors) -> Outputs:
    codes, scale = compat.per_1x32_f4_quant(
        t["x"],
        mode=number(case.args, "round_mode", 1),
        shuffle=flag(case.args, "shuffle"),
        pack_dim=0 if "pack_dim=0" in case.args else -1,
    )
    if not flag(case.args, "shuffle") and "pack_dim=0" not in case.args:
        # A block with the NaN scale: its codes are not specified.
        unspecified = (raw(case.outputs["scale"]) == 255).repeat_interleave(16, dim=-1)
        unspecified = unspecified.view(codes.shape)
        codes = torch.where(unspecified, raw(case.outputs["y"]), codes)
    return {"y": codes, "scale": scale}


def mxfp8(case: GoldenCase, t: Tensors) -> Outputs:
    e8m0 = case.outputs["scale"].dtype == torch.float8_e8m0fnu
    codes, scale = compat.per_1x32_f8_quant(t["x"], case.outputs["y"].dtype, e8m0=e8m0)
    return {"y": codes, "scale": scale}


def int4(case: GoldenCase, t: Tensors) -> Outputs:
    codes, scale = compat.per_1x32_i4_quant(t["x"])
    return {"y": codes, "scale": scale}


def primitives(case: GoldenCase, t: Tensors) -> Outputs:
    """The function's own name begins the text of the arguments."""
    floatx = re.match(r"_f32_to_floatx_unpacked\(x, (\d), (\d)\)", case.args)
    if floatx is not None:
        return {"y": compat.f32_to_floatx(t["x"], int(floatx[1]), int(floatx[2]))}
    if case.args.startswith("e8m0_to_f32"):
        y = compat.e8m0_to_f32(t["x"])
        # Its NaN has the bits that AITER writes.
        assert torch.equal(y.view(torch.int32), case.outputs["y"].view(torch.int32))
        return {"y": y}
    decodes = case.args.startswith("mxfp4_to_f32")
    return {"y": compat.mxfp4_to_f32(t["x"]) if decodes else compat.f32_to_mxfp4(t["x"])}


def e8m0_modes(case: GoldenCase, t: Tensors) -> Outputs:
    mode, kind = number(case.args, "mode"), number(case.args, "dtype")
    return {"e8m0": compat.f32_to_mx_e8m0_scale(t["amax"], mode, kind)}


def atom(case: GoldenCase, t: Tensors) -> Outputs:
    if "max_scale" in case.outputs:
        codes, scale = compat.atom_requantize_with_max_scale(
            t["w"],
            t["w_scale"],
            numbers(case.args, "logical_widths"),
            normalize=case.outputs["w_out"].dtype != t["w"].dtype,
        )
        return {"w_out": codes, "max_scale": scale}
    if "w_scale_out" not in case.outputs:
        return {"y": compat.atom_dequant_mxfp8(t["x"], t["s"])}
    codes = t["w"] if "w" in t else torch.zeros(1).to(torch.float8_e4m3fn)
    codes, scale = compat.atom_normalize_e4m3fn_to_e4m3fnuz(codes, t["w_scale"])
    outputs = {"w_scale_out": scale}
    if "w" in t:
        outputs["w_out"] = codes
    if "in_scale" in t:
        outputs["in_scale_out"] = t["in_scale"] * 2
    return outputs


KINDS: dict[str, Callable[[GoldenCase, Tensors], Outputs]] = {
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


@pytest.mark.golden
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_of_the_function_is_reproduced(goldens: Goldens, kind: str) -> None:
    failed = []
    for case in goldens(kind):
        inputs = {key: raw(value).clone() for key, value in case.inputs.items()}
        got = KINDS[kind](case, inputs)
        assert got.keys() == case.outputs.keys(), str(case)
        # The inputs that were given are as they were: none of these functions writes in place.
        assert all(same(inputs[key], raw(value)) for key, value in case.inputs.items())
        failed += [(str(case), key) for key in got if not same(got[key], raw(case.outputs[key]))]
    assert not failed
