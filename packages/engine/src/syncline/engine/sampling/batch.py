"""Sampling parameters as columns: kept by state row, gathered into one batch per membership.

`SamplingColumns` belongs to the runner, one line per state row. `SamplingBatch` is what the
pipeline reads: the lines of the rows that sample in one step, on the device, with every feature
that no row asks for left out, so that a plain batch runs plain code. A batch stays valid while the
same rows sample, whatever their positions. Knows no logits.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from syncline.engine.sampling.resolved import ResolvedSampling

# Columns of the float64 table; every value, 32-bit words included, is exact in float64.
_TEMPERATURE: Final = 0
_TOP_K: Final = 1
_TOP_P: Final = 2
_MIN_P: Final = 3
_REPETITION: Final = 4
_FREQUENCY: Final = 5
_PRESENCE: Final = 6
_SEED_LO: Final = 7
_SEED_HI: Final = 8
_SAMPLE_INDEX: Final = 9
_NUM_PROMPT: Final = 10
_NEEDS_SORT: Final = 11
_NUM_COLUMNS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Logits of single (row, token) pairs. `values` is the bias, or a position, per pair."""

    rows_N: Tensor  # int64, index into the batch
    token_ids_N: Tensor  # int64
    values_N: Tensor  # float32 bias; or int64, forbidden while the row's position is below


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Rows whose logits depend on the tokens so far."""

    rows_P: Tensor  # int64, index into the batch
    repetition_P1: Tensor
    frequency_P1: Tensor
    presence_P1: Tensor
    num_prompt_P1: Tensor  # int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Rows that sample from a part of their distribution."""

    log_min_p_R1: Tensor | None  # -inf where a row has no min_p
    sorted_rows_S: Tensor | None  # int64, rows with top_k or top_p; they need a sort
    top_k_S1: Tensor | None  # the vocabulary's size where a row has no top_k
    top_p_S1: Tensor | None  # float64; above 1 where a row has no top_p


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRows:
    """Rows that want the likeliest tokens listed, and how many each wants."""

    rows: tuple[int, ...]  # index into the batch
    counts: tuple[int, ...]
    rows_L: Tensor  # int64, `rows` on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """What the rows of a step ask for; R rows in the order of their logits."""

    num_rows: int
    is_all_greedy: bool
    greedy_R: Tensor | None  # bool; None when no row is greedy
    temperature_R1: Tensor | None  # 1 for greedy rows; None when it is 1 for all
    seeds_R: Tensor  # int64, the bits of the seeds
    sample_index_R: Tensor
    forbidden: Sparse | None
    bias: Sparse | None
    penalties: Penalties | None
    filters: Filters | None
    top_logprobs: TopRows | None


class SamplingColumns:
    """The sampling of every state row. Owned by the runner; a row is set when it is joined."""

    __slots__ = ("_device", "_rows", "_table")

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self._table = torch.zeros((num_rows, _NUM_COLUMNS), dtype=torch.float64)
        self._table[:, _TEMPERATURE] = 1.0
        self._rows: list[ResolvedSampling | None] = [None] * num_rows

    def join(
        self, row: int, sampling: ResolvedSampling, sample_index: int, num_prompt_tokens: int
    ) -> None:
        """From now on `row` holds one sample of a request."""
        params = sampling.params
        # In two words: float64 has no place for all 64 bits.
        seed_hi, seed_lo = divmod(sampling.seed, 1 << 32)
        is_greedy = params.is_greedy
        has_top_k = not is_greedy and 0 < params.top_k < sampling.true_vocab_size
        has_top_p = not is_greedy and params.top_p < 1.0
        self._table[row] = torch.tensor(
            [
                1.0 if is_greedy else params.temperature,
                params.top_k if has_top_k else sampling.true_vocab_size,
                params.top_p if has_top_p else 2.0,
                0.0 if is_greedy else params.min_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
                seed_lo,
                seed_hi,
                sample_index,
                num_prompt_tokens,
                has_top_k or has_top_p,
            ],
            dtype=torch.float64,
        )
        self._rows[row] = sampling

    def leave(self, row: int) -> None:
        self._rows[row] = None

    def sampling(self, row: int) -> ResolvedSampling:
        sampling = self._rows[row]
        assert sampling is not None, f"row {row} holds no sequence"
        return sampling

    def num_prompt_tokens(self, row: int) -> int:
        return int(self._table[row, _NUM_PROMPT])

    def batch(self, rows: tuple[int, ...]) -> SamplingBatch:
        """The columns of `rows`, in that order."""
        samplings = [self.sampling(row) for row in rows]
        table = self._table[list(rows)]
        greedy = [sampling.params.is_greedy for sampling in samplings]
        has_temperature = bool((table[:, _TEMPERATURE] != 1.0).any())
        return SamplingBatch(
            num_rows=len(rows),
            is_all_greedy=all(greedy),
            greedy_R=self._send(torch.tensor(greedy)) if any(greedy) else None,
            temperature_R1=(
                self._column(table, _TEMPERATURE, torch.float32)[:, None]
                if has_temperature
                else None
            ),
            seeds_R=self._column(table, _SEED_LO, torch.int64)
            | (self._column(table, _SEED_HI, torch.int64) << 32),
            sample_index_R=self._column(table, _SAMPLE_INDEX, torch.int64),
            forbidden=self._forbidden(samplings, table),
            bias=self._bias(samplings),
            penalties=self._penalties(samplings, table),
            filters=self._filters(table),
            top_logprobs=self._top_logprobs(samplings),
        )

    def _forbidden(self, samplings: list[ResolvedSampling], table: Tensor) -> Sparse | None:
        triples = [
            (index, token_id, sampling.params.min_tokens + int(num_prompt))
            for index, (sampling, num_prompt) in enumerate(
                zip(samplings, table[:, _NUM_PROMPT].tolist(), strict=True)
            )
            for token_id in sampling.forbidden_token_ids
        ]
        return self._sparse(triples, torch.int64) if triples else None

    def _bias(self, samplings: list[ResolvedSampling]) -> Sparse | None:
        triples = [
            (index, token_id, value)
            for index, sampling in enumerate(samplings)
            for token_id, value in (sampling.params.logit_bias or {}).items()
        ]
        return self._sparse(triples, torch.float32) if triples else None

    def _sparse(
        self, triples: list[tuple[int, int, int]] | list[tuple[int, int, float]], dtype: torch.dtype
    ) -> Sparse:
        rows, token_ids, values = zip(*triples, strict=True)
        return Sparse(
            rows_N=self._send(torch.tensor(rows)),
            token_ids_N=self._send(torch.tensor(token_ids)),
            values_N=self._send(torch.tensor(values, dtype=dtype)),
        )

    def _penalties(self, samplings: list[ResolvedSampling], table: Tensor) -> Penalties | None:
        indices = [i for i, sampling in enumerate(samplings) if sampling.needs_history]
        if not indices:
            return None
        part = table[indices]
        return Penalties(
            rows_P=self._send(torch.tensor(indices)),
            repetition_P1=self._column(part, _REPETITION, torch.float32)[:, None],
            frequency_P1=self._column(part, _FREQUENCY, torch.float32)[:, None],
            presence_P1=self._column(part, _PRESENCE, torch.float32)[:, None],
            num_prompt_P1=self._column(part, _NUM_PROMPT, torch.int64)[:, None],
        )

    def _filters(self, table: Tensor) -> Filters | None:
        indices = table[:, _NEEDS_SORT].nonzero()[:, 0]
        has_min_p = bool((table[:, _MIN_P] > 0.0).any())
        if not has_min_p and indices.numel() == 0:
            return None
        has_sort = indices.numel() > 0
        part = table[indices]
        return Filters(
            log_min_p_R1=(
                self._send(table[:, _MIN_P].log().to(torch.float32))[:, None] if has_min_p else None
            ),
            sorted_rows_S=self._send(indices) if has_sort else None,
            top_k_S1=self._column(part, _TOP_K, torch.int64)[:, None] if has_sort else None,
            top_p_S1=self._column(part, _TOP_P, torch.float64)[:, None] if has_sort else None,
        )

    def _top_logprobs(self, samplings: list[ResolvedSampling]) -> TopRows | None:
        wanted = {i: sampling.params.logprobs for i, sampling in enumerate(samplings)}
        counts = {i: count for i, count in wanted.items() if count}
        if not counts:
            return None
        return TopRows(
            rows=tuple(counts),
            counts=tuple(counts.values()),
            rows_L=self._send(torch.tensor(list(counts))),
        )

    def _column(self, table: Tensor, column: int, dtype: torch.dtype) -> Tensor:
        return self._send(table[:, column].to(dtype))

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)
