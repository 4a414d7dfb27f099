"""Digests: of what is stored, and of what it means."""

import hashlib
import struct

import pytest
import torch

from syncline.weight_sync import (
    NameTable,
    Update,
    WeightSlot,
    combined_checksum,
    logical_checksums,
    stored_checksums,
    tensors_checksum,
)
from syncline.weight_sync.testing import (
    CycleEncoder,
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    StandIn,
    counting,
    make_slot,
)


def loaded(name: str, encoder: StandIn, values: torch.Tensor) -> WeightSlot:
    slot = make_slot(name, tuple(values.shape), encoder)
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard())
    update.put(name, values)
    update.commit()
    return slot


def decode(slot: WeightSlot) -> torch.Tensor:
    weight = slot.storage["weight"]
    if isinstance(slot.encoder, CycleEncoder):
        twice = slot.encoder.storage(slot.logical_shape)
        whole = tuple((0, size) for size in slot.logical_shape)
        slot.encoder.encode_into(twice, weight, whole)
        again = slot.encoder.storage(slot.logical_shape)
        slot.encoder.encode_into(again, twice["weight"], whole)
        return again["weight"]
    return weight


def test_a_digest_is_sha_256_of_a_header_and_the_bytes() -> None:
    """Pinned, so that two releases can compare what they hold."""
    expected = hashlib.sha256()
    expected.update(b"scale\0torch.bfloat16\0()\0\x80\x3f")
    expected.update(b"weight\0torch.float32\0(2,)\0" + struct.pack("<2f", 1, 2))
    tensors = {"weight": torch.tensor([1.0, 2.0]), "scale": torch.tensor(1).bfloat16()}
    assert tensors_checksum(tensors) == expected.hexdigest()


def test_the_order_of_slots_and_of_their_tensors_does_not_matter() -> None:
    slots = [loaded(name, ScaledEncoder(), counting((2, 2))) for name in "ab"]
    forward, backward = stored_checksums(slots), stored_checksums(slots[::-1])
    assert forward == backward
    assert combined_checksum(forward) == combined_checksum(dict(reversed(backward.items())))
    assert list(forward) == ["a", "b"]
    storage = slots[0].storage
    assert tensors_checksum(storage) == tensors_checksum(dict(reversed([*storage.items()])))


@pytest.mark.parametrize(
    "other",
    [
        {"weight": torch.tensor([1.0, 3.0])},
        {"weight": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"weight": torch.tensor([[1.0, 2.0]])},
        {"w": torch.tensor([1.0, 2.0])},
        {"weight": torch.tensor([1.0, 2.0]), "scale": torch.tensor([])},
        {"weight": torch.tensor([1.0, 2.0]).view(torch.int32)},
    ],
)
def test_a_value_a_dtype_a_shape_or_a_name_changes_the_digest(
    other: dict[str, torch.Tensor],
) -> None:
    assert tensors_checksum(other) != tensors_checksum({"weight": torch.tensor([1.0, 2.0])})


def test_names_of_slots_count() -> None:
    digests = {"a": "1", "b": "2"}
    assert combined_checksum(digests) != combined_checksum({"a": "2", "b": "1"})
    assert combined_checksum(digests) != combined_checksum({"a": "1"})


def test_strides_do_not_matter_and_no_elements_are_something() -> None:
    values = counting((3, 2))
    assert tensors_checksum({"w": values.t().contiguous().t()}) == tensors_checksum({"w": values})
    assert tensors_checksum({"w": torch.empty(0)}) != tensors_checksum({"w": torch.empty(0, 2)})
    assert tensors_checksum({"w": torch.tensor(1.0)}) != tensors_checksum({})


def test_two_layouts_of_the_same_values_agree_in_meaning_alone() -> None:
    values = counting((3, 4))
    plain = [loaded("w", IdentityEncoder(), values)]
    moved = [loaded("w", CycleEncoder(), values)]
    assert stored_checksums(plain) != stored_checksums(moved)
    assert logical_checksums(plain, decode) == logical_checksums(moved, decode)
    assert logical_checksums(plain, decode) != logical_checksums(
        [loaded("w", IdentityEncoder(), values + 1)], decode
    )
