"""Layouts of weights and scales against recorded outputs of AITER's functions, bit for bit.

Three things agree in each case: the stored bytes, what the inverse makes of AITER's bytes, and the
recorded map from stored to logical positions, which the layout must give without any data. Digests
of those maps are kept beside the tests, so that the maps are compared without the recordings, too.
"""

import hashlib
import json
import operator
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from syncline.model_ops_rocm import LayoutError
from syncline.model_ops_rocm.layouts import (
    INT4_EVENS_FIRST,
    INT4_HALVES,
    INT4_SEQUENTIAL,
    PermutedLayout,
    e8m0_shuffle,
    int4_scale_pairs,
)
from syncline.model_ops_rocm.layouts.base import empty_storage
from syncline.model_ops_rocm.testing.aiter_layouts import (
    RECORDED_LAYOUTS,
    RecordedLayout,
    recorded_layout,
)
from syncline.model_ops_rocm.testing.goldens import GoldenCase, RecordedFile, kind_of

DIGESTS = json.loads((Path(__file__).parent / "layout_digests.json").read_text())

Goldens = Callable[[str], list[GoldenCase]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def logical_view(tensor: torch.Tensor, how: RecordedLayout) -> torch.Tensor:
    """An input of AITER's function, or the numbers of its elements, as [..., N, K]."""
    if how.num_experts is not None:
        return tensor.view(how.num_experts, -1, tensor.shape[-1])
    if how.transposed:
        return tensor.transpose(1, 2)
    return tensor.unsqueeze(-1) if how.single_column else tensor


def stored_view(output: torch.Tensor, how: RecordedLayout) -> torch.Tensor:
    """An output in the order of its memory."""
    return output.transpose(1, 2) if how.gives_transposed else output


def positions(layout: PermutedLayout, how: RecordedLayout, x: torch.Tensor) -> torch.Tensor:
    """The layout's map, counted in the memory of AITER's input."""
    numbers = logical_view(torch.arange(x.numel()).view(x.shape), how)
    ours = layout.source_index(numbers.shape, x.dtype).view(-1)
    return torch.where(ours < 0, ours, numbers.reshape(-1)[ours])


def digest(index: torch.Tensor) -> str:
    numbers = index.tolist()
    return hashlib.sha256(struct.pack(f"<{len(numbers)}i", *numbers)).hexdigest()[:16]


def layout_of(kind: str, case: GoldenCase) -> RecordedLayout:
    x = case.inputs["x"]
    return recorded_layout(kind, case.args, x.shape, x.dtype)


@pytest.mark.golden
@pytest.mark.parametrize("kind", RECORDED_LAYOUTS)
def test_every_recorded_case_is_one_of_the_layouts(goldens: Goldens, kind: str) -> None:
    for case in goldens(kind):
        how = layout_of(kind, case)
        x, y = case.inputs["x"], case.outputs["y"]
        if how.layout is None:
            assert torch.equal(bits(x), bits(stored_view(y, how))), str(case)
            continue
        logical, recorded = logical_view(x, how), stored_view(y, how)
        stored = how.layout.apply(logical)
        assert stored.numel() == y.numel(), str(case)
        assert torch.equal(bits(stored), bits(recorded)), str(case)
        back = how.layout.inverse(recorded.reshape(stored.shape), shape=logical.shape)
        assert torch.equal(bits(back), bits(logical)), str(case)
        if "unshuffled" in case.outputs:
            assert torch.equal(bits(case.outputs["unshuffled"]), bits(x)), str(case)
        if "src_index" in case.outputs:
            index = stored_view(case.outputs["src_index"], how).reshape(-1).long()
            assert torch.equal(positions(how.layout, how, x), index), str(case)
            check_addresses(how.layout, logical.shape, x.dtype)


def check_addresses(layout: PermutedLayout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The address formula goes the other way: a sample that meets every remainder of a tile."""
    strides = torch.empty(shape, device="meta").stride()
    for address, position in list(enumerate(layout.source_index(shape, dtype).view(-1)))[::131]:
        index = layout.index(shape, dtype, address)
        assert (-1 if index is None else sum(map(operator.mul, index, strides))) == position
        if index is not None:
            assert layout.address(shape, dtype, index) == address


@pytest.mark.parametrize("kind", sorted(DIGESTS))
def test_the_maps_have_the_digests_of_the_recorded_ones(kind: str) -> None:
    for case, (args, shape, dtype, wanted) in DIGESTS[kind].items():
        x = empty_storage(shape, getattr(torch, dtype), torch.device("cpu"))
        how = recorded_layout(kind, args, x.shape, x.dtype)
        assert how.layout is not None
        assert digest(positions(how.layout, how, x)) == wanted, case


@pytest.mark.golden
@pytest.mark.parametrize("kind", sorted(DIGESTS))
def test_the_digests_are_those_of_the_recorded_maps(goldens: Goldens, kind: str) -> None:
    for case in goldens(kind):
        # Another recording of the same functions may have other cases.
        if "src_index" not in case.outputs or case.name not in DIGESTS[kind]:
            continue
        x, index = case.inputs["x"], case.outputs["src_index"]
        stored = stored_view(index, layout_of(kind, case)).flatten()
        dtype = str(x.dtype).removeprefix("torch.")
        wanted = [case.args, list(x.shape), dtype, digest(stored)]
        assert wanted == DIGESTS[kind][case.name], str(case)


@pytest.mark.golden
def test_int4_packings(goldens: Goldens) -> None:
    packed_by = {
        "packed": INT4_HALVES,
        "u32": INT4_SEQUENTIAL,
        "u32_rearranged": INT4_EVENS_FIRST,
    }
    packed_cases = [
        case for case in goldens("shuffle_weight_int4") if packed_by.keys() & case.outputs.keys()
    ]
    if not packed_cases:
        pytest.skip("no case of the recording is packed")
    for case in packed_cases:
        y = case.outputs["y"]
        for name in packed_by.keys() & case.outputs.keys():
            packed = packed_by[name].pack(y)
            assert torch.equal(bits(packed), bits(case.outputs[name])), str(case)
            assert torch.equal(packed_by[name].unpack(packed), y), str(case)


@pytest.mark.golden
def test_every_file_of_the_folder_records_a_function_that_is_tested(
    golden_files: Mapping[str, RecordedFile],
) -> None:
    assert [stem for stem, file in golden_files.items() if kind_of(stem, file) is None] == []


def test_scales_that_aiter_passes_through_are_refused_by_the_scale_layouts() -> None:
    scales = torch.zeros((256, 8))
    with pytest.raises(LayoutError, match=r"elements of 1 byte, got torch.float32"):
        e8m0_shuffle().apply(scales)
    with pytest.raises(LayoutError, match=r"elements of 2 bytes, got torch.float32"):
        int4_scale_pairs().apply(scales)
