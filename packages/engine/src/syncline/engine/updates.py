"""Who may write the weights, and when: the engine's side of a weight update.

`weight_sync` decides what may be written where and counts the bytes; here the write is given its
moment (nothing in flight, no forward until it is released), KV computed before it loses its meaning
at the first byte, and the version changes for all requests between two steps. Transports only bring
tensors: one open update at a time, driven by begin, put, commit or abort.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from torch import Tensor

from syncline.engine.errors import UpdateOrderError
from syncline.engine.step_loop import StepLoop
from syncline.weight_sync import (
    AbortReport,
    Manifest,
    Mode,
    NameTable,
    Region,
    SyncReport,
    Update,
    UpdateOptions,
    WriteGuard,
)

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

# What can be looked through at once: it holds its tensors already, and gives them again.
_HELD: Final[tuple[type, ...]] = (list, tuple, type({}.items()))


class EngineGuard:
    """Implements weight_sync's `WriteGuard`: granted when no step can read a weight."""

    __slots__ = ("_loop", "_on_first_write")

    def __init__(self, loop: StepLoop, on_first_write: Callable[[], None]) -> None:
        self._loop = loop
        self._on_first_write = on_first_write

    def acquire(self, reason: str) -> None:
        """Collects what is in flight; its tokens are samples of the old weights and are kept."""
        self._loop.drain()
        self._loop.raise_fence(reason)

    def first_write(self) -> None:
        self._on_first_write()

    def release(self) -> None:
        self._loop.lift_fence()


class WeightUpdates:
    """The one open update, if any, and the version that serves."""

    __slots__ = (
        "_make_guard",
        "_on_commit",
        "_require",
        "_table",
        "_update",
        "_weights_valid",
        "weight_version",
    )

    def __init__(
        self,
        table: NameTable,
        *,
        make_guard: Callable[[], WriteGuard],
        require: Callable[[], None],
        weights_valid: Callable[[], bool],
        on_commit: Callable[[int], None],
        weight_version: int,
    ) -> None:
        """require: raises when the weights cannot be written now, because they are asleep."""
        self._table = table
        self._make_guard = make_guard
        self._require = require
        self._weights_valid = weights_valid
        self._on_commit = on_commit
        self._update: Update | None = None
        self.weight_version = weight_version

    @property
    def is_open(self) -> bool:
        return self._update is not None

    def begin(
        self, version: int, *, manifest: Manifest | None = None, mode: Mode = "direct"
    ) -> None:
        """The version must be newer; the same one may come again once its weights are lost."""
        if self._update is not None:
            raise UpdateOrderError(
                f"begin: an update to version {self._update.version} is open; commit or abort it"
            )
        self._require()
        self._update = Update.begin(
            self._table,
            version,
            guard=self._make_guard(),
            manifest=manifest,
            mode=mode,
            options=UpdateOptions(
                current_version=self.weight_version,
                allow_equal_version=not self._weights_valid(),
            ),
        )

    def put(self, name: str, tensor: Tensor, part: Region | None = None) -> None:
        """One tensor, or the rectangle `part` of it. A refusal leaves the update open."""
        self._require()
        self._open_update("put").put(name, tensor, part)

    def commit(self) -> SyncReport:
        """Serve the new weights. Refused, and still open, while anything is missing."""
        self._require()
        update = self._open_update("commit")
        report = update.commit()
        self._update = None
        self._on_commit(report.version)
        self.weight_version = report.version
        return report

    def abort(self, reason: str) -> AbortReport:
        """Give up. After a live byte was written nothing is served before a complete update."""
        report = self._open_update("abort").abort(reason)
        self._update = None
        return report

    def apply(self, named_tensors: NamedTensors, version: int, *, mode: Mode) -> SyncReport:
        """A whole update from one iterable or mapping; whatever fails, it is not left open.

        Items that are no (name, tensor) pairs are refused before anything is written, unless an
        iterator makes them on the way: then before the item itself is.
        """
        pairs = _pairs_of(named_tensors)
        self.begin(version, mode=mode)
        try:
            for name, tensor in pairs:
                self.put(name, tensor)
            return self.commit()
        except BaseException as error:
            if self._update is not None:
                self.abort(f"{type(error).__name__}: {error}")
            raise

    def _open_update(self, action: str) -> Update:
        if self._update is None:
            raise UpdateOrderError(f"{action}: no update is open; call begin first")
        return self._update


def _pairs_of(named_tensors: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(named_tensors, Mapping):
        named_tensors = named_tensors.items()
    if not isinstance(named_tensors, Iterable) or isinstance(named_tensors, Tensor):
        raise ValueError(
            "named_tensors must be a mapping or an iterable of (name, tensor) pairs, "
            f"got {type(named_tensors).__name__}"
        )
    pairs = itertools.starmap(_pair_of, enumerate(named_tensors))
    return iter(list(pairs)) if isinstance(named_tensors, _HELD) else pairs


def _pair_of(position: int, item: object) -> tuple[str, Tensor]:
    match item:
        case (str() as name, Tensor() as tensor):
            return name, tensor
        case (name, tensor):
            got = f"({type(name).__name__}, {type(tensor).__name__})"
        case _:
            got = type(item).__name__
    raise ValueError(
        f"named_tensors must hold (name, tensor) pairs, a str and a Tensor; item {position} "
        f"is {got}"
    )
