"""Residency and graphs: kept where addresses are kept, else released first and captured again."""

import pytest
import torch

from syncline.graph_lifecycle import (
    ReleaseError,
    ResidencyError,
    StaleGraphError,
    Tag,
    TagState,
    UnknownGraphError,
)
from syncline.graph_lifecycle.testing import FakeStore, Rig

ARENAS = ("poison", "poison_moving", "plain")
MOVING = ARENAS[1:]
UP_AND_DOWN, KV = 1024, 512


def reasons(error: pytest.ExceptionInfo[ResidencyError]) -> list[str]:
    return list(error.value.reasons)


def test_kept_addresses_keep_every_graph_and_no_capture_runs() -> None:
    rig = Rig("poison")
    rig.load()
    rig.capture("step", "weights", "kv")
    places = [(id(t), t.data_ptr(), t.shape) for t in rig.tensors]
    for _ in range(2):
        report = rig.residency.sleep()
        assert report.graphs_released == ()
        assert rig.registry.keys == ("step", "weights", "kv")
        for key in rig.registry.keys:
            inputs = rig.step.inputs(seed=1) if key == "step" else {}
            with pytest.raises(StaleGraphError, match="was released"):
                rig.registry.replay(key, inputs)
        woken = rig.residency.wake_up()
        assert woken.graphs_restored == woken.graphs_waiting == ()
        rig.load()
        rig.assert_replay_equals_eager()
    assert rig.num_recaptures == 0
    assert [(id(t), t.data_ptr(), t.shape) for t in rig.tensors] == places


def test_kept_addresses_without_a_recapture_sleep_all_the_same() -> None:
    rig = Rig("poison", recapture=False)
    rig.load()
    rig.capture("step")
    rig.residency.sleep()
    rig.residency.wake_up()
    rig.load()
    rig.assert_replay_equals_eager()


@pytest.mark.parametrize("kind", MOVING)
def test_moving_memory_releases_its_graphs_first_and_captures_them_again(kind: str) -> None:
    rig = Rig(kind)
    rig.load()
    rig.capture("step", "weights", "kv")
    pinned = rig.registry.num_bytes
    report = rig.residency.sleep()
    assert set(report.graphs_released) == {"step", "weights", "kv"}
    assert report.num_bytes[Tag.GRAPHS] == pinned
    assert rig.registry.keys == rig.store.keys == () and rig.registry.num_bytes == 0
    with pytest.raises(UnknownGraphError):
        rig.registry.replay("step", rig.step.inputs(seed=1))
    woken = rig.residency.wake_up()
    assert set(woken.graphs_restored) == {"step", "weights", "kv"}
    assert woken.graphs_waiting == () and woken.degraded is None
    assert rig.num_recaptures == 1
    rig.load(seed=7)
    rig.assert_replay_equals_eager()


@pytest.mark.parametrize("kind", MOVING)
def test_a_kv_only_sleep_releases_the_graphs_that_read_kv_and_no_others(kind: str) -> None:
    rig = Rig(kind)
    rig.load()
    rig.capture("step", "weights", "kv")
    report = rig.residency.sleep([Tag.KV_CACHE])
    assert set(report.graphs_released) == {"step", "kv"}
    assert rig.registry.keys == ("weights",)
    assert torch.equal(rig.registry.replay("weights", {})["out"], rig.step.up.sum(0))
    woken = rig.residency.wake_up([Tag.KV_CACHE])
    assert set(woken.graphs_restored) == {"step", "kv"}
    rig.residency.require("generate")
    rig.step.kv.zero_()
    rig.assert_replay_equals_eager()


@pytest.mark.parametrize("kind", MOVING)
def test_a_graph_comes_back_only_once_every_tag_it_reads_is_awake(kind: str) -> None:
    rig = Rig(kind)
    rig.load()
    rig.capture("step", "weights", "kv")
    rig.residency.sleep()
    woken = rig.residency.wake_up([Tag.WEIGHTS])
    assert woken.graphs_restored == ("weights",)
    assert set(woken.graphs_waiting) == {"step", "kv"}
    woken = rig.residency.wake_up([Tag.KV_CACHE])
    assert set(woken.graphs_restored) == {"step", "kv"}
    assert rig.residency.graphs_waiting == ()


@pytest.mark.parametrize("kind", MOVING)
def test_a_second_sleep_waits_with_what_the_first_released(kind: str) -> None:
    rig = Rig(kind)
    rig.load()
    rig.capture("step", "kv")
    rig.residency.sleep([Tag.KV_CACHE])
    rig.residency.sleep([Tag.WEIGHTS])
    woken = rig.residency.wake_up([Tag.KV_CACHE])
    assert woken.graphs_restored == ("kv",)
    assert woken.graphs_waiting == ("step",)
    rig.residency.sleep([Tag.KV_CACHE])
    assert rig.residency.wake_up().graphs_waiting == ()
    rig.load()
    rig.assert_replay_equals_eager()


@pytest.mark.parametrize("kind", MOVING)
def test_moving_memory_whose_graphs_nothing_could_capture_again_is_refused(kind: str) -> None:
    rig = Rig(kind, recapture=False)
    rig.load()
    rig.capture("step")
    with pytest.raises(ResidencyError, match=r"graphs \['step'\] would be released"):
        rig.residency.sleep()
    assert set(rig.residency.states.values()) == {TagState.AWAKE}
    assert rig.registry.keys == ("step",)
    rig.assert_replay_equals_eager()
    rig.registry.release()
    rig.residency.sleep()


@pytest.mark.parametrize("kind", ARENAS)
def test_graphs_sleep_by_themselves_and_come_back_on_their_own_order(kind: str) -> None:
    rig = Rig(kind)
    rig.load()
    rig.capture("step", "weights")
    pinned = rig.registry.num_bytes
    report = rig.residency.sleep([Tag.GRAPHS])
    assert report.num_bytes == {Tag.GRAPHS: pinned}
    assert report.content_lost == ()
    assert rig.registry.num_bytes == 0
    with pytest.raises(ResidencyError, match="generate refused: graphs is asleep"):
        rig.residency.require("generate")
    rig.residency.sleep()
    woken = rig.residency.wake_up([Tag.WEIGHTS, Tag.KV_CACHE])
    assert woken.graphs_restored == ()
    assert set(woken.graphs_waiting) == {"step", "weights"}
    rig.load()
    woken = rig.residency.wake_up([Tag.GRAPHS])
    assert set(woken.graphs_restored) == {"step", "weights"}
    rig.residency.require("generate")
    rig.assert_replay_equals_eager()


@pytest.mark.parametrize("kind", ARENAS)
def test_graphs_do_not_wake_before_the_memory_they_read(kind: str) -> None:
    rig = Rig(kind)
    rig.load()
    rig.capture("step")
    rig.residency.sleep([Tag.GRAPHS, Tag.WEIGHTS, Tag.KV_CACHE])
    with pytest.raises(ResidencyError) as caught:
        rig.residency.wake_up([Tag.GRAPHS, Tag.WEIGHTS])
    assert reasons(caught) == ["kv_cache is asleep, and graphs that sleep read it"]
    assert rig.residency.state(Tag.WEIGHTS) is TagState.ASLEEP
    woken = rig.residency.wake_up([Tag.GRAPHS, Tag.WEIGHTS, Tag.KV_CACHE])
    assert woken.graphs_restored == ("step",)


def test_graphs_asleep_without_any_graph_are_asleep_and_wake_alone() -> None:
    rig = Rig(recapture=False)
    report = rig.residency.sleep([Tag.GRAPHS, Tag.WEIGHTS])
    assert report.num_bytes == {Tag.GRAPHS: 0, Tag.WEIGHTS: UP_AND_DOWN}
    assert rig.residency.state(Tag.GRAPHS) is TagState.ASLEEP
    rig.residency.wake_up([Tag.GRAPHS])
    assert rig.residency.state(Tag.GRAPHS) is TagState.AWAKE


@pytest.mark.parametrize("kind", MOVING)
def test_a_failed_recapture_leaves_the_engine_awake_and_degraded_and_the_next_wake_retries(
    kind: str,
) -> None:
    rig = Rig(kind)
    rig.load()
    rig.capture("step", "weights")
    rig.fail_recapture = True
    rig.residency.sleep()
    for _ in range(2):
        woken = rig.residency.wake_up()
        assert woken.graphs_restored == ()
        assert set(woken.graphs_waiting) == {"step", "weights"}
        assert woken.degraded is not None
        assert set(woken.degraded.missing) == {"step", "weights"}
        assert "no memory left" in woken.degraded.reason
        assert woken.degraded == rig.registry.degraded
        assert rig.registry.keys == rig.store.keys == ()
        rig.load()
        rig.residency.require("generate")
        rig.step(rig.step.inputs(seed=1))
    rig.residency.sleep()
    rig.fail_recapture = False
    woken = rig.residency.wake_up()
    assert set(woken.graphs_restored) == {"step", "weights"}
    assert woken.degraded is None
    rig.load()
    rig.assert_replay_equals_eager()


def test_a_recapture_runs_the_step_on_weights_that_are_still_invalid() -> None:
    rig = Rig("poison_moving")
    rig.load()
    rig.capture("step")
    rig.residency.sleep()
    rig.residency.wake_up()
    assert rig.registry.replay("step", rig.step.inputs(seed=1))["out"].isnan().all()
    with pytest.raises(ResidencyError, match="weights are not valid"):
        rig.residency.require("generate")


def test_a_store_that_does_not_let_go_stops_the_sleep_and_its_graphs_are_not_lost() -> None:
    rig = Rig("poison_moving")
    fake = FakeStore(lambda key: (rig.step.kv,))
    rig.registry.add_store("draft", fake)
    rig.load()
    rig.registry.capture("drafter", "draft", lambda i: {}, {})
    fake.leaked_bytes = 5
    with pytest.raises(ReleaseError, match="draft: still pins 5 bytes"):
        rig.residency.sleep()
    assert rig.residency.state(Tag.KV_CACHE) is TagState.AWAKE
    assert rig.residency.graphs_waiting == ("drafter",)
    fake.leaked_bytes = 0
    assert rig.residency.sleep([Tag.KV_CACHE]).num_bytes == {Tag.KV_CACHE: KV}
