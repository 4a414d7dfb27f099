"""Layouts of weights and scales against recorded outputs of AITER's functions, bit for bit.

Three things agree in each case: the stored bytes, what the inverse makes of AITER's bytes, and the
recorded map from stored to logical positions, which the layout must give without any data.
"""

import json
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from syncline.model_ops_rocm import LayoutError, RowMajor
from syncline.model_ops_rocm.layouts import (
    INT4_EVENS_FIRST,
    INT4_HALVES,
    INT4_SEQUENTIAL,
    PermutedLayout,
    batched_scale_tiles,
    byte_tile_shuffle,
    e8m0_gate_up_shuffle,
    e8m0_shuffle,
    gate_up_rows,
    gate_up_rows_shuffle,
    gate_up_shuffle,
    gfx1250_tiles,
    int4_scale_pairs,
    n32k4_gate_up,
    scale_tiles,
    shuffle_nk,
)

pytestmark = pytest.mark.golden

Tensors = Mapping[str, torch.Tensor]


def cases_of(file_name: str) -> Iterator[tuple[str, Tensors]]:
    """Each case of a recorded file: its name, its tensors in the types they were recorded from."""
    folder = os.environ.get("SYNCLINE_GOLDEN_DIR")
    if folder is None:
        pytest.skip("SYNCLINE_GOLDEN_DIR is not set: no recorded vectors to compare with")
    safetensors = pytest.importorskip("safetensors", reason="reads the recorded vectors")
    path = Path(folder) / f"{file_name}.safetensors"
    with safetensors.safe_open(str(path), framework="pt") as file:
        cases = json.loads(file.metadata()["cases"])
        assert cases
        for case in cases:
            tensors = {}
            for name, facts in case["tensors"].items():
                tensor = file.get_tensor(f"{case['case']}.{name}")
                tensors[name] = tensor.view(getattr(torch, facts["dtype"]))
            yield case["case"], tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def expect(
    layout: PermutedLayout, tensors: Tensors, case: str, *, logical: torch.Tensor | None = None
) -> None:
    """`layout` of the logical tensor is the recorded `y`, and its map is `src_index`.

    `logical` may be a view of `x`, in whose memory the recorded map counts.
    """
    x, y = tensors["x"], tensors["y"].contiguous()
    source = x if logical is None else logical
    stored = layout.apply(source)
    assert stored.numel() == y.numel(), case
    assert torch.equal(bits(stored).view(-1), bits(y).view(-1)), case
    back = layout.inverse(y.view(stored.shape), shape=source.shape)
    assert torch.equal(bits(back), bits(source)), case
    if "src_index" not in tensors:
        return
    positions = torch.arange(x.numel()).view(x.shape)
    if logical is not None:
        positions = positions.as_strided(logical.shape, logical.stride())
    recorded = tensors["src_index"].reshape(-1).long()
    positions = positions.reshape(-1)
    ours = layout.source_index(source.shape, x.dtype).view(-1)
    assert torch.equal(torch.where(ours < 0, ours, positions[ours]), recorded), case
    # The address formula goes the other way, one element at a time: a sample that meets every
    # remainder of the tiles, whose sizes are powers of two.
    for address in range(0, y.numel(), 41):
        index = layout.index(source.shape, x.dtype, address)
        flat = -1 if index is None else sum(map(operator.mul, index, strides(source.shape)))
        assert flat == ours[address], (case, address)
        if index is not None:
            assert layout.address(source.shape, x.dtype, index) == address, (case, index)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def test_the_plain_weight_shuffle() -> None:
    for case, tensors in cases_of("shuffle_weight_plain"):
        expect(byte_tile_shuffle(), tensors, case)


def test_weight_shuffles_of_other_tiles() -> None:
    for case, tensors in cases_of("shuffle_weight_layouts"):
        rows, k_chunk = (int(number) for number in case.split("_")[1:3])
        expect(byte_tile_shuffle(rows=rows, k_chunk=k_chunk), tensors, case)


def test_int4_shuffles_and_packings() -> None:
    for case, tensors in cases_of("shuffle_weight_int4"):
        in_container = case.startswith("use_int4")
        expect(byte_tile_shuffle(int4_container=in_container), tensors, case)
        packed_by = {
            "packed": INT4_HALVES,
            "u32": INT4_SEQUENTIAL,
            "u32_rearranged": INT4_EVENS_FIRST,
        }
        for name, packing in packed_by.items():
            if name in tensors:
                packed = packing.pack(tensors["y"])
                assert torch.equal(packed.reshape(-1), bits(tensors[name]).reshape(-1)), case
                assert torch.equal(packing.unpack(packed), tensors["y"]), case


def test_a_weight_shuffle_with_padded_columns() -> None:
    for case, tensors in cases_of("shuffle_weight_pad_k"):
        expect(byte_tile_shuffle(pad_k_to=int(case.split("pad")[1])), tensors, case)


def test_gate_and_up_blocks_interleaved() -> None:
    for case, tensors in cases_of("shuffle_weight_guinterleave"):
        lanes = 32 if "nlane32" in case else 16
        expect(gate_up_shuffle(gate_up="gateup1" in case, lanes=lanes), tensors, case)


def test_what_each_architecture_does_to_expert_weights() -> None:
    for case, tensors in cases_of("moe_shuffle_weight"):
        interleaved, gate_up = "_gui1" in case, "_gateup1" in case
        if case.startswith("interleave_gate_up_rows"):
            layout = gate_up_rows()
        elif not interleaved:
            layout = byte_tile_shuffle()
        elif case.startswith("gfx1250"):
            layout = gate_up_rows_shuffle() if gate_up else byte_tile_shuffle()
        else:
            layout = gate_up_shuffle(gate_up=gate_up)
        if case == "interleave_gate_up_rows_3x8":
            x, y = tensors["x"].unsqueeze(-1), tensors["y"].unsqueeze(-1)
            tensors = {"x": x, "y": y, "src_index": tensors["src_index"]}
        expect(layout, tensors, case)


def test_weight_tiles_of_gfx1250() -> None:
    for case, tensors in cases_of("shuffle_weight_gfx1250"):
        if case.startswith("shuffle_mxfp8fp4_a"):
            layout = gfx1250_tiles(rows=2, columns=128, merged=False)
        elif case.startswith("shuffle_"):
            layout = gfx1250_tiles(merged=False)
        else:
            layout = gfx1250_tiles()
        if tensors["x"].ndim == 3:
            # AITER takes [E, K, N] and returns a transposed view of what is stored.
            expect_transposed(layout, tensors, case)
        else:
            expect(layout, tensors, case)


def expect_transposed(layout: PermutedLayout, tensors: Tensors, case: str) -> None:
    logical = tensors["x"].transpose(1, 2)
    num_experts, num_rows, num_columns = logical.shape
    shape = (num_experts, layout.merged_rows * num_columns, num_rows // layout.merged_rows)
    if tensors["y"].shape == tensors["x"].shape and layout.merged_rows > 1:
        stored = {name: tensors[name] for name in ("y", "src_index")}
    else:
        stored = {name: tensors[name].view(shape).transpose(1, 2) for name in ("y", "src_index")}
    expect(layout, {"x": tensors["x"], **stored}, case, logical=logical)


def test_instruction_tiles() -> None:
    for case, tensors in cases_of("shuffle_weight_NK"):
        _, inst_n, inst_k = case.split("_")[:3]
        expect(shuffle_nk(inst_n=int(inst_n), inst_k=int(inst_k)), tensors, case)


def test_e8m0_scales() -> None:
    for case, tensors in cases_of("shuffle_scale_e8m0"):
        if case.startswith("f32"):
            assert torch.equal(RowMajor().apply(tensors["x"]), tensors["y"])
            with pytest.raises(LayoutError, match=r"elements of 1 byte, got torch.float32"):
                e8m0_shuffle().apply(tensors["x"])
        else:
            expect(e8m0_shuffle(), tensors, case)


def by_expert(tensors: Tensors, num_experts: int) -> Tensors:
    shape = (num_experts, -1, tensors["x"].shape[-1])
    return {**tensors, "x": tensors["x"].view(shape)}


def test_e8m0_scales_of_gate_and_up() -> None:
    for case, tensors in cases_of("shuffle_scale_guinterleave"):
        num_experts = int(case.split("_E")[1].split("_")[0])
        layout = e8m0_gate_up_shuffle(gate_up=case.startswith("gateup1"))
        expect(layout, by_expert(tensors, num_experts), case)


def test_n32k4_scales() -> None:
    for case, tensors in cases_of("shuffle_scale_n32k4"):
        layout = n32k4_gate_up() if "gui1_gateup1" in case else scale_tiles(merged=True)
        expect(layout, by_expert(tensors, 2) if case.startswith("2d_E2") else tensors, case)


def test_what_each_architecture_does_to_expert_scales() -> None:
    for case, tensors in cases_of("moe_shuffle_scale"):
        interleaved, gate_up = "_gui1" in case, "_gateup1" in case
        if case.startswith("gfx1250"):
            both = interleaved and gate_up
            expect(
                n32k4_gate_up() if both else scale_tiles(merged=True), by_expert(tensors, 4), case
            )
        elif interleaved:
            expect(e8m0_gate_up_shuffle(gate_up=gate_up), by_expert(tensors, 4), case)
        else:
            expect(e8m0_shuffle(), tensors, case)


def test_scale_tiles_of_gfx1250() -> None:
    for case, tensors in cases_of("shuffle_scale_gfx1250"):
        if case.startswith("mxfp8fp4"):
            expect(scale_tiles(pad_rows=True), tensors, case)
        else:
            expect(scale_tiles(columns=8 if "intype8" in case else 4), tensors, case)


def test_int4_scales() -> None:
    for case, tensors in cases_of("shuffle_scale_int4"):
        if case.startswith("f32"):
            assert torch.equal(RowMajor().apply(tensors["x"]), tensors["y"])
        else:
            expect(int4_scale_pairs(), tensors, case)


def test_scales_of_triton_kernels() -> None:
    for case, tensors in cases_of("triton_shuffle_scale"):
        kind, *rest = case.split("_")
        if kind == "batched":
            width = rest[0].removeprefix("kw")
            columns = tensors["x"].shape[-1] if width == "None" else int(width)
            expect(batched_scale_tiles(columns=columns), tensors, case)
        elif kind == "moe":
            if rest[0] == "gfx942":
                assert torch.equal(RowMajor().apply(tensors["x"]), tensors["y"])
            elif rest[0] == "gfx950":
                expect_transposed(e8m0_shuffle(padded=False, merged=True), tensors, case)
            else:
                expect_transposed(scale_tiles(merged=True), tensors, case)
        elif rest[0] == "gfx950":
            expect(e8m0_shuffle(padded=False, merged=True), tensors, case)
        else:
            rows, columns = (int(part[2:]) for part in rest[1:3])
            expect(scale_tiles(rows=rows, columns=columns, merged=True), tensors, case)
