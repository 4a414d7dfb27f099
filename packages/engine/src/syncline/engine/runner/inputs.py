"""From a plan and the rows' state to what the model computes: index arithmetic, no loop per token.

What does not change while the same rows decode (`Membership`, block tables between two new blocks)
is made once and used again. Knows no weights and no logits.

T tokens of the step, decode rows first; Y rows that yield a token, in plan order; R rows that
attend: the decode rows, then one per prefill chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.engine.models.base import ModelInputs
from syncline.engine.runner.settings import RunnerSettings
from syncline.engine.runner.state import DeviceState
from syncline.engine.sampling.batch import SamplingBatch, SamplingColumns
from syncline.model_ops_rocm import AttentionMetadata
from syncline.scheduler_core import PrefillChunk, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Membership:
    """The rows of a step that yield, and all that holds as long as exactly they do."""

    rows: tuple[int, ...]
    request_ids: tuple[str, ...]
    rows_Y: Tensor  # int64
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptSpan:
    """Positions [start, stop) of a row's prompt, start >= 1, whose tokens are to be scored.

    The hidden states at [start - 1, stop - 1) predict them. is_head: position 0 belongs to the
    span as well, with nothing to score.
    """

    row: int
    request_id: str
    start: int
    stop: int
    num_top: int
    is_head: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """One step, ready to run. The model returns the Y yielding tokens, then the prompt spans'."""

    model: ModelInputs
    members: Membership
    positions_Y: Tensor  # int64, of the tokens to be sampled
    prompt_spans: tuple[PromptSpan, ...]
    is_decode_only: bool


class InputBuilder:
    """Builds one plan's inputs after another; remembers what the next plan can use again."""

    __slots__ = (
        "_block_size",
        "_columns",
        "_decode_starts",
        "_members",
        "_state",
        "_tables",
        "_tables_rows",
        "_tables_width",
    )

    def __init__(
        self, state: DeviceState, columns: SamplingColumns, settings: RunnerSettings
    ) -> None:
        self._state = state
        self._columns = columns
        self._block_size = settings.block_size
        device = settings.device
        self._decode_starts = torch.arange(
            settings.max_num_seqs + 1, dtype=torch.int32, device=device
        )
        self._members: Membership | None = None
        self._tables: Tensor | None = None
        self._tables_rows: Membership | None = None
        self._tables_width = 0

    def build(self, plan: StepPlan) -> StepInputs:
        """Call once per plan, after the state has applied it; advances the host's lengths."""
        if plan.left or plan.joined:
            self._members = None
        if plan.new_blocks:
            self._tables = None
        if not plan.prefill_chunks:
            return self._build_decode(plan)
        return self._build_mixed(plan)

    def _build_decode(self, plan: StepPlan) -> StepInputs:
        members = self._membership(plan.decode_rows)
        known = self._state.known_num_tokens
        seq_lens = [known[row] for row in members.rows]
        num_tokens_Y = self._state.num_tokens_S.index_select(0, members.rows_Y)
        positions_T = num_tokens_Y - 1
        num_rows = len(members.rows)
        attention = AttentionMetadata(
            query_start_loc=self._decode_starts[: num_rows + 1],
            seq_lens=num_tokens_Y.to(torch.int32),
            block_tables=self._decode_tables(members, max(seq_lens)),
            num_decode_rows=num_rows,
            query_start_list=range(num_rows + 1),
            seq_len_list=seq_lens,
        )
        model = self._model_inputs(members.rows_Y, positions_T, attention, None)
        self._advance(members.rows)
        return StepInputs(
            model=model,
            members=members,
            positions_Y=num_tokens_Y,
            prompt_spans=(),
            is_decode_only=True,
        )

    def _build_mixed(self, plan: StepPlan) -> StepInputs:
        decode_rows, chunks = plan.decode_rows, plan.prefill_chunks
        num_decode = len(decode_rows)
        final_rows = tuple(chunk.row for chunk in chunks if chunk.is_final)
        members = self._membership(decode_rows + final_rows if final_rows else decode_rows)
        starts = list(range(num_decode + 1))
        for chunk in chunks:
            starts.append(starts[-1] + chunk.stop - chunk.start)
        known = self._state.known_num_tokens
        seq_lens = [known[row] for row in decode_rows] + [chunk.stop for chunk in chunks]

        device = self._state.num_tokens_S.device
        rows_R = torch.tensor(decode_rows + tuple(c.row for c in chunks), device=device)
        decode_num_tokens = self._state.num_tokens_S.index_select(0, rows_R[:num_decode])
        positions_T = torch.cat(
            [decode_num_tokens - 1, *(torch.arange(c.start, c.stop, device=device) for c in chunks)]
        )
        starts_R = torch.tensor(starts, dtype=torch.int32, device=device)
        # output_size spares the device a look at the sum.
        rows_T = rows_R.repeat_interleave(starts_R.diff(), output_size=starts[-1])
        seq_lens_R = torch.cat(
            [
                decode_num_tokens.to(torch.int32),
                torch.tensor(seq_lens[num_decode:], dtype=torch.int32, device=device),
            ]
        )
        attention = AttentionMetadata(
            query_start_loc=starts_R,
            seq_lens=seq_lens_R,
            block_tables=self._block_tables(rows_R, max(seq_lens)),
            num_decode_rows=num_decode,
            query_start_list=starts,
            seq_len_list=seq_lens,
        )
        spans, span_tokens = self._prompt_spans(chunks, starts[num_decode:])
        yielding = list(range(num_decode)) + [
            starts[num_decode + i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.is_final
        ]
        out_S = torch.tensor(yielding + span_tokens, dtype=torch.int64, device=device)
        model = self._model_inputs(rows_T, positions_T, attention, out_S)
        self._advance(members.rows)
        return StepInputs(
            model=model,
            members=members,
            positions_Y=positions_T[out_S[: len(yielding)]] + 1,
            prompt_spans=spans,
            is_decode_only=False,
        )

    def _membership(self, rows: tuple[int, ...]) -> Membership:
        members = self._members
        if members is None or members.rows is not rows:
            members = Membership(
                rows=rows,
                request_ids=tuple(self._state.request_ids[row] for row in rows),
                rows_Y=torch.tensor(rows, dtype=torch.int64, device=self._decode_starts.device),
                sampling=self._columns.batch(rows),
            )
            self._members = members
        return members

    def _model_inputs(
        self,
        rows_T: Tensor,
        positions_T: Tensor,
        attention: AttentionMetadata,
        out_S: Tensor | None,
    ) -> ModelInputs:
        block_T = self._state.block_table_SM[rows_T, positions_T // self._block_size]
        return ModelInputs(
            token_ids_T=self._state.token_ids_SL[rows_T, positions_T],
            positions_T=positions_T,
            slot_mapping_T=block_T * self._block_size + positions_T % self._block_size,
            attention=attention,
            out_S=out_S,
        )

    def _decode_tables(self, members: Membership, max_seq_len: int) -> Tensor:
        """The members' block tables; made again when a row has a new block or a table widens."""
        width = -(-max_seq_len // self._block_size)
        if self._tables is None or self._tables_rows is not members or self._tables_width != width:
            self._tables = self._block_tables(members.rows_Y, max_seq_len)
            self._tables_rows = members
            self._tables_width = width
        return self._tables

    def _block_tables(self, rows_R: Tensor, max_seq_len: int) -> Tensor:
        width = -(-max_seq_len // self._block_size)
        return self._state.block_table_SM[:, :width].index_select(0, rows_R)

    def _prompt_spans(
        self, chunks: tuple[PrefillChunk, ...], starts: list[int]
    ) -> tuple[tuple[PromptSpan, ...], list[int]]:
        """What prompt_logprobs ask of these chunks, and the step's tokens that predict it."""
        spans: list[PromptSpan] = []
        tokens: list[int] = []
        for chunk, first_token in zip(chunks, starts, strict=False):
            num_top = self._columns.sampling(chunk.row).params.prompt_logprobs
            if num_top is None:
                continue
            stop = min(chunk.stop + 1, self._columns.num_prompt_tokens(chunk.row))
            if stop <= chunk.start + 1 and chunk.start > 0:
                continue  # Recomputed output after the prompt: nothing of it is asked for.
            spans.append(
                PromptSpan(
                    row=chunk.row,
                    request_id=self._state.request_ids[chunk.row],
                    start=chunk.start + 1,
                    stop=max(stop, chunk.start + 1),
                    num_top=num_top,
                    is_head=chunk.start == 0,
                )
            )
            tokens += range(first_token, first_token + spans[-1].stop - spans[-1].start)
        return tuple(spans), tokens

    def _advance(self, rows: tuple[int, ...]) -> None:
        known = self._state.known_num_tokens
        for row in rows:
            known[row] += 1
