"""Transfers of KV as data: what a plan asks the runner to store or to load.

    store   read before the step writes anything, in stream order: its blocks need no holder
    load    written outside step order, after every earlier step and this plan's stores and block
            copies: its blocks stay owned until `Scheduler.finish_load`
    send    read by somebody else, after its sequence has ended: its blocks stay owned until
            `Scheduler.finish_send`

A transfer ends when it has been reported once, whatever became of it.
"""

import math
from dataclasses import dataclass
from typing import NewType

from syncline.kv_cache import BlockId, StableKey
from syncline.scheduler_core.checking import require_int
from syncline.scheduler_core.columns import MAX_TOKEN_ID
from syncline.scheduler_core.types import SequenceId

TransferId = NewType("TransferId", int)
"""A transfer, unique in a scheduler's life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStore:
    """Copy KV of positions [start, stop) to the slower tier: whole blocks, one key each."""

    transfer_id: TransferId
    seq_id: SequenceId
    start: int
    stop: int
    block_ids: tuple[BlockId, ...]
    keys: tuple[StableKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLoad:
    """Bring KV of positions [start, stop) into these blocks; nothing reads them until it is done.

    keys     of the blocks, if they come from the slower tier
    remote   `RemotePrefill.transfer`, if they come from the engine that computed the prompt
    """

    transfer_id: TransferId
    seq_id: SequenceId
    request_id: str
    start: int
    stop: int
    block_ids: tuple[BlockId, ...]
    keys: tuple[StableKey, ...] = ()
    remote: object = None

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """Another engine has computed the prompt and sampled the first token.

    That engine's blocks are read by one `KVLoad` at most. If its sequence ends and no plan had such
    a load (the token ended it, the prompt was cached here, the weights changed), none ever will.

    num_draft_tokens   drafts that came with the token, for its first decode step
    weight_version     of the weights that did both; KV of any other version is not loaded
    transfer           whatever the transport needs to find the KV, passed on in `KVLoad.remote`; of
                       kinds that a plan's digest knows (numbers, strings, bytes, tuples, mappings)
    """

    first_token_id: int
    first_logprob: float
    num_draft_tokens: int = 0
    weight_version: int = 0
    transfer: object = None

    def __post_init__(self) -> None:
        for name, value in (
            ("first_token_id", self.first_token_id),
            ("num_draft_tokens", self.num_draft_tokens),
        ):
            require_int(name, value)
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if self.first_token_id > MAX_TOKEN_ID:
            raise ValueError(
                f"first_token_id must be at most {MAX_TOKEN_ID}, got {self.first_token_id}"
            )
        if not math.isfinite(self.first_logprob):
            raise ValueError(f"first_logprob must be finite, got {self.first_logprob}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """An ended sequence's prompt, for another engine to read until `Scheduler.finish_send`.

    KV of positions [0, num_tokens) is in `block_ids`: the whole prompt, or nothing if the blocks
    were lost before the sequence ended (it was preempted, or their KV epoch is over).
    """

    transfer_id: TransferId
    seq_id: SequenceId
    request_id: str
    sample_index: int
    num_tokens: int
    block_ids: tuple[BlockId, ...]
    first_token_id: int
    first_logprob: float
    weight_version: int
