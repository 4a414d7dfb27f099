"""The ledger: who reads which storage, and what became of it since."""

import gc

import pytest
import torch

from syncline.graph_lifecycle import (
    FaultKind,
    StaleGraphError,
    StorageFault,
    StorageInUseError,
    StorageLedger,
)
from syncline.graph_lifecycle.testing import rebind


def kinds(ledger: StorageLedger, key: str) -> list[FaultKind]:
    return [fault.kind for fault in ledger.faults(key)]


def test_readers_are_found_by_storage_through_any_view() -> None:
    ledger = StorageLedger()
    base, other = torch.zeros(4, 4), torch.zeros(4)
    ledger.record("a", [base[0], other])
    ledger.record("b", [base.view(-1)])
    assert ledger.readers(base[3:]) == ("a", "b")
    assert ledger.readers(other) == ("a",)
    assert ledger.readers(torch.zeros(4)) == ()
    assert (ledger.num_storages("a"), ledger.num_storages("b")) == (2, 1)
    assert ledger.keys == ("a", "b")


def test_two_empty_storages_are_not_one() -> None:
    ledger = StorageLedger()
    first, second = torch.empty(0), torch.empty(0)
    ledger.record("a", [first])
    assert ledger.readers(second) == ()
    assert ledger.readers(first) == ("a",)


def test_a_graph_is_recorded_once_and_forgotten_entirely() -> None:
    ledger = StorageLedger()
    base = torch.zeros(4)
    ledger.record("a", [base])
    with pytest.raises(ValueError, match="'a' is recorded already"):
        ledger.record("a", [])
    ledger.record("b", [base])
    ledger.forget("a")
    ledger.forget("a")
    assert ledger.readers(base) == ("b",) and ledger.keys == ("b",)
    ledger.forget("b")
    assert ledger.readers(base) == ()
    ledger.record("a", [base])


def test_what_is_read_is_in_use_and_every_name_and_graph_is_listed() -> None:
    ledger = StorageLedger()
    w1, w2, w3 = (torch.zeros(2) for _ in range(3))
    ledger.record(("decode", 1), [w1, w2])
    ledger.record("draft", [w2])
    ledger.require_unread({"w3": w3}, "free")
    with pytest.raises(StorageInUseError, match="move weights refused") as caught:
        ledger.require_unread({"w1": w1, "w2": w2, "w3": w3}, "move weights")
    assert caught.value.action == "move weights"
    assert caught.value.names == ("w1", "w2")
    assert caught.value.graphs == (("decode", 1), "draft")


def test_released_storages_are_faults_until_they_are_restored() -> None:
    ledger = StorageLedger()
    weight, kv = torch.zeros(2), torch.zeros(2)
    ledger.record("g", [weight, kv])
    before = ledger.generation
    ledger.mark_released({"kv": kv[1:]})
    assert ledger.faults("g") == (StorageFault(tensor="kv", kind=FaultKind.RELEASED),)
    assert ledger.generation > before
    between = ledger.generation
    ledger.mark_restored([kv])
    assert ledger.faults("g") == ()
    assert ledger.generation > between


def test_recording_on_released_memory_is_refused_and_records_nothing() -> None:
    ledger = StorageLedger()
    weight, kv = torch.zeros(2), torch.zeros(2)
    ledger.mark_released({"kv": kv})
    with pytest.raises(StaleGraphError) as caught:
        ledger.record("g", [weight, kv])
    assert caught.value.key == "g"
    assert caught.value.faults == (StorageFault(tensor="kv", kind=FaultKind.RELEASED),)
    assert ledger.keys == () and ledger.readers(weight) == ()


def test_a_resized_storage_was_freed() -> None:
    ledger = StorageLedger()
    weight = torch.zeros(1000)
    ledger.record("g", [weight])
    weight.untyped_storage().resize_(0)
    assert kinds(ledger, "g") == [FaultKind.FREED]
    weight.untyped_storage().resize_(8000)
    assert kinds(ledger, "g") == [FaultKind.FREED]


def test_a_storage_freed_and_allocated_again_at_its_old_size_was_freed() -> None:
    ledger = StorageLedger()
    weight = torch.zeros(1000)
    ledger.record("g", [weight])
    storage, before = weight.untyped_storage(), weight.data_ptr()
    storage.resize_(0)
    others = [torch.zeros(1000) for _ in range(8)]  # One of them takes the old place.
    storage.resize_(4000)
    assert storage.nbytes() == 4000 and weight.data_ptr() != before
    assert kinds(ledger, "g") == [FaultKind.FREED]
    assert len(others) == 8


@pytest.mark.parametrize("how", ["set_", "data", "offset", "dtype", "shape"])
def test_a_tensor_bound_to_other_memory_or_read_otherwise_was_rebound(how: str) -> None:
    ledger = StorageLedger()
    weight = torch.zeros(4, 4)
    keep = weight[:]
    ledger.record("g", [weight])
    assert kinds(ledger, "g") == []
    if how == "set_":
        rebind(weight, torch.zeros(4, 4))
    elif how == "data":
        weight.data = torch.zeros(4, 4)
    elif how == "offset":
        weight.set_(weight.untyped_storage(), 4, (2, 4), (4, 1))
    elif how == "dtype":
        weight.data = weight.view(torch.int32)
    else:
        weight.t_()
    assert kinds(ledger, "g") == [FaultKind.REBOUND]
    assert keep.sum() == 0


def test_a_tensor_that_was_replaced_and_is_gone_was_dropped() -> None:
    ledger = StorageLedger()
    layer = torch.nn.Linear(2, 2, bias=False)
    ledger.record("g", [layer.weight])
    ledger.settle("g")
    assert kinds(ledger, "g") == []
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    gc.collect()
    assert kinds(ledger, "g") == [FaultKind.DROPPED]


def test_a_view_that_lived_only_during_the_capture_is_no_fault_but_its_storage_counts() -> None:
    ledger = StorageLedger()
    base = torch.zeros(4, 4)
    ledger.record("g", [base[0], base[1]])
    ledger.settle("g")
    assert kinds(ledger, "g") == []
    assert ledger.readers(base) == ("g",)
    ledger.mark_released({"base": base})
    assert kinds(ledger, "g") == [FaultKind.RELEASED] * 2
    ledger.mark_restored([base])
    base.untyped_storage().resize_(0)
    assert kinds(ledger, "g") == [FaultKind.FREED] * 2


def test_an_update_in_place_is_no_fault() -> None:
    ledger = StorageLedger()
    weight = torch.zeros(4)
    ledger.record("g", [weight])
    weight.copy_(torch.ones(4))
    weight.mul_(3)
    assert kinds(ledger, "g") == []


def test_faults_say_what_happened_to_which_tensor() -> None:
    ledger = StorageLedger()
    weight = torch.zeros(2, 3, dtype=torch.bfloat16)
    ledger.record("g", [weight])
    rebind(weight, torch.zeros(2, 3, dtype=torch.bfloat16))
    assert [str(fault) for fault in ledger.faults("g")] == ["bfloat16[2, 3] was rebound"]
