"""Executes plans on an `OracleKV` as a device would: in order, from its own rows and tables.

It believes the plan and nothing else. The next token is the hash of the context read from the KV,
so a wrong table, a wrong final flag or a block in other hands gives a wrong token; and every read
is compared with what the row wrote or took over, so that most of them raise at once.
"""

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import TypeAlias

from syncline.kv_cache import BlockId
from syncline.scheduler_core.oracle.drafters import Drafter, accept_all
from syncline.scheduler_core.oracle.kv_array import OracleError, OracleKV
from syncline.scheduler_core.oracle.model import HashModel
from syncline.scheduler_core.plan import (
    ColumnSpan,
    RowJoin,
    StepPlan,
    StepResult,
)
from syncline.scheduler_core.types import RowId

_Drawn: TypeAlias = tuple[list[int], list[float]]
"""Token ids and logprobs of a result, as they grow."""


class _Row:
    """What the device holds of one sequence. `contexts[p]`: the hash that slot p must hold."""

    __slots__ = ("block_ids", "contexts", "join", "token_ids", "verified")

    def __init__(self, join: RowJoin) -> None:
        self.join = join
        self.token_ids = list(join.token_ids)
        self.block_ids = list(join.block_ids)
        self.contexts: list[int] = []
        self.verified: list[int] = []  # By index in block_ids: the block's serial when verified.


class OracleRunner:
    """Runs each plan when it is launched; results wait until they are collected, oldest first.

    columns       names of per-position columns to return for every computed position
    counts        how many of a window's steps a decode row runs: counts(step_id, row, window)
    drafter       how many drafts of a verify step are right
    is_strict     False: do not raise on a wrong read, only let it spoil the output
    keeps_kv      True: KV of an older epoch may be read by rows that wrote or took it over then
    """

    __slots__ = (
        "_block_holders",
        "_columns",
        "_counts",
        "_drafter",
        "_is_strict",
        "_keeps_kv",
        "_results",
        "_rows",
        "_step_id",
        "kv",
        "model",
        "num_reads",
    )

    def __init__(  # noqa: PLR0913  the knobs of a stand-in, each by name
        self,
        kv: OracleKV,
        *,
        model: HashModel | None = None,
        columns: tuple[str, ...] = (),
        counts: Callable[[int, RowId, int], int] | None = None,
        drafter: Drafter = accept_all,
        is_strict: bool = True,
        keeps_kv: bool = False,
    ) -> None:
        self.kv = kv
        self.model = HashModel() if model is None else model
        self._columns = columns
        self._counts = counts
        self._drafter = drafter
        self._is_strict = is_strict
        self._keeps_kv = keeps_kv
        self._rows: dict[RowId, _Row] = {}
        self._block_holders: Counter[BlockId] = Counter()
        self._results: deque[StepResult] = deque()
        self._step_id = -1
        self.num_reads = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._results)

    def launch(self, plan: StepPlan) -> None:
        """Execute the plan. Raises OracleError, when strict, at the first wrong access."""
        if plan.step_id != self._step_id + 1:
            raise OracleError(plan.step_id, f"launched after step {self._step_id}")
        self._step_id = plan.step_id
        self._change_rows(plan)
        for source, destination in plan.block_copies:
            self.kv.copy_block(source, destination)
        for join in plan.joined:
            self._take_over(plan, self._rows[join.row])
        token_ids: list[int] = []
        logprobs: list[float] = []
        counts: list[int] = []
        window_counts: list[int] = []
        spans: list[ColumnSpan] = []
        for i, row_id in enumerate(plan.decode_rows):
            row = self._row(row_id)
            start = len(row.token_ids) - 1
            num_drafts = 0 if plan.num_draft_tokens is None else plan.num_draft_tokens[i]
            num_steps = plan.window
            if self._counts is not None:
                num_steps = self._counts(plan.step_id, row_id, plan.window)
            for step in range(num_steps):
                num_before = len(row.token_ids)
                self._verify_drafts(plan, row, step, num_drafts, (token_ids, logprobs))
                window_counts.append(len(row.token_ids) - num_before)
            window_counts += [0] * (plan.window - num_steps)
            counts.append(len(row.token_ids) - 1 - start)
            spans += self._spans(row_id, row, start, len(row.token_ids) - 1)
        for chunk in plan.prefill_chunks:
            row = self._row(chunk.row)
            self._write(plan, row, chunk.start, chunk.stop)
            if chunk.is_final:
                self._sample(plan, row, chunk.stop - 1, (token_ids, logprobs))
                counts.append(1)
            spans += self._spans(chunk.row, row, chunk.start, chunk.stop)
        has_drafts = plan.num_draft_tokens is not None
        is_plain = self._counts is None and plan.window == 1 and not has_drafts
        is_split = plan.window > 1 and has_drafts
        self._results.append(
            StepResult(
                step_id=plan.step_id,
                token_ids=token_ids,
                logprobs=logprobs,
                counts=None if is_plain else tuple(counts),
                window_counts=tuple(window_counts) if is_split else None,
                columns=tuple(spans),
            )
        )

    def collect(self) -> StepResult:
        """The result of the oldest launched step. Raises IndexError when none is in flight."""
        return self._results.popleft()

    def resize(self, num_blocks: int) -> None:
        """Replace the array. Every row must have left in the next plan."""
        self.kv = OracleKV(num_blocks, self.kv.block_size)

    def _change_rows(self, plan: StepPlan) -> None:
        for row_id in plan.left:
            row = self._rows.pop(row_id, None)
            if row is None:
                raise OracleError(plan.step_id, f"row {row_id} left without having joined")
            self._block_holders.subtract(row.block_ids)
        for join in plan.joined:
            if join.row in self._rows:
                raise OracleError(plan.step_id, f"row {join.row} joined while occupied")
            self._rows[join.row] = _Row(join)
            self._block_holders.update(join.block_ids)
        for row_id, first, block_ids in plan.new_blocks:
            row = self._row(row_id)
            if first != len(row.block_ids):
                raise OracleError(
                    plan.step_id,
                    f"row {row_id} has {len(row.block_ids)} blocks, new ones start at {first}",
                )
            row.block_ids.extend(block_ids)
            self._block_holders.update(block_ids)

    def _row(self, row_id: RowId) -> _Row:
        if row_id not in self._rows:
            raise OracleError(self._step_id, f"row {row_id} is used without having joined")
        return self._rows[row_id]

    def _take_over(self, plan: StepPlan, row: _Row) -> None:
        """Believe in the KV that the plan says is there: what it must be follows from the ids."""
        context = 0
        for position in range(row.join.num_computed_tokens):
            context = self.model.extend(context, row.token_ids[position], plan.weight_version)
            row.contexts.append(context)
        self._verify(plan, row, row.join.num_computed_tokens)

    def _write(self, plan: StepPlan, row: _Row, start: int, stop: int) -> None:
        """Compute positions [start, stop): read all KV before `start`, write theirs."""
        self._verify(plan, row, start)
        for position in range(start, stop):
            context = self._read_tail(plan, row, position)
            token_id = row.token_ids[position] if position < len(row.token_ids) else -1
            if token_id < 0:
                self._fail(plan, row, position, "has no token on the device")
            context = self.model.extend(context, token_id, plan.weight_version)
            block_id, offset = self._locate(plan, row, position)
            if self._block_holders[block_id] != 1:
                holders = self._block_holders[block_id]
                self._fail(plan, row, position, f"is written into a block with {holders} holders")
            self.kv.write(
                block_id, offset, context=context, position=position, kv_epoch=plan.kv_epoch
            )
            del row.contexts[position:]
            row.contexts.append(context)
            # Its own write is no news: verify again only after somebody else's.
            index = position // self.kv.block_size
            row.verified[index : index + 1] = [self.kv.block_serial(block_id)]

    def _verify_drafts(
        self, plan: StepPlan, row: _Row, step: int, num_drafts: int, drawn: _Drawn
    ) -> None:
        """One decode step: write the last token and every draft, keep what the model draws.

        A wrong draft leaves KV of a wrong context behind it, and so does every draft after it:
        nobody may read that before a later step has written the true tokens.
        """
        num_right = self._drafter(plan.step_id + step, row.join.row, num_drafts)
        if not 0 <= num_right <= num_drafts:
            raise ValueError(f"a drafter of {num_drafts} drafts got {num_right} right")
        position = len(row.token_ids) - 1
        self._write(plan, row, position, position + 1)
        self._sample(plan, row, position, drawn)
        for _ in range(num_right):
            # The draft is the token just drawn: accepted.
            position += 1
            self._write(plan, row, position, position + 1)
            self._sample(plan, row, position, drawn)
        num_known = len(row.token_ids)
        for _ in range(num_drafts - num_right):
            wrong = (row.token_ids[-1] + 1) % self.model.vocab_size
            row.token_ids[position + 1 :] = [wrong]
            position += 1
            self._write(plan, row, position, position + 1)
        if num_drafts > num_right:
            row.token_ids[num_known - 1 :] = [drawn[0][-1]]
            del row.contexts[num_known - 1 :]

    def _sample(self, plan: StepPlan, row: _Row, position: int, drawn: _Drawn) -> None:
        """Draw the token after `position` from the context that its slot holds."""
        block_id, offset = self._locate(plan, row, position)
        context = self.kv.read(block_id, offset).context
        token_id, logprob = self.model.sample(context, row.join.sample_index)
        row.token_ids.append(token_id)
        drawn[0].append(token_id)
        drawn[1].append(logprob)

    def _read_tail(self, plan: StepPlan, row: _Row, position: int) -> int:
        """The hash in the slot before `position`, always checked."""
        if position == 0:
            return 0
        block_id, offset = self._locate(plan, row, position - 1)
        slot = self.kv.read(block_id, offset)
        if len(row.contexts) < position or slot.context != row.contexts[position - 1]:
            self._fail(plan, row, position - 1, f"is read and holds {slot}")
        if slot.kv_epoch != plan.kv_epoch and not self._keeps_kv:
            self._fail(plan, row, position - 1, f"is read in another epoch and holds {slot}")
        return slot.context

    def _verify(self, plan: StepPlan, row: _Row, stop: int) -> None:
        """Compare KV of [0, stop) with what it must be, each block once per write into it."""
        num_blocks = -(-stop // self.kv.block_size)
        if num_blocks > len(row.block_ids):
            self._block_id(plan, row, len(row.block_ids) * self.kv.block_size)  # Raises.
        serials = self.kv.block_serials(row.block_ids[:num_blocks])
        if serials == row.verified[:num_blocks]:
            return  # Nobody has written into any of them since.
        row.verified += [-1] * (num_blocks - len(row.verified))
        for index, serial in enumerate(serials):
            if row.verified[index] != serial:
                self._verify_block(plan, row, index, stop)
                row.verified[index] = serial

    def _verify_block(self, plan: StepPlan, row: _Row, index: int, stop: int) -> None:
        size = self.kv.block_size
        block_id = row.block_ids[index]
        for position in range(index * size, min((index + 1) * size, stop)):
            self.num_reads += 1
            slot = self.kv.read(block_id, position % size)
            if position >= len(row.contexts) or (
                (slot.context, slot.position) != (row.contexts[position], position)
            ):
                self._fail(plan, row, position, f"is read and holds {slot}")
            if slot.kv_epoch != plan.kv_epoch and not self._keeps_kv:
                self._fail(plan, row, position, f"is read in another epoch and holds {slot}")

    def _locate(self, plan: StepPlan, row: _Row, position: int) -> tuple[BlockId, int]:
        return self._block_id(plan, row, position), position % self.kv.block_size

    def _block_id(self, plan: StepPlan, row: _Row, position: int) -> BlockId:
        index = position // self.kv.block_size
        if index >= len(row.block_ids):
            raise OracleError(
                plan.step_id,
                f"row {row.join.row} ({row.join.request_id!r}): position {position} is not "
                f"reserved, the row has {len(row.block_ids)} blocks",
            )
        return row.block_ids[index]

    def _fail(self, plan: StepPlan, row: _Row, position: int, detail: str) -> None:
        if self._is_strict:
            raise OracleError(
                plan.step_id,
                f"row {row.join.row} ({row.join.request_id!r}): position {position} {detail}, "
                f"in block {self._block_id(plan, row, position)}",
            )

    def _spans(self, row_id: RowId, row: _Row, start: int, stop: int) -> list[ColumnSpan]:
        """One value per computed position: the hash that it wrote."""
        values: SequenceABC[object] = tuple(row.contexts[start:stop])
        return [
            ColumnSpan(row=row_id, name=name, start=start, values=values) for name in self._columns
        ]
