"""The device's own memory of every running sequence, by state row.

A row holds a sequence from its join until a plan's `left`. Its tokens are all here, those it
sampled appended by the step that sampled them: the next step needs nothing from the host.
The last row is the reserved one: its table points at the reserved block, for padding and warm-up.

Invariants, for a row that holds a sequence
    token_ids[row, :num_tokens[row]]   its tokens, prompt first
    block_table[row]                   its blocks in order, then the reserved block
    known_num_tokens[row]              the host's copy of num_tokens; exact because without drafts a
                                       row that yields, yields exactly one token
    request_ids[row]                   whose sequence it is, for messages
"""

import torch
from torch import Tensor

from syncline.engine.runner.settings import RunnerSettings
from syncline.graph_lifecycle import Arena, Tag
from syncline.scheduler_core import RowJoin, StepPlan


class DeviceState:
    """Tensors under the static tag; S rows, L token places, M blocks per row."""

    __slots__ = (
        "_reserved_block",
        "block_table_SM",
        "known_num_tokens",
        "num_tokens_S",
        "request_ids",
        "token_ids_SL",
    )

    def __init__(self, arena: Arena, settings: RunnerSettings) -> None:
        num_rows = settings.max_num_seqs + 1
        self._reserved_block = settings.reserved_block

        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return arena.allocate(f"row_state.{name}", shape, dtype, tag=Tag.STATIC)

        self.token_ids_SL = allocate("token_ids", (num_rows, settings.max_model_len), torch.int32)
        self.block_table_SM = allocate(
            "block_table", (num_rows, settings.max_blocks_per_seq), torch.int32
        )
        self.num_tokens_S = allocate("num_tokens", (num_rows,), torch.int64)
        self.known_num_tokens = [0] * num_rows
        self.request_ids = [""] * num_rows
        self.token_ids_SL.zero_()
        self.block_table_SM.fill_(self._reserved_block)
        self.num_tokens_S.fill_(1)  # A padding row computes its first token, again and again.

    def apply(self, plan: StepPlan) -> None:
        """What the plan changes before its step: rows left and joined, blocks added."""
        for row in plan.left:
            self.block_table_SM[row].fill_(self._reserved_block)
        for join in plan.joined:
            self._join(join)
        if plan.new_blocks:
            rows: list[int] = []
            columns: list[int] = []
            blocks: list[int] = []
            for row, first, block_ids in plan.new_blocks:
                rows += [row] * len(block_ids)
                columns += range(first, first + len(block_ids))
                blocks += block_ids
            index = torch.tensor((rows, columns), device=self.block_table_SM.device)
            self.block_table_SM[index[0], index[1]] = torch.tensor(
                blocks, dtype=torch.int32, device=index.device
            )

    def append(self, rows_R: Tensor, positions_R: Tensor, token_ids_R: Tensor) -> None:
        """Row r's token at `positions_R` is `token_ids_R`, and its last; nothing is read back."""
        self.token_ids_SL[rows_R, positions_R] = token_ids_R.to(torch.int32)
        self.num_tokens_S[rows_R] = positions_R + 1

    def _join(self, join: RowJoin) -> None:
        device = self.token_ids_SL.device
        num_tokens = len(join.token_ids)
        self.token_ids_SL[join.row, :num_tokens] = torch.tensor(
            join.token_ids, dtype=torch.int32, device=device
        )
        self.num_tokens_S[join.row] = num_tokens
        self.known_num_tokens[join.row] = num_tokens
        self.request_ids[join.row] = join.request_id
        self.block_table_SM[join.row].fill_(self._reserved_block)
        self.block_table_SM[join.row, : len(join.block_ids)] = torch.tensor(
            join.block_ids, dtype=torch.int32, device=device
        )
