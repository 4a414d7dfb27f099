"""KV on its way in or out: loads that sequences wait for, stores, and blocks lent to a remote.

    waiting -> parked (loading) -> waiting with its blocks (loaded) -> running

What is loaded comes from a slower tier, or from the engine that computed the prompt (a remote): KV
of the whole prompt then, and the first token is there already.

A sequence that loads holds blocks for all of its tokens and no row: it is no victim, and whoever
lacks those blocks waits for the load to end, or is preempted as usual. It holds up nobody: at most
`max_loading` sequences load or have loaded, and any other is planned past them.

The blocks of a load stay owned until it has been reported, even if the sequence ends before (a
lease); content that comes after the KV epoch has risen counts as failed.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from syncline.kv_cache import KVCacheManager, Lease, StableKey
from syncline.scheduler_core.connectors.protocols import OffloadConnector
from syncline.scheduler_core.connectors.values import KVLoad, KVStore, TransferId
from syncline.scheduler_core.errors import TransferError, TransfersInFlightError
from syncline.scheduler_core.handoffs import Handoffs
from syncline.scheduler_core.offloading import Offloader, require_within
from syncline.scheduler_core.parking import ParkingLot
from syncline.scheduler_core.sequence import Sequence, order_of
from syncline.scheduler_core.types import Counters, SequenceId


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """An event: this load has been reported."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class LoadingAllowed:
    """An event: fewer than `max_loading` sequences load or have loaded, and this one is next."""

    seq_id: SequenceId


@dataclass(frozen=True, slots=True)
class Source:
    """Where positions up to `stop` could be loaded from; see `KVLoad`."""

    stop: int
    keys: tuple[StableKey, ...] = ()
    remote: object = None


class _Load:
    """A load under way. `lease`: holds the blocks once the sequence has ended."""

    __slots__ = ("kv_epoch", "lease", "load", "sequence")

    def __init__(self, load: KVLoad, sequence: Sequence, kv_epoch: int) -> None:
        self.load = load
        self.sequence = sequence
        self.kv_epoch = kv_epoch
        self.lease: Lease | None = None


class Transfers:
    """Every transfer of one scheduler. `offload`: the slower tier's connector, if there is one."""

    __slots__ = (
        "_counters",
        "_failed",
        "_first_decodes",
        "_ids",
        "_kv",
        "_line",
        "_loaded",
        "_loading",
        "_loads",
        "_max_loading",
        "_offloader",
        "_outbox",
        "_remotes",
        "handoffs",
    )

    def __init__(
        self,
        kv: KVCacheManager,
        counters: Counters,
        *,
        offload: OffloadConnector | None,
        max_loading: int,
    ) -> None:
        self._kv = kv
        self._counters = counters
        self._max_loading = max_loading
        self._ids = count()
        self._offloader = None if offload is None else Offloader(kv, offload, self._ids)
        self._loads: dict[TransferId, _Load] = {}
        self._loading: dict[SequenceId, TransferId] = {}
        self._loaded: dict[SequenceId, tuple[Sequence, int]] = {}  # And how much was loaded.
        self._failed: set[SequenceId] = set()  # They ask for no other load.
        self._remotes: dict[SequenceId, int] = {}  # Not asked yet -> the epoch they belong to.
        self._first_decodes: dict[SequenceId, Sequence] = {}  # Loaded whole from a remote.
        self.handoffs = Handoffs(kv, self._ids)
        self._outbox: list[KVLoad] = []
        self._line: list[tuple[tuple[int, int], Sequence]] = []  # A heap; may hold ended ones.

    @property
    def num_in_flight(self) -> int:
        """Transfers that own blocks and have not been reported."""
        return len(self._loads) + len(self.handoffs)

    @property
    def num_holding(self) -> int:
        """Sequences that own blocks and no row."""
        return len(self._loading) + len(self._loaded)

    @property
    def may_load(self) -> bool:
        return self.num_holding < self._max_loading

    def is_holding(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._loading or sequence.seq_id in self._loaded

    def expect_remote(self, sequence: Sequence) -> None:
        """A remote has computed its prompt with the weights of the current epoch."""
        self._remotes[sequence.seq_id] = self._kv.kv_epoch

    def source(self, sequence: Sequence, num_local_tokens: int) -> Source | None:
        """From where to load what is behind the first `num_local_tokens` tokens, if at all."""
        remote = sequence.request.remote_prefill
        if remote is None and self._offloader is None:
            return None
        if num_local_tokens >= sequence.target_len - 1:
            return None  # The one token that is missing is computed in any case.
        is_valid = self._remotes.get(sequence.seq_id) == self._kv.kv_epoch
        if remote is not None and is_valid and num_local_tokens < sequence.num_prompt_tokens:
            return Source(sequence.num_prompt_tokens, remote=remote.transfer)
        if self._offloader is None or sequence.seq_id in self._failed:
            return None
        # Columns of every prompt position exist only once each has been computed here.
        if sequence.request.required_prompt_columns and not sequence.has_computed_prompt:
            return None
        keys = self._offloader.held_keys(sequence)
        stop = len(keys) * self._kv.block_size
        return None if stop <= num_local_tokens else Source(stop, keys=keys)

    def begin_load(self, sequence: Sequence, start: int, source: Source) -> LoadEnded:
        """Its blocks are reserved and [0, start) is there: plan the load of what is behind."""
        size = self._kv.block_size
        first, stop = start // size, -(-source.stop // size)
        load = KVLoad(
            transfer_id=TransferId(next(self._ids)),
            seq_id=sequence.seq_id,
            request_id=sequence.request_id,
            start=start,
            stop=source.stop,
            block_ids=tuple(sequence.table.block_ids[first:stop]),
            keys=source.keys[first:],
            remote=source.remote,
        )
        sequence.hold(start)
        self._remotes.pop(sequence.seq_id, None)
        self._loads[load.transfer_id] = _Load(load, sequence, self._kv.kv_epoch)
        self._loading[sequence.seq_id] = load.transfer_id
        self._outbox.append(load)
        return LoadEnded(load.transfer_id)

    def finish_load(self, transfer_id: TransferId, num_tokens: int) -> LoadEnded:
        """The load brought its first `num_tokens` tokens; returns the event to wake with.

        Raises TransferError or ValueError with nothing changed.
        """
        under_way = self._loads.get(transfer_id)
        if under_way is None:
            raise TransferError("load", transfer_id)
        load = under_way.load
        require_within(transfer_id, num_tokens, load.num_tokens)
        del self._loads[transfer_id]
        if under_way.lease is not None:
            under_way.lease.release()
            return LoadEnded(transfer_id)
        sequence = under_way.sequence
        del self._loading[sequence.seq_id]
        if num_tokens < load.num_tokens:
            self._failed.add(sequence.seq_id)
        if under_way.kv_epoch != self._kv.kv_epoch:
            self._drop(sequence)
            return LoadEnded(transfer_id)
        # At least one token is computed anew, whatever came: there is no other way to sample.
        num_computed = min(load.start + num_tokens, sequence.target_len - 1)
        self._counters.num_loaded_tokens += num_computed - load.start
        sequence.hold(num_computed)
        self._kv.publish(sequence.table, sequence.token_ids, num_computed, under_way.kv_epoch)
        self._loaded[sequence.seq_id] = (sequence, num_computed - load.start)
        if not load.keys and num_computed == sequence.target_len - 1:
            self._first_decodes[sequence.seq_id] = sequence
        return LoadEnded(transfer_id)

    def take_loaded(self, sequence: Sequence) -> int:
        """The sequence gets a row: how many of its computed tokens were loaded."""
        if sequence.seq_id not in self._loaded:
            return 0
        _, num_loaded = self._loaded.pop(sequence.seq_id)
        self._first_decodes.pop(sequence.seq_id, None)
        return num_loaded

    def loaded(self) -> list[Sequence]:
        """Sequences that own their blocks and lack nothing but a row, in order of admission."""
        return sorted((sequence for sequence, _ in self._loaded.values()), key=order_of)

    def first_decodes(self) -> list[Sequence]:
        """Of those, whoever lacks no KV but its first token's and has the remote's drafts."""
        return sorted(self._first_decodes.values(), key=order_of) if self._first_decodes else []

    def drop_loaded(self) -> int:
        """Take the blocks of every sequence that has loaded; it waits as if it never had."""
        sequences = self.loaded()
        for sequence in sequences:
            self.drop(sequence)
        return len(sequences)

    def drop(self, sequence: Sequence) -> None:
        """A sequence that has loaded loses its blocks."""
        del self._loaded[sequence.seq_id]
        self._first_decodes.pop(sequence.seq_id, None)
        self._drop(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Blocks that are being written outlive it."""
        transfer_id = self._loading.pop(sequence.seq_id, None)
        if transfer_id is not None:
            self._loads[transfer_id].lease = self._kv.lease(sequence.table.block_ids)
            self._drop(sequence)
        elif sequence.seq_id in self._loaded:
            self.drop(sequence)
        self._failed.discard(sequence.seq_id)
        self._remotes.pop(sequence.seq_id, None)
        if self._offloader is not None:
            self._offloader.forget(sequence)

    def take_loads(self) -> tuple[KVLoad, ...]:
        """What the plan being made has to load."""
        if not self._outbox:
            return ()
        loads = tuple(self._outbox)
        self._outbox.clear()
        return loads

    def queue(self, sequence: Sequence) -> LoadingAllowed:
        """It would load, but may not yet; returns the event to park it on."""
        heappush(self._line, (sequence.order_key, sequence))
        return LoadingAllowed(sequence.seq_id)

    def take_allowed(self, parked: ParkingLot) -> list[LoadingAllowed]:
        """Who may load now, the first in order first: no more than there is room for."""
        events: list[LoadingAllowed] = []
        while self._line and self.num_holding + len(events) < self._max_loading:
            _, sequence = heappop(self._line)
            if sequence in parked:
                events.append(LoadingAllowed(sequence.seq_id))
        return events

    def collect(self, sequence: Sequence) -> None:
        """The sequence is about to lose its row and its blocks: what is computed may be stored."""
        if self._offloader is not None:
            self._offloader.collect(sequence)

    def take_stores(self) -> tuple[KVStore, ...]:
        """What the plan being made has to store."""
        return () if self._offloader is None else self._offloader.take_stores()

    def finish_store(self, transfer_id: TransferId, num_tokens: int) -> None:
        if self._offloader is None:
            raise TransferError("store", transfer_id)
        self._offloader.finish(transfer_id, num_tokens)

    def lose_pool(self) -> None:
        """The pool is being replaced: what has not been stored yet is lost."""
        if self._offloader is not None:
            self._offloader.drop_outbox()

    def require_none(self, action: str) -> None:
        """Raises TransfersInFlightError, with nothing changed, while a transfer owns blocks."""
        if self.num_in_flight:
            raise TransfersInFlightError(action, self.num_in_flight)

    def is_awaited(self, event: Hashable) -> bool:
        """Whether an event of this room is still to come; True for any other's."""
        if isinstance(event, LoadEnded):
            return event.transfer_id in self._loads
        if isinstance(event, LoadingAllowed):
            return any(sequence.seq_id == event.seq_id for _, sequence in self._line)
        return True

    def contradictions(self) -> Iterator[str]:
        """What is wrong in these books, for `check_integrity`."""
        for seq_id, transfer_id in self._loading.items():
            under_way = self._loads.get(transfer_id)
            if under_way is None or under_way.sequence.seq_id != seq_id or under_way.lease:
                yield f"sequence {seq_id} waits for load {transfer_id}, which is not its own"
        owned = sum(under_way.lease is None for under_way in self._loads.values())
        if owned != len(self._loading):
            yield f"{owned} loads are awaited, by {len(self._loading)} sequences"
        for sequence, _ in self._loaded.values():
            if sequence.row is not None or sequence.is_finished or not sequence.table.block_ids:
                yield f"{sequence!r} is listed as loaded"

    def _drop(self, sequence: Sequence) -> None:
        self._kv.release(sequence.table)
        sequence.hold(0)
