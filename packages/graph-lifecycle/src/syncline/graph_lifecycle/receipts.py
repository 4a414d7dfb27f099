"""Receipts: what was released, by whom, to be consumed exactly once by the restore.

A receipt is a plain value (see types); that it is used once, and where it came from, is kept
by the `ReceiptBook` of its issuer. It knows neither memory nor graphs.
"""

import itertools
from collections.abc import Sequence as SequenceABC
from typing import Generic, Protocol, TypeVar

from syncline.graph_lifecycle.errors import ReceiptError


class _Receipt(Protocol):
    @property
    def issuer(self) -> int: ...
    @property
    def serial(self) -> int: ...


_R = TypeVar("_R", bound=_Receipt)

_issuers = itertools.count(1)


class ReceiptBook(Generic[_R]):
    """The receipts of one issuer that are still open."""

    __slots__ = ("_open", "_serials", "issuer")

    def __init__(self) -> None:
        self.issuer = next(_issuers)
        self._serials = itertools.count(1)
        self._open: dict[int, _R] = {}

    def next_serial(self) -> int:
        return next(self._serials)

    def enter(self, receipt: _R) -> None:
        self._open[receipt.serial] = receipt

    def require_open(self, receipts: SequenceABC[_R]) -> None:
        """Raise ReceiptError unless every receipt was issued here, unaltered, not consumed."""
        seen: set[int] = set()
        for receipt in receipts:
            if receipt.issuer != self.issuer:
                raise ReceiptError(receipt=receipt, why="it was issued by somebody else")
            if receipt.serial not in self._open or receipt.serial in seen:
                raise ReceiptError(receipt=receipt, why="it was consumed already")
            if self._open[receipt.serial] != receipt:
                raise ReceiptError(receipt=receipt, why="it was altered after it was issued")
            seen.add(receipt.serial)

    def consume(self, receipts: SequenceABC[_R]) -> None:
        self.require_open(receipts)
        for receipt in receipts:
            del self._open[receipt.serial]
