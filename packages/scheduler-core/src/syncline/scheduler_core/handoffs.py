"""The prefill side of disaggregation: blocks of ended sequences, lent to whoever goes on with them.

A handoff holds a lease from the end of its sequence until `finish`: taken or not, its blocks are
not given to anybody. Knows nothing of transports.
"""

from collections.abc import Iterator

from syncline.kv_cache import KVCacheManager, Lease
from syncline.scheduler_core.connectors.values import Handoff, TransferId
from syncline.scheduler_core.errors import TransferError
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import FinishReason


class Handoffs:
    """Every handoff that has not been reported finished."""

    __slots__ = ("_ids", "_kv", "_leases", "_outbox")

    def __init__(self, kv: KVCacheManager, ids: Iterator[int]) -> None:
        self._kv = kv
        self._ids = ids
        self._leases: dict[TransferId, Lease] = {}
        self._outbox: list[Handoff] = []

    def __len__(self) -> int:
        return len(self._leases)

    def offer(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence is ending, with its blocks: keep its prompt's if its request says so.

        One that was aborted or failed is not continued by anybody.
        """
        if not sequence.request.hands_off_kv:
            return
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        num_tokens = 0
        if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
            # An older epoch's content is not what a reader would take it for.
            num_tokens = sequence.num_prompt_tokens if self._kv.is_current(sequence.table) else 0
        num_blocks = -(-num_tokens // self._kv.block_size)
        lease = self._kv.lease(sequence.table.block_ids[:num_blocks])
        handoff = Handoff(
            transfer_id=TransferId(next(self._ids)),
            seq_id=sequence.seq_id,
            request_id=sequence.request_id,
            sample_index=sequence.sample_index,
            num_tokens=num_tokens,
            block_ids=lease.block_ids,
            first_token_id=sequence.output_token_ids[0],
            first_logprob=sequence.logprobs[0],
            weight_version=sequence.version_runs[0][0],
        )
        self._leases[handoff.transfer_id] = lease
        self._outbox.append(handoff)

    def take(self) -> list[Handoff]:
        """Those that were offered since the last call, in order of ending."""
        handoffs, self._outbox = self._outbox, []
        return handoffs

    def finish(self, transfer_id: TransferId) -> None:
        """The blocks have been read, or never will be. Raises TransferError, nothing changed."""
        lease = self._leases.pop(transfer_id, None)
        if lease is None:
            raise TransferError("send", transfer_id)
        lease.release()
