"""Which memory is awake, and what may be done in that state.

A state machine over the tags weights, kv_cache and graphs; static memory never sleeps. Orders
are idempotent; one that makes no sense is refused by name and changes nothing. Sleeping loses
content: weights are invalid until somebody says that new ones have arrived. It does not know
what weights or KV mean, runs nothing, and asks nobody to be quiet: whoever runs steps or writes
weights pins the tags in use.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from syncline.graph_lifecycle.arena.base import Arena
from syncline.graph_lifecycle.errors import (
    CaptureError,
    ReleaseError,
    ResidencyError,
    WakeError,
)
from syncline.graph_lifecycle.registry import GraphRegistry
from syncline.graph_lifecycle.types import (
    DegradedMode,
    GraphKey,
    GraphReceipt,
    Recapture,
    ReleaseReceipt,
    Tag,
    TagState,
)

Action = Literal["generate", "update_weights", "capture"]

_MEMORY = (Tag.WEIGHTS, Tag.KV_CACHE)
_SLEEPERS = (*_MEMORY, Tag.GRAPHS)
_NEEDS: Mapping[Action, tuple[Tag, ...]] = {
    "generate": _SLEEPERS,
    "update_weights": (Tag.WEIGHTS,),
    "capture": _SLEEPERS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepReport:
    """What one order put to sleep. `num_bytes` has the tags given back now, and only those.

    `content_lost` are the tags whose content is gone: for kv_cache whatever indexes it (a
    prefix cache) must forget it, weights must arrive anew.
    """

    num_bytes: Mapping[Tag, int]
    content_lost: tuple[Tag, ...]
    already_asleep: tuple[Tag, ...]
    graphs_released: tuple[GraphKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeReport:
    """What one order woke. `graphs_waiting` need a tag still asleep, or failed (`degraded`)."""

    num_bytes: Mapping[Tag, int]
    already_awake: tuple[Tag, ...]
    graphs_restored: tuple[GraphKey, ...]
    graphs_waiting: tuple[GraphKey, ...]
    degraded: DegradedMode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parked:
    """Released graphs that read the same tags."""

    receipt: GraphReceipt
    needs: frozenset[Tag]


class Residency:
    """Sleep and wake for one arena and one registry.

    `recapture` brings back graphs that had to be released. Without it an order that would
    release graphs is refused.
    """

    __slots__ = (
        "_arena",
        "_graphs_asleep",
        "_owed_bytes",
        "_parked",
        "_pins",
        "_recapture",
        "_receipts",
        "_registry",
        "_why_invalid",
    )

    def __init__(
        self, arena: Arena, registry: GraphRegistry, *, recapture: Recapture | None = None
    ) -> None:
        if arena.ledger is not registry.ledger:
            raise ValueError("arena.ledger must be the registry's ledger, or graphs go unprotected")
        self._arena = arena
        self._registry = registry
        self._recapture = recapture
        self._receipts: dict[Tag, ReleaseReceipt] = {}
        self._owed_bytes: dict[Tag, int] = {}  # What a wake must bring back, per sleeping tag.
        self._graphs_asleep = False
        self._parked: list[_Parked] = []
        self._pins: dict[str, frozenset[Tag]] = {}
        self._why_invalid: str | None = "they were never loaded"

    def state(self, tag: Tag) -> TagState:
        """Graphs are asleep only on an order of their own, not for want of other memory."""
        asleep = self._graphs_asleep if tag is Tag.GRAPHS else tag in self._receipts
        return TagState.ASLEEP if asleep else TagState.AWAKE

    @property
    def states(self) -> dict[Tag, TagState]:
        return {tag: self.state(tag) for tag in Tag}

    @property
    def weights_valid(self) -> bool:
        """False until loaded, and again from the moment the weights sleep or are half written."""
        return self._why_invalid is None

    @property
    def graphs_waiting(self) -> tuple[GraphKey, ...]:
        """Released graphs that a wake_up will capture again."""
        live = set(self._registry.keys)
        released = dict.fromkeys(key for parked in self._parked for key in parked.receipt.keys)
        return tuple(key for key in released if key not in live)

    def mark_weights_valid(self) -> None:
        """Every byte of the weights has arrived. Changes no tag's state."""
        if self.state(Tag.WEIGHTS) is TagState.ASLEEP:
            raise ResidencyError(action="mark_weights_valid", reasons=("weights are asleep",))
        self._why_invalid = None

    def mark_weights_invalid(self, reason: str) -> None:
        """The weights must not be used until `mark_weights_valid`; `reason` says why."""
        self._why_invalid = reason

    def pin(self, reason: str, tags: Iterable[Tag]) -> None:
        """Keep `tags` awake, which they must be, until `unpin(reason)`."""
        chosen = frozenset(_memory_tags(tags, "pin"))
        if reason in self._pins:
            raise ValueError(f"reason {reason!r} pins already")
        asleep = [f"{tag} is asleep" for tag in _SLEEPERS if tag in chosen and self._asleep(tag)]
        if asleep:
            raise ResidencyError(action=f"pin for {reason}", reasons=asleep)
        self._pins[reason] = chosen

    def unpin(self, reason: str) -> None:
        if reason not in self._pins:
            raise ValueError(f"reason {reason!r} pins nothing")
        del self._pins[reason]

    def require(self, action: Action) -> None:
        """Raise ResidencyError, naming every reason, unless `action` makes sense now."""
        if action not in _NEEDS:
            raise ValueError(f"action must be one of {sorted(_NEEDS)}, got {action!r}")
        reasons = [f"{tag} is asleep" for tag in _NEEDS[action] if self._asleep(tag)]
        if action == "generate" and self._why_invalid is not None:
            reasons.append(f"weights are not valid: {self._why_invalid}")
        if reasons:
            raise ResidencyError(action=action, reasons=reasons)

    def sleep(self, tags: Iterable[Tag] | None = None) -> SleepReport:
        """Give the memory of `tags` back (default: weights and kv_cache), content and all.

        If the arena does not keep addresses, graphs that read those tags are released first
        and wait for a wake_up. Refused: static memory, pinned tags, and releasing graphs that
        nothing could capture again. Tags asleep already are reported, and no fault.
        """
        wanted = _memory_tags(_MEMORY if tags is None else tags, "sleep")
        fresh = tuple(tag for tag in wanted if not self._asleep(tag))
        groups = self._graphs_to_release(fresh)
        self._require_may_sleep(fresh, groups)
        num_bytes: dict[Tag, int] = {}
        released: list[GraphKey] = []
        for needs, keys in groups.items():
            receipt = self._release_graphs(keys, needs)
            released += receipt.keys
            num_bytes[Tag.GRAPHS] = num_bytes.get(Tag.GRAPHS, 0) + receipt.num_bytes
        if Tag.GRAPHS in fresh:
            self._graphs_asleep = True
            num_bytes.setdefault(Tag.GRAPHS, 0)
        memory = tuple(tag for tag in _MEMORY if tag in fresh)
        for tag in memory:
            self._receipts[tag] = self._arena.release(tag)
            num_bytes[tag] = self._owed_bytes[tag] = self._receipts[tag].num_bytes
            if tag is Tag.WEIGHTS:
                self._why_invalid = "they slept and their content is lost"
        return SleepReport(
            num_bytes=num_bytes,
            content_lost=memory,
            already_asleep=tuple(tag for tag in wanted if tag not in fresh),
            graphs_released=tuple(released),
        )

    def wake_up(self, tags: Iterable[Tag] | None = None) -> WakeReport:
        """Bring the memory of `tags` back (default: everything) at its old size, or raise.

        Weights come before kv_cache; what woke before an error stays awake, the rest stays
        asleep, and the order may be repeated. Waiting graphs are captured again once every
        tag they read is awake. A failed capture is no failed wake: it is in the report's
        `degraded`, steps run eagerly, and the next wake_up tries again.
        """
        wanted = _memory_tags(_SLEEPERS if tags is None else tags, "wake_up")
        already = tuple(tag for tag in wanted if not self._asleep(tag))
        self._require_graphs_can_wake(wanted)
        num_bytes: dict[Tag, int] = {}
        for tag in _MEMORY:
            if tag in wanted and self._asleep(tag):
                num_bytes[tag] = self._wake_memory(tag)
        if Tag.GRAPHS in wanted:
            self._graphs_asleep = False
        restored = self._restore_graphs()
        return WakeReport(
            num_bytes=num_bytes,
            already_awake=already,
            graphs_restored=restored,
            graphs_waiting=self.graphs_waiting,
            degraded=self._registry.degraded,
        )

    def _asleep(self, tag: Tag) -> bool:
        return self.state(tag) is TagState.ASLEEP

    def _graphs_to_release(self, fresh: tuple[Tag, ...]) -> dict[frozenset[Tag], list[GraphKey]]:
        """The live graphs that cannot stay if `fresh` sleeps, grouped by the tags they read."""
        readers = {tag: self._readers(tag) for tag in _MEMORY}
        if Tag.GRAPHS in fresh:
            doomed = set(self._registry.keys)
        elif self._arena.keeps_addresses:
            doomed = set()
        else:
            doomed = {key for tag in fresh for key in readers[tag]}
        groups: dict[frozenset[Tag], list[GraphKey]] = {}
        for key in self._registry.keys:
            if key in doomed:
                needs = frozenset(tag for tag in _MEMORY if key in readers[tag])
                groups.setdefault(needs, []).append(key)
        return groups

    def _readers(self, tag: Tag) -> set[GraphKey]:
        ledger = self._registry.ledger
        tensors = (self._arena.tensor(name) for name in self._arena.names(tag))
        return {key for tensor in tensors for key in ledger.readers(tensor)}

    def _require_may_sleep(
        self, fresh: tuple[Tag, ...], groups: Mapping[frozenset[Tag], list[GraphKey]]
    ) -> None:
        going = {*fresh, Tag.GRAPHS} if groups else set(fresh)
        reasons = [
            f"{tag} is in use: {reason}"
            for reason, tags in self._pins.items()
            for tag in _SLEEPERS
            if tag in tags & going
        ]
        if groups and self._recapture is None:
            keys = [key for group in groups.values() for key in group]
            reasons.append(f"graphs {keys} would be released and nothing can capture them again")
        if reasons:
            raise ResidencyError(action="sleep", reasons=reasons)

    def _release_graphs(self, keys: list[GraphKey], needs: frozenset[Tag]) -> GraphReceipt:
        try:
            receipt = self._registry.release(keys=keys)
        except ReleaseError as error:
            self._parked.append(_Parked(receipt=error.receipt, needs=needs))
            raise
        self._parked.append(_Parked(receipt=receipt, needs=needs))
        return receipt

    def _require_graphs_can_wake(self, wanted: tuple[Tag, ...]) -> None:
        if Tag.GRAPHS not in wanted or not self._graphs_asleep:
            return
        needed = {tag for parked in self._parked for tag in parked.needs}
        reasons = [
            f"{tag} is asleep, and graphs that sleep read it"
            for tag in _MEMORY
            if tag in needed and tag not in wanted and self._asleep(tag)
        ]
        if reasons:
            raise ResidencyError(action="wake_up graphs", reasons=reasons)

    def _wake_memory(self, tag: Tag) -> int:
        expected = self._owed_bytes[tag]
        report = self._arena.restore(self._receipts[tag])
        got = min(report.num_bytes, self._arena.resident_bytes(tag))
        if got != expected:
            # Back to sleep, so that state and memory agree; what is owed stays the old size.
            self._receipts[tag] = self._arena.release(tag)
            raise WakeError(tag=tag, expected_bytes=expected, got_bytes=got)
        del self._receipts[tag]
        return got

    def _restore_graphs(self) -> tuple[GraphKey, ...]:
        if self._graphs_asleep:
            return ()
        ready = [p for p in self._parked if not any(self._asleep(tag) for tag in p.needs)]
        if not ready:
            return ()
        assert self._recapture is not None  # sleep refuses to park graphs without it
        try:
            reports = self._registry.restore_all([p.receipt for p in ready], self._recapture)
        except CaptureError:
            return ()  # The registry is in degraded mode now, which the report shows.
        self._parked = [p for p in self._parked if p not in ready]
        return tuple(report.key for report in reports)


def _memory_tags(tags: Iterable[Tag], action: str) -> tuple[Tag, ...]:
    """`tags` once each, in the order weights, kv_cache, graphs; static memory is refused."""
    if isinstance(tags, str):
        raise ValueError(f"tags must be several Tags, got one string {str(tags)!r}")
    chosen = set()
    for tag in tags:
        try:
            chosen.add(Tag(tag))
        except ValueError:
            raise ValueError(f"tags must be among {[str(t) for t in Tag]}, got {tag!r}") from None
    if Tag.STATIC in chosen:
        raise ResidencyError(action=action, reasons=("static memory never sleeps",))
    return tuple(tag for tag in _SLEEPERS if tag in chosen)
