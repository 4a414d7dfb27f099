"""The registry over recorded steps: stale reads are refused, failed captures rolled back."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from syncline.graph_lifecycle import (
    CaptureError,
    CaptureRequest,
    FaultKind,
    GraphError,
    GraphRegistry,
    PoisonArena,
    RecordedStore,
    StaleGraphError,
    StorageFault,
    StorageLedger,
    Tag,
    UncapturableOpError,
)
from syncline.graph_lifecycle.testing import TinyStep, rebind


def test_the_registry_refuses_what_the_bare_store_would_read_stale() -> None:
    ledger = StorageLedger()
    arena = PoisonArena(ledger=ledger)
    step = TinyStep(arena)
    step.load(seed=0)
    registry, store = GraphRegistry(ledger), RecordedStore()
    registry.add_store("full", store)
    registry.capture("g", "full", step, step.inputs(seed=1))
    inputs = step.inputs(seed=2)
    sound = registry.replay("g", inputs)["out"].clone()

    receipt = arena.release(Tag.WEIGHTS)
    assert store.replay("g", inputs)["out"].isnan().all()
    with pytest.raises(StaleGraphError) as caught:
        registry.replay("g", inputs)
    assert caught.value.key == "g"
    assert [(f.tensor, f.kind) for f in caught.value.faults] == [
        ("up", FaultKind.RELEASED),
        ("down", FaultKind.RELEASED),
    ]
    arena.restore(receipt)
    step.load(seed=0)
    assert torch.equal(registry.replay("g", inputs)["out"], sound)


@pytest.mark.parametrize("how", ["set_", "data"])
def test_a_weight_that_a_layout_change_moved_makes_the_graph_stale(how: str) -> None:
    ledger = StorageLedger()
    step = TinyStep(PoisonArena(ledger=ledger))
    step.load(seed=0)
    registry, store = GraphRegistry(ledger), RecordedStore()
    registry.add_store("full", store)
    registry.capture("g", "full", step, step.inputs(seed=1))
    shuffled = step.up.flip(0).contiguous()
    if how == "set_":
        rebind(step.up, shuffled)
    else:
        step.up.data = shuffled
    inputs = step.inputs(seed=2)
    assert not torch.equal(store.replay("g", inputs)["out"], step(inputs)["out"])
    with pytest.raises(StaleGraphError, match="was rebound"):
        registry.replay("g", inputs)
    assert list(registry.audit()) == ["g"]
    registry.restore(
        registry.release(keys=registry.audit()),
        lambda keys: [CaptureRequest(key=k, store="full", fn=step, inputs=inputs) for k in keys],
    )
    assert registry.audit() == {}
    assert torch.equal(registry.replay("g", inputs)["out"], step(inputs)["out"])


def test_a_parameter_that_was_replaced_makes_the_graph_stale() -> None:
    layer = torch.nn.Linear(2, 2)
    registry = GraphRegistry(StorageLedger())
    registry.add_store("full", RecordedStore())
    inputs = {"x": torch.ones(1, 2)}
    registry.capture("g", "full", lambda i: {"y": layer(i["x"])}, inputs)
    with torch.no_grad():
        layer.weight.mul_(2)
    registry.replay("g", inputs)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(StaleGraphError, match=r"float32\[2, 2\] was dropped"):
        registry.replay("g", inputs)


def test_temporaries_of_the_capture_do_not_make_the_graph_stale() -> None:
    base = torch.ones(4, 4)
    registry = GraphRegistry(StorageLedger())
    registry.add_store("full", RecordedStore())

    def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        temporary = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"y": base.data[0] * temporary + torch.nn.Parameter(base[1])}

    registry.capture("g", "full", fn, {})
    assert registry.replay("g", {})["y"].tolist() == [2, 3, 4, 5]
    assert registry.audit() == {}
    assert registry.ledger.readers(base) == ("g",)


def test_auditing_on_change_finds_sleeping_memory_at_once_and_the_rest_when_asked() -> None:
    ledger = StorageLedger()
    arena = PoisonArena(ledger=ledger)
    step = TinyStep(arena)
    step.load(seed=0)
    registry = GraphRegistry(ledger, audit="on_change")
    registry.add_store("full", RecordedStore())
    registry.capture("g", "full", step, step.inputs(seed=1))
    registry.replay("g", step.inputs(seed=1))
    receipt = arena.release(Tag.KV_CACHE)
    with pytest.raises(StaleGraphError):
        registry.replay("g", step.inputs(seed=1))
    arena.restore(receipt)
    registry.replay("g", step.inputs(seed=1))
    rebind(step.up, step.up.clone())
    registry.replay("g", step.inputs(seed=1))  # The promise of this mode: the owner audits.
    assert registry.audit() == {
        "g": (StorageFault(tensor="float32[16, 8]", kind=FaultKind.REBOUND),)
    }


def test_a_graph_captured_while_one_tag_sleeps_is_rolled_back() -> None:
    ledger = StorageLedger()
    arena = PoisonArena(ledger=ledger)
    step = TinyStep(arena)
    step.load(seed=0)
    registry, store = GraphRegistry(ledger), RecordedStore()
    registry.add_store("full", store)
    receipt = arena.release(Tag.KV_CACHE)
    with pytest.raises(CaptureError, match="kv was released") as caught:
        registry.capture("g", "full", step, step.inputs(seed=1))
    assert isinstance(caught.value.__cause__, StaleGraphError)
    assert registry.keys == store.keys == ()
    # The step ran for real and wrote into sleeping memory: the arena finds that as well.
    with pytest.raises(GraphError, match="was asleep while somebody wrote"):
        arena.restore(receipt)
    arena.restore(receipt)
    registry.capture("g", "full", step, step.inputs(seed=1))
    assert registry.degraded is None


@pytest.mark.parametrize("at", range(3))
def test_a_real_capture_that_syncs_with_the_host_rolls_the_session_back(at: int) -> None:
    arena = PoisonArena(ledger=StorageLedger())
    step = TinyStep(arena)
    step.load(seed=0)
    assert arena.ledger is not None
    registry = GraphRegistry(arena.ledger)
    store = RecordedStore()
    registry.add_store("full", store)

    def syncing(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"out": step(inputs)["out"] * inputs["x"].max().item()}

    def session(fail_at: int | None) -> Iterator[CaptureRequest]:
        for index, rows in enumerate((8, 4, 1)):
            fn = syncing if index == fail_at else step
            yield CaptureRequest(
                key=rows, store="full", fn=fn, inputs=step.inputs(seed=1, num_rows=rows)
            )

    with pytest.raises(UncapturableOpError, match="_local_scalar_dense"):
        registry.capture_all(session(fail_at=at))
    assert store.keys == () and store.num_bytes == 0
    assert arena.ledger.readers(step.up) == ()
    registry.capture_all(session(fail_at=None))
    assert registry.keys == (8, 4, 1)
    assert registry.degraded is None
