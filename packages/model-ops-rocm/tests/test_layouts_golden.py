"""Layouts of weights and scales against recorded outputs of AITER's functions, bit for bit.

Three things agree in each case: the stored bytes, what the inverse makes of AITER's bytes, and the
recorded map from stored to logical positions, which the layout must give without any data. Digests
of those maps are kept beside the tests, so that the maps are compared without the recordings, too.
"""

import hashlib
import json
import operator
import os
import struct
from collections.abc import Iterator, Mapping
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
from syncline.model_ops_rocm.testing.aiter_layouts import (
    RECORDED_LAYOUT_FILES,
    RecordedLayout,
    recorded_layout,
)

DIGESTS = json.loads((Path(__file__).parent / "layout_digests.json").read_text())

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


@pytest.mark.golden
@pytest.mark.parametrize("file_name", RECORDED_LAYOUT_FILES)
def test_every_recorded_case_is_one_of_the_layouts(file_name: str) -> None:
    for case, tensors in cases_of(file_name):
        how = recorded_layout(file_name, case)
        x, y = tensors["x"], tensors["y"]
        if how.layout is None:
            assert torch.equal(bits(x), bits(y)), case
            continue
        logical, recorded = logical_view(x, how), stored_view(y, how)
        stored = how.layout.apply(logical)
        assert stored.numel() == y.numel(), case
        assert torch.equal(bits(stored), bits(recorded)), case
        back = how.layout.inverse(recorded.reshape(stored.shape), shape=logical.shape)
        assert torch.equal(bits(back), bits(logical)), case
        if "src_index" in tensors:
            index = stored_view(tensors["src_index"], how).reshape(-1).long()
            assert torch.equal(positions(how.layout, how, x), index), case
            check_addresses(how.layout, logical.shape, x.dtype)


def check_addresses(layout: PermutedLayout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The address formula goes the other way: a sample that meets every remainder of a tile."""
    strides = torch.empty(shape, device="meta").stride()
    for address, position in list(enumerate(layout.source_index(shape, dtype).view(-1)))[::131]:
        index = layout.index(shape, dtype, address)
        assert (-1 if index is None else sum(map(operator.mul, index, strides))) == position
        if index is not None:
            assert layout.address(shape, dtype, index) == address


@pytest.mark.parametrize("file_name", sorted(DIGESTS))
def test_the_maps_have_the_digests_of_the_recorded_ones(file_name: str) -> None:
    for case, (shape, dtype, wanted) in DIGESTS[file_name].items():
        how = recorded_layout(file_name, case)
        assert how.layout is not None
        x = torch.empty(shape, dtype=getattr(torch, dtype))
        assert digest(positions(how.layout, how, x)) == wanted, case


@pytest.mark.golden
def test_the_digests_are_those_of_the_recorded_maps() -> None:
    for file_name in sorted(DIGESTS):
        recorded = {
            case: [
                list(tensors["x"].shape),
                str(tensors["x"].dtype).removeprefix("torch."),
                digest(
                    stored_view(tensors["src_index"], recorded_layout(file_name, case)).flatten()
                ),
            ]
            for case, tensors in cases_of(file_name)
            if "src_index" in tensors and recorded_layout(file_name, case).layout is not None
        }
        for case in recorded.keys() & DIGESTS[file_name].keys():
            assert recorded[case] == DIGESTS[file_name][case], case
        # Another recording of the same functions may have other cases.
        assert recorded, file_name


@pytest.mark.golden
def test_int4_packings() -> None:
    packed_by = {
        "packed": INT4_HALVES,
        "u32": INT4_SEQUENTIAL,
        "u32_rearranged": INT4_EVENS_FIRST,
    }
    seen = set()
    for case, tensors in cases_of("shuffle_weight_int4"):
        for name in packed_by.keys() & tensors.keys():
            packed = packed_by[name].pack(tensors["y"])
            assert torch.equal(bits(packed), bits(tensors[name])), case
            assert torch.equal(packed_by[name].unpack(packed), tensors["y"]), case
            seen.add(name)
    assert seen == packed_by.keys()


def test_scales_that_aiter_passes_through_are_refused_by_the_scale_layouts() -> None:
    scales = torch.zeros((256, 8))
    with pytest.raises(LayoutError, match=r"elements of 1 byte, got torch.float32"):
        e8m0_shuffle().apply(scales)
    with pytest.raises(LayoutError, match=r"elements of 2 bytes, got torch.float32"):
        int4_scale_pairs().apply(scales)
