"""The snapshot of counters and gauges agrees with what happened, and its names are the agreed."""

import dataclasses
import re

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import IdleCause, Scheduler, SchedulerStats
from syncline.scheduler_core.testing import make_config, make_request, make_result, step

GAUGES = {
    "kv_blocks",
    "kv_free_blocks",
    "kv_cached_blocks",
    "kv_held_blocks",
    "kv_epoch",
    "scheduler_running_sequences",
    "scheduler_waiting_sequences",
    "scheduler_parked_sequences",
    "scheduler_steps_in_flight",
    "scheduler_transfers",
    "scheduler_weight_version",
    "scheduler_paused",
    "scheduler_idle_cause",
    "scheduler_waiting_cause",
}


def test_the_gauges_say_how_things_stand() -> None:
    kv = KVCacheManager(16, 4)
    scheduler = Scheduler(make_config(max_num_seqs=2), kv, weight_version=3)
    for name in "abc":
        scheduler.add(make_request(name, 6, 9))
    scheduler.bump_kv_epoch()
    step(scheduler)
    assert scheduler.plan() is not None
    assert scheduler.plan() is None
    metrics = scheduler.metrics()
    assert (metrics.num_running, metrics.num_waiting, metrics.num_parked) == (2, 1, 0)
    assert metrics.num_steps_in_flight == 1 and not metrics.is_paused
    assert (metrics.kv_epoch, metrics.weight_version) == (1, 3)
    assert (metrics.kv.num_blocks, metrics.num_held_blocks) == (16, 4)
    assert metrics.kv.num_free_blocks == 12 and metrics.kv.num_cached_blocks == 2
    assert metrics.idle_cause is IdleCause.WAITING_FOR_RESULTS
    assert metrics.waiting_cause is IdleCause.MAX_NUM_SEQS
    assert metrics.stats == scheduler.stats


def test_a_snapshot_does_not_move_with_the_scheduler() -> None:
    scheduler = Scheduler(make_config(), KVCacheManager(16, 4))
    scheduler.add(make_request())
    before = scheduler.metrics()
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(make_result(plan))
    scheduler.pause("keep")
    assert before.num_running == 0 and before.stats == SchedulerStats()
    after = scheduler.metrics()
    assert after.num_running == 1 and after.is_paused and after.stats.num_plans == 1


def test_the_exported_names_are_counters_by_field_and_the_agreed_gauges() -> None:
    scheduler = Scheduler(make_config(), KVCacheManager(16, 4))
    scheduler.add(make_request())
    scheduler.add(make_request("b"))
    scheduler.pause("wait")
    scheduler.resume()
    step(scheduler)
    assert scheduler.preempt_one() is not None
    metrics = scheduler.metrics()
    exported = metrics.to_dict()
    counters = {name for name in exported if name.endswith("_total")}
    assert exported.keys() - counters == GAUGES
    for field in dataclasses.fields(SchedulerStats):
        name = f"scheduler_{field.name.removeprefix('num_')}_total"
        assert exported[name] == object.__getattribute__(metrics.stats, field.name)
        counters.remove(name)
    assert counters == {"kv_evicted_blocks_total", "kv_published_blocks_total"}
    assert exported["scheduler_preemptions_total"] == 1
    assert exported["kv_published_blocks_total"] == metrics.kv.num_published_blocks == 2
    assert exported["kv_held_blocks"] == 2 and exported["kv_blocks"] == 16
    assert exported["scheduler_idle_cause"] == "" and exported["scheduler_paused"] == 0
    for name, value in exported.items():
        assert re.fullmatch(r"[a-z][a-z_]*", name)
        assert type(value) in (int, str)
    scheduler.pause("keep")
    assert scheduler.plan() is None
    exported = scheduler.metrics().to_dict()
    assert (exported["scheduler_paused"], exported["scheduler_idle_cause"]) == (1, "paused")
