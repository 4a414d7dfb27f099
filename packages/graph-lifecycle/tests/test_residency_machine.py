"""Residency against a model of plain sets: who sleeps, which graphs live, which wait.

Every order is given in every state. The model says what must happen, or that the order must be
refused and change nothing; idempotence, sizes and identities are invariants.
"""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from syncline.graph_lifecycle import (
    Arena,
    CaptureRequest,
    GraphKey,
    GraphRegistry,
    PlainArena,
    PoisonArena,
    RecordedStore,
    Residency,
    ResidencyError,
    StorageLedger,
    Tag,
    TagState,
    WakeError,
)
from syncline.graph_lifecycle.testing import FlakyArena, InjectedFailure

MEMORY = (Tag.WEIGHTS, Tag.KV_CACHE)
SLEEPERS = (*MEMORY, Tag.GRAPHS)
SIZES = {Tag.WEIGHTS: 512, Tag.KV_CACHE: 1024, Tag.STATIC: 256}
READS: dict[str, tuple[Tag, ...]] = {
    "step": (Tag.WEIGHTS, Tag.KV_CACHE, Tag.STATIC),
    "draft": (Tag.KV_CACHE,),
    "head": (Tag.WEIGHTS, Tag.STATIC),
}
GRAPH_BYTES = 4
tag_sets = st.none() | st.sets(st.sampled_from(SLEEPERS))
keys = st.sampled_from(sorted(READS))
pin_names = st.sampled_from(["step", "update"])


class ResidencyMachine(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["poison", "moving", "plain"]), recapture=st.booleans())
    def create(self, kind: str, recapture: bool) -> None:
        ledger = StorageLedger()
        inner: Arena = (
            PlainArena(ledger=ledger)
            if kind == "plain"
            else PoisonArena(kind == "moving", ledger=ledger)
        )
        self.moves = kind != "poison"
        self.arena = FlakyArena(inner)
        self.tensors = {
            tag: self.arena.allocate(tag, (size // 4,), torch.float32, tag=tag)
            for tag, size in SIZES.items()
        }
        self.tensors[Tag.STATIC].fill_(7)
        self.registry, self.store = GraphRegistry(ledger), RecordedStore()
        self.registry.add_store("s", self.store)
        self.can_recapture = recapture
        self.residency = Residency(
            self.arena, self.registry, recapture=self.recapture if recapture else None
        )
        self.fails = False
        self.asleep: set[Tag] = set()
        self.valid = False
        self.live: set[str] = set()
        self.parked: set[str] = set()
        self.missing: set[str] = set()
        self.pins: dict[str, set[Tag]] = {}

    def request(self, key: str) -> CaptureRequest:
        def total() -> torch.Tensor:
            return sum((self.tensors[tag].sum() for tag in READS[key]), torch.zeros(()))

        return CaptureRequest(key=key, store="s", fn=lambda _: {"y": total()}, inputs={})

    def recapture(self, asked: tuple[GraphKey, ...]) -> Iterable[CaptureRequest]:
        for key in asked:
            asleep = [t for t in READS[str(key)] if self.residency.state(t) is TagState.ASLEEP]
            assert not asleep  # Seen as a failed capture, so as a wrong report, if it fails.
        if self.fails:
            raise InjectedFailure("no memory left")
        return [self.request(str(key)) for key in asked]

    def needs(self, key: str) -> set[Tag]:
        return set(READS[key]) - {Tag.STATIC}

    # Orders.

    @rule(tags=tag_sets)
    def sleep(self, tags: set[Tag] | None) -> None:
        wanted = set(MEMORY) if tags is None else tags
        fresh = wanted - self.asleep
        doomed = {
            key
            for key in self.live
            if Tag.GRAPHS in fresh or (self.moves and self.needs(key) & fresh)
        }
        going = fresh | ({Tag.GRAPHS} if doomed else set())
        in_use = {(tag, why) for why, pinned in self.pins.items() for tag in pinned & going}
        if in_use or (doomed and not self.can_recapture):
            with pytest.raises(ResidencyError) as caught:
                self.residency.sleep(tags)
            for tag, why in in_use:
                assert f"{tag} is in use: {why}" in caught.value.reasons
            assert len(caught.value.reasons) == len(in_use) + (
                1 if doomed and not self.can_recapture else 0
            )
            return
        report = self.residency.sleep(tags)
        expected = {tag: SIZES[tag] for tag in MEMORY if tag in fresh}
        if Tag.GRAPHS in going:
            expected[Tag.GRAPHS] = GRAPH_BYTES * len(doomed)
        assert report.num_bytes == expected
        assert set(report.content_lost) == fresh - {Tag.GRAPHS}
        assert set(report.already_asleep) == wanted & self.asleep
        assert set(report.graphs_released) == doomed
        self.asleep |= fresh
        self.live -= doomed
        self.parked |= doomed
        if Tag.WEIGHTS in fresh:
            self.valid = False

    @rule(tags=tag_sets, short=st.none() | st.just(256))
    def wake_up(self, tags: set[Tag] | None, short: int | None) -> None:
        wanted = set(SLEEPERS) if tags is None else tags
        waking = wanted & self.asleep
        needed = {tag for key in self.parked for tag in self.needs(key)}
        if Tag.GRAPHS in waking and (needed & self.asleep) - wanted:
            with pytest.raises(ResidencyError) as caught:
                self.residency.wake_up(tags)
            assert len(caught.value.reasons) == len((needed & self.asleep) - wanted)
            return
        memory = [tag for tag in MEMORY if tag in waking]
        if short is not None and memory:
            self.arena.shortfalls.append(short)
            with pytest.raises(WakeError) as wake:
                self.residency.wake_up(tags)
            assert wake.value.tag is memory[0]
            assert wake.value.expected_bytes == SIZES[memory[0]]
            assert wake.value.got_bytes == SIZES[memory[0]] - short
            return
        report = self.residency.wake_up(tags)
        assert report.num_bytes == {tag: SIZES[tag] for tag in memory}
        assert set(report.already_awake) == wanted - self.asleep
        self.asleep -= waking
        ready = {key for key in self.parked if not self.needs(key) & self.asleep}
        if Tag.GRAPHS in self.asleep:
            ready = set()
        if self.fails and ready - self.live:
            self.missing |= ready - self.live
            ready = set()
        self.parked -= ready
        assert set(report.graphs_restored) == ready - self.live
        self.missing -= ready
        self.live |= ready
        assert set(report.graphs_waiting) == self.parked - self.live
        assert set(report.degraded.missing if report.degraded else ()) == self.missing

    @rule()
    def orders_about_static_memory_are_refused(self) -> None:
        for order in (self.residency.sleep, self.residency.wake_up):
            with pytest.raises(ResidencyError):
                order([Tag.STATIC, Tag.WEIGHTS])

    @rule()
    def weights_arrive(self) -> None:
        if Tag.WEIGHTS in self.asleep:
            for refused in (
                self.residency.mark_weights_valid,
                lambda: self.residency.require("update_weights"),
            ):
                with pytest.raises(ResidencyError):
                    refused()
            return
        self.residency.require("update_weights")
        self.tensors[Tag.WEIGHTS].fill_(1)
        self.residency.mark_weights_valid()
        self.valid = True

    @rule()
    def an_update_breaks_off(self) -> None:
        self.residency.mark_weights_invalid("an update broke off")
        self.valid = False

    @rule()
    def the_model_says_whether_to_generate(self) -> None:
        expected = {f"{tag} is asleep" for tag in self.asleep}
        if not expected and self.valid:
            self.residency.require("generate")
            return
        with pytest.raises(ResidencyError) as caught:
            self.residency.require("generate")
        reasons = set(caught.value.reasons)
        assert {r for r in reasons if r.endswith("is asleep")} == expected
        assert any("not valid" in r for r in reasons) == (not self.valid)

    @rule(why=pin_names, tags=st.sets(st.sampled_from(SLEEPERS)))
    def pin(self, why: str, tags: set[Tag]) -> None:
        if why in self.pins:
            with pytest.raises(ValueError):
                self.residency.pin(why, tags)
        elif tags & self.asleep:
            with pytest.raises(ResidencyError):
                self.residency.pin(why, tags)
        else:
            self.residency.pin(why, tags)
            self.pins[why] = tags

    @rule(why=pin_names)
    def unpin(self, why: str) -> None:
        if why not in self.pins:
            with pytest.raises(ValueError):
                self.residency.unpin(why)
        else:
            self.residency.unpin(why)
            del self.pins[why]

    @rule(key=keys)
    def capture(self, key: str) -> None:
        if self.asleep:
            with pytest.raises(ResidencyError):
                self.residency.require("capture")
        elif key not in self.live:
            self.residency.require("capture")
            self.registry.capture_all([self.request(key)])
            self.live.add(key)
            self.missing.discard(key)

    @rule(fails=st.booleans())
    def captures_fail_from_now_on(self, fails: bool) -> None:
        self.fails = fails

    # What always holds.

    @invariant()
    def states_are_the_models(self) -> None:
        for tag in Tag:
            expected = TagState.ASLEEP if tag in self.asleep else TagState.AWAKE
            assert self.residency.state(tag) is expected
            assert self.residency.states[tag] is expected
        assert self.residency.weights_valid == self.valid

    @invariant()
    def memory_is_all_there_or_all_gone_and_never_another_object(self) -> None:
        for tag, tensor in self.tensors.items():
            resident = 0 if tag in self.asleep else SIZES[tag]
            assert self.arena.resident_bytes(tag) == resident
            assert self.arena.tensor(tag) is tensor
            assert tensor.shape == (SIZES[tag] // 4,)
            if tag in self.asleep:
                assert tensor.isnan().all()
        assert self.tensors[Tag.STATIC].eq(7).all()

    @invariant()
    def graphs_are_the_models_and_none_reads_what_sleeps_unnoticed(self) -> None:
        self.registry.check_integrity()
        assert set(self.registry.keys) == self.live
        assert set(self.residency.graphs_waiting) == self.parked - self.live
        assert self.store.num_bytes == GRAPH_BYTES * len(self.live)
        stale = {key for key in self.live if self.needs(key) & self.asleep}
        assert set(self.registry.audit()) == stale
        assert not (stale and self.moves)
        for key in self.live - stale:
            total = sum(self.tensors[tag].sum() for tag in READS[key])
            replayed = self.registry.replay(key, {})["y"]
            assert torch.equal(replayed.isnan(), torch.as_tensor(total).isnan())
            assert replayed.isnan() or replayed == total


TestResidency = ResidencyMachine.TestCase
