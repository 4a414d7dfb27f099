"""Siblings that never import each other fit: a storage format is an encoder, a guard a guard.

The assignments to names with a Protocol's type are checked by mypy, the rest when run.
"""

import pytest
import torch

from syncline.engine.updates import EngineGuard
from syncline.model_ops_rocm import RowMajor, Shuffle16x16, StorageFormat, Unquantised, WeightLayout
from syncline.weight_sync import (
    Encoder,
    NameTable,
    SlotSource,
    Update,
    WeightSlot,
    WriteGuard,
    whole_region,
)
from syncline.weight_sync.testing import RecordingGuard

SHAPE = (64, 64)
HALVES = {"gate": ((0, 32), (0, 64)), "up": ((32, 64), (0, 64))}
layouts = pytest.mark.parametrize("layout", [RowMajor(), Shuffle16x16()], ids=str)


def _slot(storage_format: StorageFormat) -> WeightSlot:
    encoder: Encoder = storage_format
    storage = {
        name: torch.zeros(spec.shape, dtype=spec.dtype)
        for name, spec in storage_format.storage_spec(SHAPE).items()
    }
    sources = tuple(SlotSource(name=name, region=region) for name, region in HALVES.items())
    return WeightSlot(
        name="gate_up", logical_shape=SHAPE, encoder=encoder, storage=storage, sources=sources
    )


@layouts
def test_an_update_stores_what_encoding_the_whole_weight_at_once_stores(
    layout: WeightLayout,
) -> None:
    storage_format = StorageFormat(recipe=Unquantised(dtype=torch.bfloat16), layout=layout)
    slot = _slot(storage_format)
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard())
    for name, ((start, stop), _) in HALVES.items():
        update.put(name, whole[start:stop])
    report = update.commit()

    cold = {name: torch.zeros_like(tensor) for name, tensor in slot.storage.items()}
    storage_format.encode_into(cold, whole, whole_region(SHAPE))
    assert {n: torch.equal(slot.storage[n], cold[n]) for n in cold} == dict.fromkeys(cold, True)
    assert report.bytes_written == report.bytes_total == 64 * 64 * 2


@layouts
def test_what_was_updated_reads_back_as_what_was_sent(layout: WeightLayout) -> None:
    storage_format = StorageFormat(recipe=Unquantised(dtype=torch.float32), layout=layout)
    slot = _slot(storage_format)
    sent = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard())
    update.put("gate_up", sent)
    update.commit()
    assert torch.equal(storage_format.decode(slot.storage), sent)


def test_the_engines_guard_is_a_write_guard() -> None:
    guard_class: type[WriteGuard] = EngineGuard
    assert {"acquire", "first_write", "release"} <= set(dir(guard_class))
