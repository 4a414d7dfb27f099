"""One frozen snapshot of a scheduler's counters and gauges, and their names for an exporter.

Knows no exporter: `to_dict` is plain numbers and texts. Made when asked for; nothing is counted for
it on the way.
"""

from dataclasses import dataclass, fields
from typing import Final

from syncline.kv_cache import KVCacheStats
from syncline.scheduler_core.types import IdleCause, SchedulerStats

_KV_GAUGES: Final = frozenset({"num_blocks", "num_free_blocks", "num_cached_blocks"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerMetrics:
    """Counters since construction (`stats`, part of `kv`); the rest says how things stand now.

    num_running     sequences that hold a state row
    num_waiting     unfinished sequences without a state row, parked ones included
    num_parked      of those, the ones that no plan considers before an event has come
    num_transfers   loads and handoffs that own blocks until they are reported
    kv              blocks: a cached one counts as free too unless somebody holds it
    idle_cause      why the latest `plan` returned None; None if it returned a plan
    waiting_cause   why the latest plan left sequences waiting; None if it left none
    """

    stats: SchedulerStats
    kv: KVCacheStats
    num_running: int
    num_waiting: int
    num_parked: int
    num_transfers: int
    num_steps_in_flight: int
    kv_epoch: int
    weight_version: int
    is_paused: bool
    idle_cause: IdleCause | None
    waiting_cause: IdleCause | None

    @property
    def num_held_blocks(self) -> int:
        return self.kv.num_blocks - self.kv.num_free_blocks

    def to_dict(self) -> dict[str, int | str]:
        """Name -> value, in the naming style of Prometheus.

        A name that ends in `_total` is a counter and only grows. Texts are the two causes, "" for
        none. All others are gauges; a truth is 0 or 1. Every field of `SchedulerStats` is
        `scheduler_<field without num_>_total`, every field of `KVCacheStats` likewise with `kv_`,
        without `_total` where it is a gauge.
        """
        return {
            **{
                f"scheduler_{_bare(field.name)}_total": _int(self.stats, field.name)
                for field in fields(self.stats)
            },
            **{
                f"kv_{_bare(field.name)}{'' if field.name in _KV_GAUGES else '_total'}": _int(
                    self.kv, field.name
                )
                for field in fields(self.kv)
            },
            "kv_held_blocks": self.num_held_blocks,
            "kv_epoch": self.kv_epoch,
            "scheduler_running_sequences": self.num_running,
            "scheduler_waiting_sequences": self.num_waiting,
            "scheduler_parked_sequences": self.num_parked,
            "scheduler_transfers": self.num_transfers,
            "scheduler_steps_in_flight": self.num_steps_in_flight,
            "scheduler_weight_version": self.weight_version,
            "scheduler_paused": int(self.is_paused),
            "scheduler_idle_cause": "" if self.idle_cause is None else self.idle_cause.value,
            "scheduler_waiting_cause": (
                "" if self.waiting_cause is None else self.waiting_cause.value
            ),
        }


def _bare(name: str) -> str:
    return name.removeprefix("num_")


def _int(stats: SchedulerStats | KVCacheStats, name: str) -> int:
    value = object.__getattribute__(stats, name)
    assert isinstance(value, int)  # Every counter and gauge of both is one.
    return value
