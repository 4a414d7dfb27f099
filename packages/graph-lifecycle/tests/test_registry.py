"""The registry: one owner of every graph, transactional, refusing what is stale."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from syncline.graph_lifecycle import (
    CaptureError,
    CaptureRequest,
    GraphError,
    GraphKey,
    GraphRegistry,
    ReceiptError,
    ReleaseError,
    StorageLedger,
    UnknownGraphError,
)
from syncline.graph_lifecycle.testing import FakeStore, InjectedFailure

STORES = ("full", "piecewise", "draft", "micro_batch")


def constant(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"y": torch.ones(1)}


def request(key: GraphKey, store: str) -> CaptureRequest:
    return CaptureRequest(key=key, store=store, fn=constant, inputs={})


def one_per_store(sizes: Iterable[int] = (8, 4, 1)) -> list[CaptureRequest]:
    return [request((store, size), store) for size, store in product(sizes, STORES)]


class Fakes:
    """A registry over one fake store per kind; every graph reads `weight`."""

    def __init__(self) -> None:
        self.weight = torch.zeros(4)
        self.ledger = StorageLedger()
        self.registry = GraphRegistry(self.ledger)
        self.stores = {name: FakeStore(lambda key: (self.weight,)) for name in STORES}
        for name, store in self.stores.items():
            self.registry.add_store(name, store)

    def recapture(self, keys: tuple[GraphKey, ...]) -> list[CaptureRequest]:
        return [request(key, str(key[0])) for key in keys if isinstance(key, tuple)]

    def fail_capture(self, at: int) -> None:
        """Make the capture number `at` of the next session over the stores fail."""
        store = self.stores[STORES[at % len(STORES)]]
        store.fail_at = store.num_captures + at // len(STORES)

    def fail_nothing(self) -> None:
        for store in self.stores.values():
            store.fail_at = None
            store.fails_to_discard.clear()

    def assert_empty(self) -> None:
        self.registry.check_integrity()
        assert self.registry.keys == () and self.registry.num_bytes == 0
        for store in self.stores.values():
            assert store.keys == ()
        assert self.ledger.readers(self.weight) == ()


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def test_every_kind_of_graph_is_listed_in_order_of_capture(fakes: Fakes) -> None:
    requests = one_per_store()
    reports = fakes.registry.capture_all(requests)
    assert fakes.registry.keys == tuple(r.key for r in requests)
    assert [(r.key, r.store) for r in reports] == [(r.key, r.store) for r in requests]
    assert {(r.num_storages, r.num_bytes) for r in reports} == {(1, FakeStore.bytes_per_graph)}
    assert fakes.registry.num_bytes == 12 * FakeStore.bytes_per_graph
    fakes.registry.check_integrity()
    assert fakes.registry.degraded is None


@pytest.mark.parametrize("at", range(12))
def test_a_failure_at_any_capture_of_a_session_leaves_no_store_with_anything(
    fakes: Fakes, at: int
) -> None:
    requests = one_per_store()
    fakes.fail_capture(at)
    with pytest.raises(CaptureError) as caught:
        fakes.registry.capture_all(requests)
    assert (caught.value.key, caught.value.store) == (requests[at].key, requests[at].store)
    assert isinstance(caught.value.__cause__, InjectedFailure)
    fakes.assert_empty()
    degraded = fakes.registry.degraded
    assert degraded is not None
    assert degraded.missing == tuple(r.key for r in requests)
    assert (degraded.key, degraded.store) == (requests[at].key, requests[at].store)
    assert degraded.reason == "InjectedFailure: capture failed"
    fakes.fail_nothing()
    fakes.registry.capture_all(requests)
    assert fakes.registry.keys == tuple(r.key for r in requests)
    assert fakes.registry.degraded is None


@pytest.mark.parametrize("at", range(8))
def test_a_failed_session_leaves_earlier_graphs_as_they_were(fakes: Fakes, at: int) -> None:
    first = one_per_store([8])
    fakes.registry.capture_all(first)
    fakes.fail_capture(at)
    with pytest.raises(CaptureError):
        fakes.registry.capture_all(one_per_store([4, 1]))
    assert fakes.registry.keys == tuple(r.key for r in first)
    assert fakes.registry.num_bytes == 4 * FakeStore.bytes_per_graph
    fakes.registry.check_integrity()
    for key in fakes.registry.keys:
        assert fakes.registry.replay(key, {})["y"] == 1


@pytest.mark.parametrize("at", range(12))
def test_a_failure_at_any_recapture_keeps_the_receipt_and_the_next_try_brings_all_back(
    fakes: Fakes, at: int
) -> None:
    fakes.registry.capture_all(one_per_store())
    keys = fakes.registry.keys
    receipt = fakes.registry.release()
    fakes.fail_capture(at)
    for _ in range(2):
        with pytest.raises(CaptureError):
            fakes.registry.restore(receipt, fakes.recapture)
        fakes.assert_empty()
        assert fakes.registry.degraded is not None
        assert fakes.registry.degraded.missing == keys
        fakes.fail_capture(at)
    fakes.fail_nothing()
    fakes.registry.restore(receipt, fakes.recapture)
    assert fakes.registry.keys == keys
    assert fakes.registry.degraded is None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConfig:
    enforce_eager: bool = False
    capture_sizes: tuple[int, ...] = (1, 4, 8)


def test_a_failed_capture_touches_no_configuration_and_does_not_stop_the_next(
    fakes: Fakes,
) -> None:
    config = UserConfig()

    def session() -> list[CaptureRequest]:
        return [] if config.enforce_eager else one_per_store(config.capture_sizes)

    fakes.fail_capture(5)
    with pytest.raises(CaptureError):
        fakes.registry.capture_all(session())
    assert config == UserConfig()
    fakes.fail_nothing()
    assert len(fakes.registry.capture_all(session())) == 12
    assert fakes.registry.degraded is None


def test_degraded_mode_ends_when_the_missing_graphs_are_there_again(fakes: Fakes) -> None:
    fakes.fail_capture(0)
    with pytest.raises(CaptureError):
        fakes.registry.capture_all([request(("full", 8), "full"), request(("full", 4), "full")])
    fakes.fail_nothing()
    fakes.registry.capture("unrelated", "draft", constant, {})
    fakes.registry.capture(("full", 4), "full", constant, {})
    degraded = fakes.registry.degraded
    assert degraded is not None and degraded.missing == (("full", 8),)
    fakes.registry.capture(("full", 8), "full", constant, {})
    assert fakes.registry.degraded is None


def test_degraded_mode_can_be_given_up_on_purpose(fakes: Fakes) -> None:
    fakes.fail_capture(0)
    with pytest.raises(CaptureError):
        fakes.registry.capture("g", "full", constant, {})
    fakes.registry.clear_degraded()
    assert fakes.registry.degraded is None


def test_two_failures_in_a_row_add_up_what_is_missing(fakes: Fakes) -> None:
    for key in ("a", "b"):
        fakes.fail_capture(0)
        with pytest.raises(CaptureError):
            fakes.registry.capture(key, "full", constant, {})
    degraded = fakes.registry.degraded
    assert degraded is not None
    assert (degraded.missing, degraded.key) == (("a", "b"), "b")


def test_an_interrupt_rolls_back_and_passes_through(fakes: Fakes) -> None:
    fakes.fail_capture(5)
    fakes.stores[STORES[1]].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fakes.registry.capture_all(one_per_store())
    fakes.assert_empty()
    assert fakes.registry.degraded is None


def test_a_rollback_goes_on_when_one_store_fails_at_it(fakes: Fakes) -> None:
    fakes.fail_capture(6)
    fakes.stores["full"].fails_to_discard.add(("full", 8))
    with pytest.raises(CaptureError) as caught:
        fakes.registry.capture_all(one_per_store())
    assert isinstance(caught.value.__cause__, InjectedFailure)
    assert any("('full', 8)" in note for note in caught.value.__cause__.__notes__)
    assert fakes.stores["full"].keys == (("full", 8),)
    assert all(fakes.stores[name].keys == () for name in STORES[1:])
    assert fakes.registry.keys == ()
    with pytest.raises(GraphError, match="stores hold"):
        fakes.registry.check_integrity()


@pytest.mark.parametrize("store", STORES)
def test_a_release_empties_every_store_whichever_of_them_holds_graphs(
    fakes: Fakes, store: str
) -> None:
    fakes.registry.capture_all([request((store, size), store) for size in (4, 2)])
    receipt = fakes.registry.release()
    assert receipt.graphs == (((store, 4), store), ((store, 2), store))
    assert receipt.num_bytes == 2 * FakeStore.bytes_per_graph
    fakes.assert_empty()
    fakes.registry.restore(receipt, fakes.recapture)
    assert fakes.registry.keys == receipt.keys


def test_a_release_of_everything_gives_back_what_all_stores_pin(fakes: Fakes) -> None:
    fakes.registry.capture_all(one_per_store())
    receipt = fakes.registry.release()
    assert receipt.num_bytes == 12 * FakeStore.bytes_per_graph
    fakes.assert_empty()


def test_a_release_does_not_ask_whether_the_registry_is_degraded(fakes: Fakes) -> None:
    fakes.registry.capture_all(one_per_store([8]))
    fakes.fail_capture(0)
    with pytest.raises(CaptureError):
        fakes.registry.capture_all(one_per_store([4]))
    receipt = fakes.registry.release()
    assert len(receipt.keys) == 4
    fakes.assert_empty()


def test_a_release_may_name_stores_or_keys(fakes: Fakes) -> None:
    fakes.registry.capture_all(one_per_store([2, 1]))
    receipt = fakes.registry.release(["draft", "full"])
    assert receipt.keys == (("full", 2), ("draft", 2), ("full", 1), ("draft", 1))
    second = fakes.registry.release(keys=[("piecewise", 1)])
    assert second.keys == (("piecewise", 1),)
    assert fakes.registry.keys == (("piecewise", 2), ("micro_batch", 2), ("micro_batch", 1))
    fakes.registry.check_integrity()
    fakes.registry.restore_all([second, receipt], fakes.recapture)
    assert len(fakes.registry.keys) == 8


def test_releasing_nothing_is_no_fault_and_its_receipt_restores_nothing(fakes: Fakes) -> None:
    receipt = fakes.registry.release()
    assert (receipt.graphs, receipt.num_bytes) == ((), 0)
    assert fakes.registry.restore(receipt, fakes.recapture) == ()


def test_unknown_names_are_refused_before_anything_is_released(fakes: Fakes) -> None:
    fakes.registry.capture_all(one_per_store([1]))
    with pytest.raises(ValueError, match=r"no stores \['nope'\]"):
        fakes.registry.release(["full", "nope"])
    with pytest.raises(UnknownGraphError):
        fakes.registry.release(keys=[("full", 1), "nope"])
    assert len(fakes.registry.keys) == 4


def test_a_store_that_does_not_discard_is_named_and_the_others_are_released(
    fakes: Fakes,
) -> None:
    fakes.registry.capture_all(one_per_store([2, 1]))
    fakes.stores["full"].fails_to_discard.add(("full", 2))
    with pytest.raises(ReleaseError) as caught:
        fakes.registry.release()
    assert any("full: discarding ('full', 2)" in line for line in caught.value.failures)
    assert len(caught.value.receipt.keys) == 8
    assert fakes.registry.keys == ()
    assert all(fakes.stores[name].keys == () for name in STORES[1:])
    with pytest.raises(UnknownGraphError):
        fakes.registry.replay(("full", 2), {})
    fakes.fail_nothing()
    fakes.stores["full"].discard(("full", 2))
    fakes.registry.restore(caught.value.receipt, fakes.recapture)
    assert len(fakes.registry.keys) == 8


def test_a_store_that_goes_on_pinning_memory_is_named(fakes: Fakes) -> None:
    fakes.registry.capture_all(one_per_store([1]))
    fakes.stores["micro_batch"].leaked_bytes = 77
    with pytest.raises(ReleaseError, match="micro_batch: still pins 77 bytes"):
        fakes.registry.release()


def test_a_graph_captured_behind_the_registrys_back_is_named(fakes: Fakes) -> None:
    fakes.stores["draft"].capture("stray", constant, {})
    with pytest.raises(GraphError, match="stray"):
        fakes.registry.check_integrity()
    with pytest.raises(ReleaseError, match="draft: still holds"):
        fakes.registry.release()


def test_a_receipt_is_consumed_exactly_once(fakes: Fakes) -> None:
    other = Fakes()
    other.registry.capture_all(one_per_store([1]))
    fakes.registry.capture_all(one_per_store([1]))
    receipt, foreign = fakes.registry.release(), other.registry.release()
    with pytest.raises(ReceiptError, match="somebody else"):
        fakes.registry.restore(foreign, fakes.recapture)
    with pytest.raises(ReceiptError, match="altered"):
        fakes.registry.restore(replace(receipt, num_bytes=0), fakes.recapture)
    with pytest.raises(ReceiptError, match="consumed already"):
        fakes.registry.restore_all([receipt, receipt], fakes.recapture)
    fakes.assert_empty()
    fakes.registry.restore(receipt, fakes.recapture)
    with pytest.raises(ReceiptError, match="consumed already"):
        fakes.registry.restore(receipt, fakes.recapture)
    assert len(fakes.registry.keys) == 4


def test_a_restore_captures_only_what_nobody_captured_again_meanwhile(fakes: Fakes) -> None:
    fakes.registry.capture_all(one_per_store([1]))
    receipt = fakes.registry.release()
    fakes.registry.capture(("full", 1), "full", constant, {})
    reports = fakes.registry.restore(receipt, fakes.recapture)
    assert [r.key for r in reports] == list(receipt.keys[1:])
    assert set(fakes.registry.keys) == set(receipt.keys)
    assert fakes.stores["full"].num_captures == 2


def test_a_recapture_must_give_the_very_graphs_that_were_released(fakes: Fakes) -> None:
    fakes.registry.capture_all(one_per_store([2, 1]))
    receipt = fakes.registry.release()

    def too_few(keys: tuple[GraphKey, ...]) -> list[CaptureRequest]:
        return fakes.recapture(keys)[1:]

    def others(keys: tuple[GraphKey, ...]) -> list[CaptureRequest]:
        return [*fakes.recapture(keys)[1:], request(("full", 99), "full")]

    def broken(keys: tuple[GraphKey, ...]) -> list[CaptureRequest]:
        raise RuntimeError("out of memory")

    for recapture, message in ((too_few, "must give"), (others, "must give"), (broken, "out of")):
        with pytest.raises(CaptureError, match=message):
            fakes.registry.restore(receipt, recapture)
        fakes.assert_empty()
        assert fakes.registry.degraded is not None
        assert fakes.registry.degraded.missing == receipt.keys
    fakes.registry.restore(receipt, lambda keys: reversed(fakes.recapture(keys)))
    assert fakes.registry.keys == receipt.keys


def test_bad_requests_are_refused_before_anything_is_captured(fakes: Fakes) -> None:
    fakes.registry.capture("g", "full", constant, {})
    for bad, message in (
        ([request("new", "full"), request("g", "draft")], "'g' is captured already"),
        ([request("new", "full"), request("new", "draft")], "'new' is captured already"),
        ([request("new", "full"), request("x", "nope")], "no store 'nope'"),
    ):
        with pytest.raises(ValueError, match=message):
            fakes.registry.capture_all(bad)
    assert fakes.registry.keys == ("g",)
    assert fakes.registry.degraded is None
    assert sum(store.num_captures for store in fakes.stores.values()) == 1


def test_a_store_is_added_once_and_empty(fakes: Fakes) -> None:
    with pytest.raises(ValueError, match="'full' is taken"):
        fakes.registry.add_store("full", FakeStore())
    used = FakeStore()
    used.capture("mine", constant, {})
    with pytest.raises(ValueError, match="must be empty"):
        fakes.registry.add_store("used", used)
    with pytest.raises(ValueError, match="audit must be"):
        GraphRegistry(StorageLedger(), audit="never")  # type: ignore[arg-type]  # on purpose


def test_an_unknown_or_released_graph_is_not_replayed(fakes: Fakes) -> None:
    fakes.registry.capture("g", "full", constant, {})
    with pytest.raises(UnknownGraphError, match=r"no live graph 'h'; live are \[g\]") as caught:
        fakes.registry.replay("h", {})
    assert (caught.value.key, caught.value.known) == ("h", ("g",))
    fakes.registry.release()
    with pytest.raises(UnknownGraphError):
        fakes.registry.replay("g", {})
