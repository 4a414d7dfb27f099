"""The one owner of every captured graph: capture, replay, release, restore.

Graphs live in stores, one per kind; the registry lists them all, records in the ledger what
each reads, refuses to replay what is stale, and releases each store for itself. Sessions of
captures are transactional. It knows no tags, no arena and no option of the user's: that a
capture failed is a state of its own, visible in `degraded`, and the next success ends it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import Literal

from torch import Tensor

from syncline.graph_lifecycle.errors import (
    CaptureError,
    GraphError,
    ReleaseError,
    StaleGraphError,
    UnknownGraphError,
)
from syncline.graph_lifecycle.ledger import StorageLedger
from syncline.graph_lifecycle.receipts import ReceiptBook
from syncline.graph_lifecycle.stores.base import GraphStore
from syncline.graph_lifecycle.types import (
    CaptureReport,
    CaptureRequest,
    DegradedMode,
    GraphKey,
    GraphReceipt,
    Recapture,
    StepFunction,
    StorageFault,
)

AuditMode = Literal["every_replay", "on_change"]


class _Graph:
    """Where a live graph is, and the ledger's generation at which it was last found sound."""

    __slots__ = ("sound_at", "store")

    def __init__(self, store: str) -> None:
        self.store = store
        self.sound_at = -1


class GraphRegistry:
    """Every captured graph, by key.

    `audit` says when a replay looks at all that the graph reads: at every replay, or only
    after an arena released or restored something (constant time otherwise; the owner then
    calls `audit()` after whatever may replace a tensor, such as a weight update).
    """

    __slots__ = ("_audit", "_book", "_degraded", "_graphs", "_ledger", "_stores")

    def __init__(self, ledger: StorageLedger, *, audit: AuditMode = "every_replay") -> None:
        if audit not in ("every_replay", "on_change"):
            raise ValueError(f"audit must be 'every_replay' or 'on_change', got {audit!r}")
        self._ledger = ledger
        self._audit = audit
        self._stores: dict[str, GraphStore] = {}
        self._graphs: dict[GraphKey, _Graph] = {}
        self._book: ReceiptBook[GraphReceipt] = ReceiptBook()
        self._degraded: DegradedMode | None = None

    @property
    def ledger(self) -> StorageLedger:
        return self._ledger

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The live graphs, in order of capture."""
        return tuple(self._graphs)

    @property
    def degraded(self) -> DegradedMode | None:
        """Which graphs should exist and do not, and why; None when all is well."""
        return self._degraded

    @property
    def num_bytes(self) -> int:
        """Everything that the stores pin."""
        return sum(store.num_bytes for store in self._stores.values())

    def add_store(self, name: str, store: GraphStore) -> None:
        """Own `store` from now on; it must be empty, for every graph is made here."""
        if name in self._stores:
            raise ValueError(f"store name {name!r} is taken")
        if store.keys:
            raise ValueError(f"store {name!r} must be empty, holds {store.keys}")
        self._stores[name] = store

    def capture(
        self, key: GraphKey, store: str, fn: StepFunction, inputs: Mapping[str, Tensor]
    ) -> CaptureReport:
        """Capture one graph; a session of its own, see `capture_all`."""
        return self.capture_all([CaptureRequest(key=key, store=store, fn=fn, inputs=inputs)])[0]

    def capture_all(self, requests: Iterable[CaptureRequest]) -> tuple[CaptureReport, ...]:
        """Capture all of `requests` in their order, or none.

        ValueError for a key that is taken or given twice and for an unknown store: nothing was
        tried. CaptureError when a capture fails: every graph of the session is gone from
        every store, earlier sessions are untouched, and `degraded` names what is missing.
        """
        session = tuple(requests)
        self._require_capturable(session)
        reports: list[CaptureReport] = []
        try:
            for request in session:
                reports.append(self._capture_one(request))
        except BaseException as error:
            self._roll_back(session, error)
            if not isinstance(error, Exception):
                raise  # An interrupt is no failed capture.
            failed = session[len(reports)]
            raise self._degrade([r.key for r in session], failed, error) from error
        self._mend(r.key for r in session)
        return tuple(reports)

    def replay(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the graph; its outputs are valid until its next replay.

        StaleGraphError if memory it reads is released, freed, moved or replaced;
        UnknownGraphError if it was never captured or has been released.
        """
        graph = self._find(key)
        generation = self._ledger.generation
        if self._audit == "every_replay" or graph.sound_at != generation:
            faults = self._ledger.faults(key)
            if faults:
                raise StaleGraphError(key=key, faults=faults)
            graph.sound_at = generation
        return self._stores[graph.store].replay(key, inputs)

    def audit(self) -> dict[GraphKey, tuple[StorageFault, ...]]:
        """Every live graph that may not be replayed now, and why."""
        found = {key: self._ledger.faults(key) for key in self._graphs}
        return {key: faults for key, faults in found.items() if faults}

    def release(
        self, stores: Iterable[str] | None = None, *, keys: Iterable[GraphKey] | None = None
    ) -> GraphReceipt:
        """Give graphs and all they pin back: of some stores, or some keys, or all.

        Unknown names are refused before anything is released. Each store is asked separately,
        whatever the others say; none of the graphs can be replayed afterwards. ReleaseError,
        carrying the receipt, if a store failed or still pins something it should not.
        """
        chosen = self._choose(stores, keys)
        before = self.num_bytes
        failures = []
        for key, name in chosen:
            del self._graphs[key]
            self._ledger.forget(key)
            try:
                self._stores[name].discard(key)
            except Exception as error:  # noqa: BLE001 the other stores come first; raised below
                failures.append(f"{name}: discarding {key!r} raised {error!r}")
        failures += self._leftovers()
        receipt = GraphReceipt(
            issuer=self._book.issuer,
            serial=self._book.next_serial(),
            graphs=tuple(chosen),
            num_bytes=before - self.num_bytes,
        )
        self._book.enter(receipt)
        if failures:
            raise ReleaseError(failures=failures, receipt=receipt)
        return receipt

    def restore(self, receipt: GraphReceipt, recapture: Recapture) -> tuple[CaptureReport, ...]:
        """Capture again what the receipt released, all or nothing; consumes the receipt.

        `recapture` gives a request for each key it is asked for: those of the receipt that
        nobody has captured again meanwhile. Whatever fails is a CaptureError and leaves
        `degraded` set and the receipt open: restoring may be retried.
        """
        return self.restore_all([receipt], recapture)

    def restore_all(
        self, receipts: SequenceABC[GraphReceipt], recapture: Recapture
    ) -> tuple[CaptureReport, ...]:
        """`restore` several receipts in one session."""
        self._book.require_open(receipts)
        released = dict.fromkeys(key for receipt in receipts for key in receipt.keys)
        keys = tuple(key for key in released if key not in self._graphs)
        reports = self.capture_all(self._requests_for(keys, recapture)) if keys else ()
        self._book.consume(receipts)
        return reports

    def clear_degraded(self) -> None:
        """Give up the missing graphs for good; a success clears the mode by itself."""
        self._degraded = None

    def check_integrity(self) -> None:
        """Raise GraphError unless registry, stores and ledger list the very same graphs."""
        stored = {key: name for name, store in self._stores.items() for key in store.keys}
        listed = {key: graph.store for key, graph in self._graphs.items()}
        if stored != listed or set(self._ledger.keys) != set(listed):
            raise GraphError(
                f"registry lists {listed}, stores hold {stored}, ledger {self._ledger.keys}"
            )

    def _capture_one(self, request: CaptureRequest) -> CaptureReport:
        store = self._stores[request.store]
        before = store.num_bytes
        tensors = store.capture(request.key, request.fn, request.inputs)
        self._ledger.record(request.key, tensors)
        del tensors  # Or every tensor would seem to have outlived the capture.
        self._ledger.settle(request.key)
        self._graphs[request.key] = _Graph(request.store)
        return CaptureReport(
            key=request.key,
            store=request.store,
            num_storages=self._ledger.num_storages(request.key),
            num_bytes=store.num_bytes - before,
        )

    def _requests_for(
        self, keys: tuple[GraphKey, ...], recapture: Recapture
    ) -> tuple[CaptureRequest, ...]:
        """What `recapture` gives for `keys`, in their order; any failure is degraded mode."""
        try:
            requests = {request.key: request for request in recapture(keys)}
            if requests.keys() != set(keys):
                raise ValueError(f"recapture must give graphs {keys}, gave {tuple(requests)}")
            ordered = tuple(requests[key] for key in keys)
            self._require_capturable(ordered)
        except Exception as error:
            raise self._degrade(keys, None, error) from error
        return ordered

    def _require_capturable(self, session: SequenceABC[CaptureRequest]) -> None:
        seen: set[GraphKey] = set()
        for request in session:
            if request.store not in self._stores:
                raise ValueError(f"no store {request.store!r}, stores: {sorted(self._stores)}")
            if request.key in self._graphs or request.key in seen:
                raise ValueError(f"key {request.key!r} is captured already")
            seen.add(request.key)

    def _roll_back(self, session: SequenceABC[CaptureRequest], error: BaseException) -> None:
        """Undo a session in every store; a store that fails at it is noted on `error`."""
        for request in session:
            self._graphs.pop(request.key, None)
            self._ledger.forget(request.key)
        kept = set(self._graphs)
        doomed = [(request.key, request.store) for request in session]
        doomed += [
            (key, name)
            for name, store in self._stores.items()
            for key in store.keys
            if key not in kept
        ]
        for key, name in dict.fromkeys(doomed):
            try:
                self._stores[name].discard(key)
            except Exception as second:  # noqa: BLE001 the rest must still be rolled back
                error.add_note(f"rolling back {key!r} in store {name!r} raised {second!r}")

    def _degrade(
        self, keys: SequenceABC[GraphKey], failed: CaptureRequest | None, error: Exception
    ) -> CaptureError:
        if isinstance(error, CaptureError):
            raised = error
        else:
            raised = CaptureError(
                key=failed.key if failed is not None else keys,
                store=failed.store if failed is not None else "(none)",
                reason=f"{type(error).__name__}: {error}",
            )
        missing = () if self._degraded is None else self._degraded.missing
        self._degraded = DegradedMode(
            missing=tuple(dict.fromkeys((*missing, *keys))),
            key=raised.key,
            store=raised.store,
            reason=raised.reason,
        )
        return raised

    def _mend(self, captured: Iterable[GraphKey]) -> None:
        if self._degraded is None:
            return
        done = set(captured)
        missing = tuple(key for key in self._degraded.missing if key not in done)
        self._degraded = replace(self._degraded, missing=missing) if missing else None

    def _choose(
        self, stores: Iterable[str] | None, keys: Iterable[GraphKey] | None
    ) -> list[tuple[GraphKey, str]]:
        names = set(self._stores) if stores is None else set(stores)
        if not names <= set(self._stores):
            raise ValueError(f"no stores {sorted(names - set(self._stores))}")
        wanted = set(self._graphs) if keys is None else set(keys)
        for key in wanted:
            self._find(key)
        return [
            (key, graph.store)
            for key, graph in self._graphs.items()
            if graph.store in names and key in wanted
        ]

    def _leftovers(self) -> list[str]:
        """What stores pin beyond the live graphs."""
        live = {graph.store for graph in self._graphs.values()}
        found = []
        for name, store in self._stores.items():
            strays = [key for key in store.keys if key not in self._graphs]
            if strays:
                found.append(f"{name}: still holds {strays}")
            elif name not in live and store.num_bytes:
                found.append(f"{name}: still pins {store.num_bytes} bytes")
        return found

    def _find(self, key: GraphKey) -> _Graph:
        if key not in self._graphs:
            raise UnknownGraphError(key=key, known=self.keys)
        return self._graphs[key]
