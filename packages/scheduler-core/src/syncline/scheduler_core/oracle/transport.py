"""A slower KV tier and the transport to it, as the oracle sees them: real contents, any lateness.

The tier is an `OffloadConnector` in memory. The transport copies slots when a plan with transfers
is launched (stores) or when a transfer is made to end (loads). Blocks that are being loaded hold
poison until then, so that whoever reads them early is found out.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple, cast

from syncline.kv_cache import StableKey
from syncline.scheduler_core.connectors.values import KVLoad, KVStore, RemotePrefill
from syncline.scheduler_core.oracle.kv_array import OracleError, OracleKV, Slot
from syncline.scheduler_core.oracle.model import HashModel
from syncline.scheduler_core.plan import StepPlan
from syncline.scheduler_core.request import Request
from syncline.scheduler_core.scheduler import Scheduler

Transfer = KVLoad | KVStore


class OracleTier:
    """Holds at most `max_blocks` blocks, those stored first leave first. None: any number."""

    __slots__ = ("_contents", "_held", "max_blocks", "num_stored_blocks")

    def __init__(self, max_blocks: int | None = None) -> None:
        self.max_blocks = max_blocks
        self.num_stored_blocks = 0
        self._held: dict[StableKey, None] = {}
        self._contents: dict[StableKey, tuple[Slot, ...]] = {}

    def num_held_blocks(self, keys: SequenceABC[StableKey]) -> int:
        for i, key in enumerate(keys):
            if key not in self._held:
                return i
        return len(keys)

    def missing(self, keys: SequenceABC[StableKey]) -> SequenceABC[int]:
        return [i for i, key in enumerate(keys) if key not in self._held]

    def stored(self, keys: SequenceABC[StableKey]) -> None:
        for key in keys:
            assert key in self._contents and key not in self._held
            self._held[key] = None
        self.num_stored_blocks += len(keys)
        while self.max_blocks is not None and len(self._held) > self.max_blocks:
            oldest = next(iter(self._held))
            del self._held[oldest], self._contents[oldest]

    def clear(self) -> None:
        """Only the list of what is held: contents that a store brings late stay what they are."""
        self._held.clear()

    def write(self, key: StableKey, slots: tuple[Slot, ...]) -> None:
        self._contents[key] = slots

    def read(self, key: StableKey) -> tuple[Slot, ...] | None:
        return self._contents.get(key)


class _Due(NamedTuple):
    """A transfer under way, and what will become of it."""

    tick: int
    transfer: Transfer
    num_tokens: int
    kv_epoch: int


def prefill_remotely(
    model: HashModel, request: Request, *, num_draft_tokens: int = 0, weight_version: int = 0
) -> RemotePrefill:
    """What another engine with these weights makes of the prompt: a token, and KV to load."""
    contexts: list[int] = []
    context = 0
    for token_id in request.prompt_token_ids:
        context = model.extend(context, token_id, weight_version)
        contexts.append(context)
    token_id, logprob = model.sample(context, 0)
    return RemotePrefill(
        first_token_id=token_id,
        first_logprob=logprob,
        num_draft_tokens=num_draft_tokens,
        weight_version=weight_version,
        transfer=tuple(contexts),
    )


def _fill_from_remote(load: KVLoad, num_tokens: int, kv: OracleKV, kv_epoch: int) -> None:
    """Write the load's first tokens from what `prefill_remotely` put into its transfer."""
    contexts = cast(tuple[int, ...], load.remote)  # Opaque to everybody in between.
    for i in range(num_tokens):
        position = load.start + i
        kv.write(
            load.block_ids[i // kv.block_size],
            i % kv.block_size,
            context=contexts[position],
            position=position,
            kv_epoch=kv_epoch,
        )


def end_at_once(tick: int, transfer: Transfer) -> tuple[int, int]:
    """Every transfer ends before the next plan, with all its tokens."""
    return 0, transfer.stop - transfer.start


class OracleTransport:
    """Executes the transfers of plans on a runner's array, and reports them when they are due.

    ends   (tick, transfer) -> (ticks until it ends, how many of its tokens it brings)
    """

    __slots__ = ("_due", "_ends", "_tier")

    def __init__(
        self,
        tier: OracleTier,
        ends: Callable[[int, Transfer], tuple[int, int]] = end_at_once,
    ) -> None:
        self._tier = tier
        self._ends = ends
        self._due: list[_Due] = []

    @property
    def num_under_way(self) -> int:
        return len(self._due)

    def launch(self, plan: StepPlan, kv: OracleKV, tick: int) -> None:
        """Read what the plan stores, and begin its loads. Before the step writes anything."""
        for store in plan.kv_stores:
            if len(store.keys) != len(store.block_ids):
                raise OracleError(plan.step_id, f"{store} has not one key for each block")
            for key, block_id in zip(store.keys, store.block_ids, strict=True):
                slots = tuple(kv.read(block_id, offset) for offset in range(kv.block_size))
                self._tier.write(key, slots)
        read_first = {source for source, _ in plan.block_copies}
        for load in plan.kv_loads:
            for block_id in load.block_ids:
                if block_id in read_first:
                    continue  # The load starts after the copies.
                for offset in range(kv.block_size):
                    kv.write(block_id, offset, context=-2, position=-2, kv_epoch=-2)
        begun: list[Transfer] = [*plan.kv_stores, *plan.kv_loads]
        for transfer in begun:
            num_ticks, num_tokens = self._ends(tick, transfer)
            self._due.append(_Due(tick + num_ticks, transfer, num_tokens, plan.kv_epoch))

    def finish_due(self, scheduler: Scheduler, kv: OracleKV, tick: int) -> int:
        """End every transfer that is due at this tick; returns how many."""
        due = [entry for entry in self._due if entry.tick <= tick]
        self._due = [entry for entry in self._due if entry.tick > tick]
        for entry in due:
            self._finish(entry, entry.num_tokens, scheduler, kv)
        return len(due)

    def finish_one(self, index: int, num_tokens: int, scheduler: Scheduler, kv: OracleKV) -> None:
        """End the transfer at this place among those under way, with at most so many tokens."""
        entry = self._due.pop(index)
        transfer = entry.transfer
        self._finish(entry, min(num_tokens, transfer.stop - transfer.start), scheduler, kv)

    def _finish(self, entry: _Due, num_tokens: int, scheduler: Scheduler, kv: OracleKV) -> None:
        transfer = entry.transfer
        if isinstance(transfer, KVStore):
            scheduler.finish_store(transfer.transfer_id, num_tokens)
            return
        if transfer.keys:
            num_tokens = self._fill(transfer, num_tokens, kv)
        else:
            _fill_from_remote(transfer, num_tokens, kv, entry.kv_epoch)
        scheduler.finish_load(transfer.transfer_id, num_tokens)

    def _fill(self, load: KVLoad, num_tokens: int, kv: OracleKV) -> int:
        """Write the load's first `num_tokens` tokens, or as many as there are; returns how many."""
        for i in range(num_tokens):
            slots = self._tier.read(load.keys[i // kv.block_size])
            if slots is None:
                return i
            slot = slots[i % kv.block_size]
            kv.write(
                load.block_ids[i // kv.block_size],
                i % kv.block_size,
                context=slot.context,
                position=slot.position,
                kv_epoch=slot.kv_epoch,
            )
        return num_tokens
