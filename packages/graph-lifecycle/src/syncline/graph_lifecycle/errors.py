"""Every error of the package; facts are attributes, the text only repeats them.

GraphError
|-- ArenaError                      the arena was used against its contract
|   |-- StorageInUseError           a live graph still reads what was to be freed or moved
|   `-- ReleasedMemoryWrittenError  somebody wrote into memory that was asleep
|-- ReceiptError                    a receipt consumed twice, or of another issuer
|-- CaptureError                    a capture failed; its whole session was rolled back
|   `-- UncapturableOpError         the step does what no replay can repeat
|-- StaleGraphError                 the graph reads memory that is asleep, freed, moved or replaced
|-- UnknownGraphError               no live graph has this key
|-- ReleaseError                    a store did not give back what it was told to
`-- ResidencyError                  the order makes no sense in the present state
    `-- WakeError                   memory came back, but not at its old size

Bad arguments (a name taken twice, a shape that does not fit, an unknown tag) are ValueError.
"""

from collections.abc import Sequence as SequenceABC

from syncline.graph_lifecycle.types import GraphKey, GraphReceipt, StorageFault, Tag


class GraphError(Exception):
    """Base of every error that this package raises on its own account."""


class ArenaError(GraphError):
    """The arena was used against its contract; nothing was changed."""


class StorageInUseError(ArenaError):
    """`action` would free or move storages that live graphs still read; nothing was changed."""

    def __init__(
        self, *, action: str, names: SequenceABC[str], graphs: SequenceABC[GraphKey]
    ) -> None:
        self.action = action
        self.names = tuple(names)
        self.graphs = tuple(graphs)
        super().__init__(
            f"{action} refused: {_few(self.names)} is read by graphs {_few(self.graphs)}; "
            "release those graphs first"
        )


class ReleasedMemoryWrittenError(ArenaError):
    """Tensors of a released tag were written; the tag stays released, poisoned afresh."""

    def __init__(self, *, tag: Tag, names: SequenceABC[str]) -> None:
        self.tag = tag
        self.names = tuple(names)
        super().__init__(f"{tag} was asleep while somebody wrote into {_few(self.names)}")


class ReceiptError(GraphError):
    """The receipt cannot be consumed here and now; nothing was changed."""

    def __init__(self, *, receipt: object, why: str) -> None:
        self.receipt = receipt
        self.why = why
        super().__init__(f"{type(receipt).__name__} refused: {why}")


class CaptureError(GraphError):
    """Capturing `key` in `store` failed; no graph of the session is left in any store."""

    def __init__(self, *, key: GraphKey, store: str, reason: str) -> None:
        self.key = key
        self.store = store
        self.reason = reason
        super().__init__(f"capturing {key!r} in store {store!r} failed: {reason}")


class UncapturableOpError(CaptureError):
    """The step called `op`, which a replay cannot repeat."""

    def __init__(self, *, key: GraphKey, store: str, op: str, why: str) -> None:
        self.op = op
        self.why = why
        super().__init__(key=key, store=store, reason=f"{op}: {why}")


class StaleGraphError(GraphError):
    """The graph reads memory that is not, or no longer, what it was captured on."""

    def __init__(self, *, key: GraphKey, faults: SequenceABC[StorageFault]) -> None:
        self.key = key
        self.faults = tuple(faults)
        super().__init__(f"graph {key!r} is stale: {_few([str(fault) for fault in self.faults])}")


class UnknownGraphError(GraphError):
    """`key` was never captured, or has been released since."""

    def __init__(self, *, key: GraphKey, known: SequenceABC[GraphKey]) -> None:
        self.key = key
        self.known = tuple(known)
        super().__init__(f"no live graph {key!r}; live are {_few(self.known)}")


class ReleaseError(GraphError):
    """Stores failed to discard; their graphs can no longer be replayed all the same.

    `failures` holds one line per store and graph; `receipt` restores everything released.
    """

    def __init__(self, *, failures: SequenceABC[str], receipt: GraphReceipt) -> None:
        self.failures = tuple(failures)
        self.receipt = receipt
        super().__init__(f"release left something behind: {_few(self.failures)}")


class ResidencyError(GraphError):
    """`action` makes no sense now, for every one of `reasons`; nothing was changed."""

    def __init__(self, *, action: str, reasons: SequenceABC[str]) -> None:
        self.action = action
        self.reasons = tuple(reasons)
        super().__init__(f"{action} refused: {'; '.join(self.reasons)}")


class WakeError(ResidencyError):
    """The arena brought `tag` back at another size; the tag is asleep again."""

    def __init__(self, *, tag: Tag, expected_bytes: int, got_bytes: int) -> None:
        self.tag = tag
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes
        super().__init__(
            action="wake_up",
            reasons=(f"{tag} had {expected_bytes} bytes, only {got_bytes} came back",),
        )


def _few(items: SequenceABC[object], limit: int = 8) -> str:
    shown = ", ".join(str(item) for item in items[:limit])
    left = len(items) - limit
    return f"[{shown}]" if left <= 0 else f"[{shown}, and {left} more]"
