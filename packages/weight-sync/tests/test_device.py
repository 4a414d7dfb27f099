"""Slots on a device, fed from the host and from the device: the bytes of a CPU load."""

import pytest
import torch

from syncline.weight_sync import Mode, NameTable, Update, UpdateOptions, stored_checksums
from syncline.weight_sync.slots import WeightSlot
from syncline.weight_sync.testing import (
    CycleEncoder,
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    StandIn,
    counting,
    make_slot,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("source", ["host", "device"])
@pytest.mark.parametrize("encoder", [IdentityEncoder(), CycleEncoder(), ScaledEncoder()])
def test_a_slot_on_a_device_stores_the_bytes_of_a_cpu_load(
    mode: Mode, source: str, encoder: StandIn
) -> None:
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator")
    device = torch.accelerator.current_accelerator()
    full = counting((6, 4))
    host = make_slot("w", (6, 4), encoder)
    slot = WeightSlot(
        name="w",
        logical_shape=(6, 4),
        encoder=encoder,
        storage={key: tensor.to(device) for key, tensor in host.storage.items()},
    )
    encoder.encode_into(host.storage, full, ((0, 6), (0, 4)))
    table = NameTable([slot], aliases={"tied": "w"})
    options = UpdateOptions(with_checksum=True)
    update = Update.begin(table, 1, guard=RecordingGuard([slot]), mode=mode, options=options)
    sent = full.to(device) if source == "device" else full
    update.put("w", sent[:, 1:], ((0, 6), (1, 4)))
    update.put("w", sent[:, :1], ((0, 6), (0, 1)))
    update.put("tied", sent)
    assert update.commit().coverage == 1.0
    assert stored_checksums([slot]) == stored_checksums([host])
