"""A KV cache of slots that say what was written into them, when, and for which position.

A device's memory as a stand-in: anything may be overwritten; only reading tells. A block's serial
is that of its latest write, so a reader that has verified a block need not look again until then.
"""

from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

from syncline.scheduler_core.errors import SchedulerError


class OracleError(SchedulerError):
    """A plan made the runner touch KV that it must not, or read KV that is not what it should be.

    step_id: the plan. detail: row, position and block.
    """

    def __init__(self, step_id: int, detail: str) -> None:
        super().__init__(f"step {step_id}: {detail}")
        self.step_id = step_id
        self.detail = detail


class Slot(NamedTuple):
    """KV of one token: the hash of its context, its position, and the stamps of its writing."""

    context: int
    position: int
    kv_epoch: int
    write_serial: int


_UNWRITTEN = Slot(context=-1, position=-1, kv_epoch=-1, write_serial=0)


class OracleKV:
    """`num_blocks` blocks of `block_size` slots."""

    __slots__ = ("_block_serials", "_serial", "_slots", "block_size")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._slots = [_UNWRITTEN] * (num_blocks * block_size)
        self._block_serials = [0] * num_blocks
        self._serial = 0

    @property
    def num_blocks(self) -> int:
        return len(self._block_serials)

    def read(self, block_id: int, offset: int) -> Slot:
        return self._slots[block_id * self.block_size + offset]

    def block_serial(self, block_id: int) -> int:
        """Grows with every write into the block."""
        return self._block_serials[block_id]

    def block_serials(self, block_ids: SequenceABC[int]) -> list[int]:
        return list(map(self._block_serials.__getitem__, block_ids))

    def write(
        self, block_id: int, offset: int, *, context: int, position: int, kv_epoch: int
    ) -> None:
        self._serial += 1
        self._block_serials[block_id] = self._serial
        self._slots[block_id * self.block_size + offset] = Slot(
            context, position, kv_epoch, self._serial
        )

    def copy_block(self, source: int, destination: int) -> None:
        size = self.block_size
        self._serial += 1
        self._block_serials[destination] = self._serial
        self._slots[destination * size : (destination + 1) * size] = self._slots[
            source * size : (source + 1) * size
        ]
