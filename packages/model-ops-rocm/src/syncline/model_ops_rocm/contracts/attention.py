"""Contracts of the ops that touch the KV cache; knows no backend. Legend: package docstring.

A layer's cache is two tensors, keys and values, [NB, K, BS, D] by index. Slot s is offset s % BS of
block s // BS. What a block holds, and whether it is held, is not known here. Both tensors are
contiguous; the `torch` backend also takes keys that are the transpose(2, 3) of a contiguous
[NB, K, D, BS], which it attends faster in float32 on a CPU.

With `layout` they are what `KVPool.specs` says instead, "k" and "v" and, as `kv_scales`, "k_scale"
and "v_scale"; BS is its kernel block size, and block ids count kernel blocks. Each implementation
says in `kv_support` which layouts it takes; another is refused, never converted.
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Protocol

import torch

from syncline.model_ops_rocm.kv.layout import KVLayout
from syncline.model_ops_rocm.kv.support import KVSupport

KVScales = tuple[torch.Tensor, torch.Tensor]  # of keys and of values, float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMetadata:
    """Which query tokens of a step belong to which row, and where each row's KV is.

    Rows [0, num_decode_rows) have `decode_query_len` query tokens each, 1 or a token and its
    drafts; the rest have any number. Row r's queries are tokens
    [query_start_loc[r], query_start_loc[r+1]); they are the last of its seq_lens[r] tokens of KV,
    whose block ids are the first ceil(seq_lens[r] / BS) entries of block_tables[r]; further entries
    may be anything. seq_lens[r] = 0 marks a padding row: its output is zero. A length that is
    negative, or more than the table or `max_seq_len` has room for, is a ValueError where the host
    can see it, in the lists and on the CPU; on a device nothing beyond the table is read.

    One object describes one step. An implementation may remember what it derived from the object,
    so the tensors must keep their values while it is in use, and the next step is a new object.
    The lists are host copies of the tensors. Without them nothing derived is remembered and rows
    are as long as `block_tables` is wide, or `max_seq_len` if that is given, so that a recorded
    step can be replayed with other lengths; rows beyond the decode rows then need `max_query_len`,
    which none of them may exceed, and the step may have more tokens than query_start_loc[R]: their
    output is zero.
    """

    # int32 or int64, the first two contiguous.
    query_start_loc: torch.Tensor  # [R + 1], tokens, cumulative
    seq_lens: torch.Tensor  # [R], tokens of KV including this step's
    block_tables: torch.Tensor  # [R, M], block ids
    num_decode_rows: int
    query_start_list: SequenceABC[int] | None = None
    seq_len_list: SequenceABC[int] | None = None
    decode_query_len: int = 1
    max_query_len: int | None = None
    max_seq_len: int | None = None

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode_rows * self.decode_query_len

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the step, or None if only the device knows how many there are."""
        if self.query_start_list is not None:
            return self.query_start_list[-1]
        is_decode = self.num_decode_rows == self.seq_lens.shape[0]
        return self.num_decode_tokens if is_decode else None

    def __post_init__(self) -> None:
        if self.seq_lens.ndim != 1:
            raise ValueError(
                f"AttentionMetadata: seq_lens must be [R], got {list(self.seq_lens.shape)}"
            )
        num_rows = self.seq_lens.shape[0]
        if self.block_tables.ndim != 2 or self.block_tables.shape[0] != num_rows:
            raise ValueError(
                f"AttentionMetadata: block_tables must be [{num_rows}, M] for seq_lens"
                f" [{num_rows}], got {list(self.block_tables.shape)}"
            )
        if self.query_start_loc.shape != (num_rows + 1,):
            raise ValueError(
                f"AttentionMetadata: query_start_loc must be [{num_rows + 1}],"
                f" got {list(self.query_start_loc.shape)}"
            )
        if not 0 <= self.num_decode_rows <= num_rows:
            raise ValueError(
                f"AttentionMetadata: num_decode_rows must be in [0, {num_rows}],"
                f" got {self.num_decode_rows}"
            )
        for name, value in (
            ("decode_query_len", self.decode_query_len),
            ("max_query_len", self.max_query_len),
            ("max_seq_len", self.max_seq_len),
        ):
            if value is not None and value < 1:
                raise ValueError(f"AttentionMetadata: {name} must be positive, got {value}")
        self._check_lists(num_rows)

    def _check_lists(self, num_rows: int) -> None:
        if self.query_start_list is None or self.seq_len_list is None:
            if self.query_start_list is not self.seq_len_list:
                raise ValueError(
                    "AttentionMetadata: query_start_list and seq_len_list go together, got one"
                )
            if self.num_decode_rows != num_rows and self.max_query_len is None:
                raise ValueError(
                    f"AttentionMetadata: {num_rows - self.num_decode_rows} rows beyond"
                    " num_decode_rows need query_start_list and seq_len_list, or max_query_len,"
                    " got None"
                )
            return
        if len(self.query_start_list) != num_rows + 1 or len(self.seq_len_list) != num_rows:
            raise ValueError(
                "AttentionMetadata: query_start_list and seq_len_list must have"
                f" {num_rows + 1} and {num_rows} entries,"
                f" got {len(self.query_start_list)} and {len(self.seq_len_list)}"
            )
        decode_starts = self.query_start_list[: self.num_decode_rows + 1]
        step = self.decode_query_len
        if list(decode_starts) != list(range(0, self.num_decode_tokens + 1, step)):
            each = "one token" if step == 1 else f"{step} tokens"
            raise ValueError(
                "AttentionMetadata: query_start_list must start at 0 and give the first"
                f" num_decode_rows={self.num_decode_rows} rows {each} each,"
                f" got {list(decode_starts)}"
            )
        starts = list(self.query_start_list)
        if starts != sorted(starts):
            raise ValueError(f"AttentionMetadata: query_start_list must not decrease, got {starts}")


class KVWrite(Protocol):
    """Store a step's keys and values at their slots."""

    @property
    def kv_support(self) -> KVSupport:
        """The layouts it takes."""
        ...

    def __call__(  # noqa: PLR0913 - what a pool is made of
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        may_skip: bool = True,
        layout: KVLayout | None = None,
        kv_scales: KVScales | None = None,
    ) -> None:
        """k, v [T, K, D] into caches [NB, K, BS, D] of the same dtype, in place. No rounding.

        With a `layout` without scales k and v have its dtype, and are stored as they are. With
        scales they are float32, bfloat16 or float16, and a code is x / scale, correctly rounded,
        clamped to the type's range, then to nearest even; NaN stays NaN. Scales per tensor and per
        head are read from `kv_scales`, and are positive. A scale per token and head is written: the
        amax of the D elements / the type's maximum, 1 for zeros; NaN, with codes of 0, if one of
        them is not finite.

        `slot_mapping` int64 or int32 [T]: a slot below NB * BS, or -1, which writes nothing. Other
        negative or too large slots are a ValueError with nothing written where the device can tell
        (the CPU does), else they write nothing. No two tokens may name one slot. `may_skip=False`
        promises that there is no -1, which spares the look at the values; on the CPU a recorded
        step needs it.
        """
        ...


class PagedAttention(Protocol):
    """Causal attention of a step's queries over keys and values read from the cache."""

    @property
    def kv_support(self) -> KVSupport:
        """The layouts it takes."""
        ...

    def workspace_bytes(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        layout: KVLayout | None = None,
        batch_invariant: bool = False,
    ) -> int:
        """What `workspace` must hold for such a call, or for one with fewer rows or tokens."""
        ...

    def counters_size(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        layout: KVLayout | None = None,
        batch_invariant: bool = False,
    ) -> int:
        """How many `counters` suffice for such a call; 0 where none are used."""
        ...

    def __call__(  # noqa: PLR0913 - the variants of one op
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        layout: KVLayout | None = None,
        kv_scales: KVScales | None = None,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        lse_TN: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """softmax(q k^T * scale) v for q [T, N, D]; the result is [T, N, D].

        T is query_start_loc[R]. Everything attended is read from the cache: this step's keys and
        values are written first. Token i of a row's n queries is its token p = seq_len - n + i and
        sees the row's tokens [0, p], or the last `window` of them. No value outside those is read,
        or it cannot reach the result, NaN included. Scores and softmax in float32; the weights,
        times the scale of each value if scales are per token, are rounded to q's dtype before the
        product with v, whose sums are in float32 or better; one rounding to q's dtype. `scale` is
        positive and finite.

        `sinks_N` [N] floating is one more score per head, without a value. `lse_TN` float32 [T, N]
        receives log(sum(exp(score))), the sink included; -inf where nothing is attended.

        A row's result depends on the rows it shares a step with by rounding at most; with
        `batch_invariant` not at all, nor on how its tokens were divided over steps.

        `workspace` is uint8 of at least `workspace_bytes`. Without `counters`, parts of a row's KV
        are merged by a launch more.
        """
        ...


class MergeStates(Protocol):
    """Attention over parts of a context, as attention over all of it."""

    def __call__(
        self,
        parts_PTNH: torch.Tensor,
        lse_PTN: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse_TN: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """sum_p(parts * exp(lse)) / sum_p(exp(lse)) for [P, T, N, D] and float32 [P, T, N].

        In float32, rounded once to the dtype of the parts. `lse_TN` float32 [T, N] receives the log
        of the divisor. A part whose lse is -inf cannot reach the result, NaN included; where all
        are, the result is zero and its lse -inf.
        """
        ...


class KVCopyBlocks(Protocol):
    """Copy whole blocks within a layer's cache."""

    def workspace_bytes(self, k_cache: torch.Tensor, max_pairs: int) -> int:
        """What `workspace` must hold for up to `max_pairs` pairs of blocks of such a cache."""
        ...

    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        pairs: SequenceABC[tuple[int, int]] | torch.Tensor,
        *,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """For each (source, destination), in both caches; all sources are read before any write.

        The caches are of any layout, with block ids that count its kernel blocks; scales per token,
        where they count blocks first, are copied by a call of their own.

        0 <= id < NB, and no destination twice, else ValueError with nothing copied.

        A recorded step passes `pairs` as a contiguous int64 or int32 tensor [C, 2] on the device,
        and a `workspace`, uint8 of at least `workspace_bytes(k_cache, C)`; a pair with an id of -1
        copies nothing. What is wrong in a tensor is refused where the device can tell (the CPU
        does); else a pair with an id outside copies nothing.
        """
        ...
