"""Residency: what may sleep, wake and run when, and what happens to graphs meanwhile."""

import pytest
import torch

from syncline.graph_lifecycle import (
    GraphRegistry,
    PoisonArena,
    Residency,
    ResidencyError,
    StorageLedger,
    Tag,
    TagState,
    WakeError,
)
from syncline.graph_lifecycle.testing import Rig

ARENAS = ("poison", "poison_moving", "plain")
UP_AND_DOWN, KV, GRAPH = 1024, 512, 2 * 3 * 8 * 4 + 3 * 8


@pytest.fixture(params=ARENAS)
def rig(request: pytest.FixtureRequest) -> Rig:
    rig = Rig(request.param)
    rig.load()
    return rig


def reasons(error: pytest.ExceptionInfo[ResidencyError]) -> list[str]:
    return list(error.value.reasons)


def test_all_is_awake_at_first_but_nothing_may_be_generated_before_the_weights_came() -> None:
    rig = Rig()
    assert set(rig.residency.states.values()) == {TagState.AWAKE}
    assert not rig.residency.weights_valid
    with pytest.raises(ResidencyError) as caught:
        rig.residency.require("generate")
    assert caught.value.action == "generate"
    assert reasons(caught) == ["weights are not valid: they were never loaded"]
    rig.load()
    rig.residency.require("generate")


def test_a_sleep_says_what_it_gave_back_per_tag_and_which_content_is_lost(rig: Rig) -> None:
    report = rig.residency.sleep()
    assert report.num_bytes == {Tag.WEIGHTS: UP_AND_DOWN, Tag.KV_CACHE: KV}
    assert report.content_lost == (Tag.WEIGHTS, Tag.KV_CACHE)
    assert report.already_asleep == () and report.graphs_released == ()
    assert rig.arena.resident_bytes(Tag.WEIGHTS) == rig.arena.resident_bytes(Tag.KV_CACHE) == 0
    assert rig.residency.state(Tag.GRAPHS) is TagState.AWAKE


def test_sleeping_and_waking_twice_is_no_fault_and_changes_nothing(rig: Rig) -> None:
    rig.residency.sleep([Tag.KV_CACHE])
    again = rig.residency.sleep([Tag.KV_CACHE, Tag.KV_CACHE])
    assert (again.num_bytes, again.content_lost) == ({}, ())
    assert again.already_asleep == (Tag.KV_CACHE,)
    both = rig.residency.sleep()
    assert both.num_bytes == {Tag.WEIGHTS: UP_AND_DOWN}
    first = rig.residency.wake_up()
    assert first.num_bytes == {Tag.WEIGHTS: UP_AND_DOWN, Tag.KV_CACHE: KV}
    assert first.already_awake == (Tag.GRAPHS,)
    second = rig.residency.wake_up()
    assert second.num_bytes == {}
    assert second.already_awake == (Tag.WEIGHTS, Tag.KV_CACHE, Tag.GRAPHS)


def test_generating_asleep_is_refused_with_every_reason_by_name(rig: Rig) -> None:
    rig.residency.sleep([Tag.GRAPHS, Tag.WEIGHTS, Tag.KV_CACHE])
    with pytest.raises(ResidencyError) as caught:
        rig.residency.require("generate")
    assert reasons(caught) == [
        "weights is asleep",
        "kv_cache is asleep",
        "graphs is asleep",
        "weights are not valid: they slept and their content is lost",
    ]
    rig.residency.wake_up([Tag.WEIGHTS])
    rig.load()
    with pytest.raises(ResidencyError) as caught:
        rig.residency.require("generate")
    assert reasons(caught) == ["kv_cache is asleep", "graphs is asleep"]


def test_an_update_needs_the_weights_alone_and_does_not_wake_the_kv_cache(rig: Rig) -> None:
    rig.residency.sleep()
    with pytest.raises(ResidencyError, match="update_weights refused: weights is asleep"):
        rig.residency.require("update_weights")
    with pytest.raises(ResidencyError, match="mark_weights_valid refused: weights are asleep"):
        rig.residency.mark_weights_valid()
    rig.residency.wake_up([Tag.WEIGHTS])
    rig.residency.require("update_weights")
    rig.step.up.fill_(1)
    rig.residency.mark_weights_valid()
    assert rig.residency.state(Tag.KV_CACHE) is TagState.ASLEEP
    with pytest.raises(ResidencyError, match="generate refused: kv_cache is asleep"):
        rig.residency.require("generate")
    rig.residency.wake_up([Tag.KV_CACHE])
    rig.residency.require("generate")


def test_waking_without_new_weights_does_not_let_anything_be_generated(rig: Rig) -> None:
    rig.residency.sleep()
    rig.residency.wake_up()
    assert not rig.residency.weights_valid
    with pytest.raises(ResidencyError, match="they slept and their content is lost"):
        rig.residency.require("generate")


def test_a_kv_sleep_keeps_the_weights_and_their_validity(rig: Rig) -> None:
    before = rig.step.up.clone()
    report = rig.residency.sleep([Tag.KV_CACHE])
    assert report.content_lost == (Tag.KV_CACHE,)
    assert rig.residency.weights_valid
    rig.residency.wake_up()
    assert torch.equal(rig.step.up, before)
    rig.residency.require("generate")


def test_half_written_weights_are_invalid_for_the_reason_given(rig: Rig) -> None:
    rig.residency.mark_weights_invalid("an update to version 3 was aborted")
    with pytest.raises(ResidencyError, match="an update to version 3 was aborted"):
        rig.residency.require("generate")
    rig.residency.require("update_weights")
    rig.residency.mark_weights_valid()
    rig.residency.mark_weights_valid()
    rig.residency.require("generate")


def test_static_memory_neither_sleeps_nor_wakes_nor_changes(rig: Rig) -> None:
    for order in (rig.residency.sleep, rig.residency.wake_up):
        with pytest.raises(ResidencyError, match="static memory never sleeps"):
            order([Tag.WEIGHTS, Tag.STATIC])
    assert rig.residency.state(Tag.WEIGHTS) is TagState.AWAKE
    table = rig.arena.allocate("drafter_rope", (4, 2), torch.float32, tag=Tag.STATIC)
    table.copy_(torch.rand(4, 2))
    kept = [(t, t.clone(), t.data_ptr()) for t in (table, rig.step.scale)]
    rig.residency.sleep()
    rig.residency.wake_up()
    for tensor, before, address in kept:
        assert torch.equal(tensor, before) and tensor.data_ptr() == address


def test_a_whole_cycle_equals_a_fresh_engine_with_the_same_weights(rig: Rig) -> None:
    rig.capture("step")
    for seed in (3, 4):
        rig.residency.sleep()
        rig.residency.wake_up()
        rig.load(seed)
        rig.residency.require("generate")
        fresh = Rig()
        fresh.load(seed)
        inputs = rig.step.inputs(seed=5)
        assert torch.equal(rig.registry.replay("step", inputs)["out"], fresh.step(inputs)["out"])
        rig.assert_replay_equals_eager()


def test_bad_tags_and_actions_are_refused_by_value(rig: Rig) -> None:
    with pytest.raises(ValueError, match="got 'activations'"):
        rig.residency.sleep([Tag.WEIGHTS, "activations"])  # type: ignore[list-item]  # on purpose
    with pytest.raises(ValueError, match="one string 'weights'"):
        rig.residency.wake_up(Tag.WEIGHTS)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match=r"action must be one of .* got 'dream'"):
        rig.residency.require("dream")  # type: ignore[arg-type]  # on purpose
    assert set(rig.residency.states.values()) == {TagState.AWAKE}


def test_an_arena_that_does_not_ask_the_registrys_ledger_is_refused() -> None:
    registry = GraphRegistry(StorageLedger())
    for arena in (PoisonArena(), PoisonArena(ledger=StorageLedger())):
        with pytest.raises(ValueError, match="must be the registry's ledger"):
            Residency(arena, registry)


# Pins: memory in use.


def test_memory_in_use_does_not_sleep_and_every_user_is_named(rig: Rig) -> None:
    rig.residency.pin("step 7 in flight", [Tag.WEIGHTS, Tag.KV_CACHE])
    rig.residency.pin("update to version 3", [Tag.WEIGHTS])
    with pytest.raises(ResidencyError) as caught:
        rig.residency.sleep()
    assert reasons(caught) == [
        "weights is in use: step 7 in flight",
        "kv_cache is in use: step 7 in flight",
        "weights is in use: update to version 3",
    ]
    assert set(rig.residency.states.values()) == {TagState.AWAKE}
    rig.residency.unpin("step 7 in flight")
    rig.residency.sleep([Tag.KV_CACHE])
    with pytest.raises(ResidencyError, match="update to version 3"):
        rig.residency.sleep([Tag.WEIGHTS])
    rig.residency.unpin("update to version 3")
    rig.residency.sleep([Tag.WEIGHTS])


def test_pinned_graphs_keep_the_memory_that_would_release_them() -> None:
    rig = Rig("poison_moving")
    rig.load()
    rig.capture("kv")
    rig.residency.pin("replay", [Tag.GRAPHS])
    with pytest.raises(ResidencyError, match="graphs is in use: replay"):
        rig.residency.sleep([Tag.KV_CACHE])
    rig.residency.sleep([Tag.WEIGHTS])


def test_what_sleeps_is_not_pinned_and_pins_have_names_of_their_own(rig: Rig) -> None:
    rig.residency.sleep([Tag.WEIGHTS])
    with pytest.raises(ResidencyError, match="pin for update refused: weights is asleep"):
        rig.residency.pin("update", [Tag.WEIGHTS, Tag.KV_CACHE])
    rig.residency.pin("read", [Tag.KV_CACHE])
    with pytest.raises(ValueError, match="'read' pins already"):
        rig.residency.pin("read", [Tag.KV_CACHE])
    with pytest.raises(ValueError, match="'update' pins nothing"):
        rig.residency.unpin("update")
    rig.residency.sleep([Tag.WEIGHTS])  # Asleep already: nothing of it is in use.


# Waking when memory is short.


def test_the_kv_pool_comes_back_at_its_size_or_the_wake_says_so(rig: Rig) -> None:
    rig.capture("step")
    rig.residency.sleep([Tag.KV_CACHE])
    for missing in (256, 1):
        rig.arena.shortfalls.append(missing)
        with pytest.raises(WakeError) as caught:
            rig.residency.wake_up()
        error = caught.value
        assert (error.tag, error.expected_bytes) == (Tag.KV_CACHE, KV)
        assert error.got_bytes == KV - missing
        assert rig.residency.state(Tag.KV_CACHE) is TagState.ASLEEP
        assert rig.arena.resident_bytes(Tag.KV_CACHE) == 0
    assert rig.residency.wake_up().num_bytes == {Tag.KV_CACHE: KV}
    assert rig.arena.resident_bytes(Tag.KV_CACHE) == KV
    assert rig.step.kv.shape == (16, 8)
    rig.step.kv.zero_()
    rig.assert_replay_equals_eager()


def test_a_wake_that_runs_out_of_memory_keeps_what_woke_and_may_be_repeated(rig: Rig) -> None:
    rig.residency.sleep()
    rig.arena.errors.append(torch.OutOfMemoryError("the card is full"))
    with pytest.raises(torch.OutOfMemoryError):
        rig.residency.wake_up()
    assert rig.residency.state(Tag.WEIGHTS) is TagState.ASLEEP
    rig.residency.wake_up([Tag.WEIGHTS])
    rig.arena.errors.append(torch.OutOfMemoryError("the card is full"))
    with pytest.raises(torch.OutOfMemoryError):
        rig.residency.wake_up()
    assert rig.residency.state(Tag.WEIGHTS) is TagState.AWAKE
    assert rig.residency.state(Tag.KV_CACHE) is TagState.ASLEEP
    rig.residency.wake_up()
    rig.load()
    rig.residency.require("generate")


def test_a_write_into_sleeping_weights_is_found_when_they_wake() -> None:
    rig = Rig()
    rig.load()
    rig.residency.sleep()
    rig.step.load(seed=1)
    with pytest.raises(Exception, match=r"weights was asleep while somebody wrote into \[up, down"):
        rig.residency.wake_up()
    assert rig.residency.state(Tag.WEIGHTS) is TagState.ASLEEP


def test_sizes_are_equal_over_many_cycles(rig: Rig) -> None:
    rig.capture("step")
    for cycle in range(20):
        report = rig.residency.sleep([Tag.KV_CACHE] if cycle % 3 else None)
        woken = rig.residency.wake_up()
        for tag, num_bytes in woken.num_bytes.items():
            assert report.num_bytes[tag] == num_bytes
        assert rig.arena.resident_bytes(Tag.KV_CACHE) == KV
        assert rig.arena.resident_bytes(Tag.WEIGHTS) == UP_AND_DOWN
        assert rig.registry.num_bytes == GRAPH
        rig.load(cycle)
    rig.assert_replay_equals_eager()
