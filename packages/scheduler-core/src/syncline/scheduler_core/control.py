"""Limits that follow from the pool, pausing, and what changed weights or KV mean for sequences.

Everything here acts between steps: what changes KV or the pool refuses while steps are in flight.
"""

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core.checking import require_int
from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.errors import StepsInFlightError
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import FinishReason, FlushReport, PauseMode, UnfinishedPolicy


class Control:
    """Pause state, weight version, and the moves that concern every sequence at once."""

    __slots__ = ("_config", "_kv", "_life", "_pause_mode", "_undecided", "weight_version")

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, life: Lifecycle, weight_version: int
    ) -> None:
        self._config = config
        self._kv = kv
        self._life = life
        self._pause_mode: PauseMode | None = None
        self._undecided = False  # The KV epoch rose and nobody has said what held KV is worth.
        self.weight_version = weight_version

    @property
    def is_paused(self) -> bool:
        return self._pause_mode is not None

    @property
    def is_frozen(self) -> bool:
        """Nothing at all may be planned."""
        return self._pause_mode in ("abort", "keep")

    def pause(self, mode: PauseMode, now_s: float | None) -> None:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"mode must be 'abort', 'wait' or 'keep', got {mode!r}")
        self._life.clock.enter(now_s)
        self._pause_mode = mode
        if mode == "abort":
            self.abort_all("aborted by pause")

    def resume(self) -> None:
        self._pause_mode = None

    def abort_all(self, detail: str) -> int:
        sequences = list(self._life.sequences.values())
        for sequence in sequences:
            self._life.end(sequence, FinishReason.ABORT, detail)
        return len(sequences)

    def set_limit(self, sequence: Sequence) -> None:
        """The length at which the sequence ends: asked for, allowed, or all the pool can hold.

        The last token of a sequence needs no KV, hence one more than the pool has slots.
        """
        max_tokens = sequence.request.stop.max_tokens
        num_slots = self._kv.num_blocks * self._kv.block_size
        by_request = sequence.num_prompt_tokens + max_tokens
        by_model = self._config.max_model_len
        by_pool = num_slots + 1
        limit = min(by_request, by_model, by_pool)
        sequence.max_total_tokens = limit
        if limit == by_request:
            sequence.length_detail = f"max_tokens {max_tokens}"
        elif limit == by_model:
            sequence.length_detail = f"max_model_len {by_model}"
        else:
            sequence.length_detail = f"kv capacity: {self._capacity_text(limit)}"

    def end_if_unfit(self, sequence: Sequence) -> None:
        """End a waiting sequence whose known tokens can never have their KV in this pool."""
        if self._kv.fits(sequence.num_tokens):
            return
        text = f"kv capacity: {self._capacity_text(sequence.num_tokens)}"
        if sequence.num_output_tokens:
            self._life.end(sequence, FinishReason.LENGTH, text)
        else:
            self._life.end(sequence, FinishReason.ERROR, f"the prompt can never fit; {text}")

    def bump_kv_epoch(self) -> int:
        self.require_idle_device("bump the KV epoch")
        self._undecided = True
        self._life.siblings.drop_all()
        return self._kv.bump_epoch()

    def set_weight_version(
        self, version: int, policy: UnfinishedPolicy, now_s: float | None
    ) -> None:
        self.require_idle_device("set the weight version")
        require_int("version", version)
        if policy not in ("recompute", "abort", "keep_kv"):
            raise ValueError(f"policy must be 'recompute', 'abort' or 'keep_kv', got {policy!r}")
        self._life.clock.enter(now_s)
        # Whatever was computed since the last bump is of the old weights.
        self._kv.bump_epoch()
        self._undecided = False
        self._life.siblings.drop_all()
        if policy == "abort":
            self.abort_all(f"weights changed to version {version}")
        elif policy == "recompute":
            self._life.preempt_all()
        self._forget_half_prompts(policy)
        self.weight_version = version
        for sequence in self._life.sequences.values():
            sequence.start_version(version)

    def _forget_half_prompts(self, policy: UnfinishedPolicy) -> None:
        """Columns of a prompt that is not through would be of two weight versions: drop them.

        Such a prompt is computed again from its start, under `keep_kv` too if its request needs
        the columns. A prompt that is through keeps its own, all of the version that computed it.
        """
        for sequence in self._life.sequences.values():
            if sequence.has_computed_prompt:
                continue
            if policy == "keep_kv":
                if not sequence.request.required_prompt_columns:
                    continue
                if sequence.row is not None:
                    self._life.preempt(sequence)
            sequence.columns.clear()

    def settle_kv(self) -> None:
        """Before a plan: KV of an older epoch that nobody declared good is computed again."""
        if self._undecided:
            self._undecided = False
            self._life.preempt_all()

    def flush_prefix_cache(self) -> FlushReport:
        """With a step or a load in flight nothing happens: it would publish after the flush."""
        transfers = self._life.transfers
        if len(self._life.pending) or transfers.num_in_flight:
            return FlushReport(is_flushed=False, num_unlisted_blocks=0)
        siblings = self._life.siblings
        siblings.drop_all()  # Samples that have not begun would share what is held.
        for sequence in (*self._life.running.values(), *transfers.loaded()):
            self._kv.withdraw(sequence.table)
            siblings.note_loss(sequence, self._life.groups[sequence.request_id])
        return FlushReport(is_flushed=True, num_unlisted_blocks=self._kv.clear_index())

    def resize_pool(self, num_blocks: int, now_s: float | None) -> None:
        """Every sequence loses its blocks; limits follow the new size."""
        self.require_idle_device("resize the pool")
        require_int("num_blocks", num_blocks)
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self._life.transfers.require_none("resize the pool")
        self._life.clock.enter(now_s)
        self._life.preempt_all()
        self._life.transfers.lose_pool()
        self._kv.resize(num_blocks)
        for sequence in list(self._life.sequences.values()):
            self.set_limit(sequence)
            self.end_if_unfit(sequence)

    def require_idle_device(self, action: str) -> None:
        """Raises StepsInFlightError, with nothing changed, while a step is in flight."""
        if len(self._life.pending):
            raise StepsInFlightError(action, len(self._life.pending))

    def _capacity_text(self, num_tokens: int) -> str:
        size = self._kv.block_size
        num_needed = -(-num_tokens // size)
        return (
            f"{num_tokens} tokens need {num_needed} blocks of {size}, "
            f"the pool has {self._kv.num_blocks}"
        )
