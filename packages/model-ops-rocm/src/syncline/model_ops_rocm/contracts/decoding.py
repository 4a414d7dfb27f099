"""Contracts of what lies between a step's sampled ids and the next step's inputs; knows no backend.

Legend beside the package's: S state rows (sequences that the device remembers), R rows of a step,
Q = 1 + K tokens of a row at most, K drafts, T places of a step, E stop ids, M entries of a block
table, L places of a history, BS block_size. Ids, numbers and slots are int32 or int64.
"""

from dataclasses import dataclass
from enum import IntFlag
from typing import Protocol

import torch


class DecodeFault(IntFlag):
    """Why the device stopped a row that no rule had ended; nothing of it was written wrongly."""

    MISSING_BLOCK = 1  # a position of the next step has no block in the table
    BAD_COUNT = 2  # the number of accepted drafts was not in [0, Q)
    BAD_TOKEN = 4  # a token of the step was negative: its logits were no numbers
    BAD_PLACES = 8  # query_start_loc gives the row no place, more than Q, or places beyond T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeState:
    """What the device remembers of sequences, by state row; the caller fills a row at its join.

    num_tokens_S      tokens that exist, the prompt's included; updated
    last_ids_S        the last of them, whose keys and values the next step computes; updated
    is_alive_S        bool, whether the row goes on; updated
    faults_S          int32, `DecodeFault` bits, or-ed in; updated
    min_num_tokens_S  a stop id ends the row only if it keeps so many tokens, the prompt's included
    max_num_tokens_S  the row ends where it has so many
    stop_ids_SE       ids that end the row as its last token; -1 where it has fewer than E
    block_tables_SM   block ids in order; -1, or any negative, where there is none
    block_size        tokens of a block
    token_ids_SL      every token of the row by position; what is kept is appended. None: not wanted

    Vectors are contiguous, and so is each row of a table.
    """

    num_tokens_S: torch.Tensor
    last_ids_S: torch.Tensor
    is_alive_S: torch.Tensor
    faults_S: torch.Tensor
    min_num_tokens_S: torch.Tensor
    max_num_tokens_S: torch.Tensor
    stop_ids_SE: torch.Tensor
    block_tables_SM: torch.Tensor
    block_size: int
    token_ids_SL: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeInputs:
    """One step: which rows it has, and what the model reads. Vectors are contiguous.

    Written by `Advance` where it lays out a step
    input_ids_T, positions_T   a row's last token, then its drafts, and where they stand
    slot_mapping_T             where their keys and values go; -1: nowhere
    seq_lens_R                 tokens of KV with this step's; 0 for a row that is not alive

    Written by `Advance` where it keeps tokens
    num_new_R                  tokens that the step just done yielded; 0 where it did not run

    Read
    query_start_loc_R1         row r has places [r-th, r+1-th); None: place r alone, and T = R
    rows_R                     the state row of each row; None: the same number. -1, or any other
                               that does not exist, is padding; no two name one that is alive
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    seq_lens_R: torch.Tensor
    num_new_R: torch.Tensor
    query_start_loc_R1: torch.Tensor | None = None
    rows_R: torch.Tensor | None = None


class Advance(Protocol):
    """From the tokens of a step to the inputs of the next, without the host."""

    def __call__(
        self,
        tokens_RQ: torch.Tensor | None,
        state: DecodeState,
        out: DecodeInputs,
        *,
        num_accepted_R: torch.Tensor | None = None,
        drafts_RK: torch.Tensor | None = None,
        lays_out: bool = True,
    ) -> DecodeInputs:
        """Keep a step's tokens up to the first stop, and lay out the next step of who goes on.

        A window of w steps begins with a call without tokens, which only lays out; w - 1 calls
        between its steps do both; the last one only keeps (`lays_out=False`), because the next
        window's blocks, drafts and rows are not known yet.

        A row that is alive yields its accepted drafts and one token more:
        tokens_RQ[r, :num_accepted_R[r] + 1], or the one token of Q = 1 without `num_accepted_R`.
        They are kept up to the earliest that ends it: a stop id with `min_num_tokens_S` kept, or
        `max_num_tokens_S` kept (or L, if smaller). What was kept moves num_tokens_S (and the
        history); who ended is no longer alive.

        Who goes on gets in its places first its last token, at position num_tokens - 1, then
        `drafts_RK[r]`, as many as there are places, Q - 1 at most. A draft of -1 (every one,
        without `drafts_RK`) is computed as id 0: its keys and values are numbers, and it is never
        accepted. The slot is block_tables_SM[., position // BS] * BS + position % BS. Without
        tokens and drafts Q is 1.

        A row that is not alive keeps all its numbers: its places, and those that no row has, get
        id 0, position 0 and slot -1, its seq_len is 0. A row that cannot go on, for a reason in
        `DecodeFault`, is refused: the bit is set in faults_S, the row is no longer alive, nothing
        is written for it. Stop sequences and stop strings are the host's: what comes after them is
        surplus. Reads no value on the host. Returns `out`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rejection:
    """What classical rejection needs to know of each row's draws; contiguous vectors.

    Uniforms are those of `reference.philox`, with a number of their own for whether a draft is
    accepted (PURPOSE_ACCEPT) and for the token after the accepted ones (PURPOSE_RECOVER): a
    drafter that draws must use another.

    seeds_R            int64, the bits of each request's seed
    sample_index_R     int32 or int64
    positions_R        int32 or int64, of the row's first draft; negative: padding, nothing is read
    draft_logits_RKV   what each draft was drawn from, by softmax at the row's temperature; an id
                       that the drafter's filters dropped is -inf. None: the draft was certain, as
                       a greedy drafter's or a looked-up one is
    temperature_R      float32; 0 is greedy: the likeliest id, the lowest on a tie. None: 1
    """

    seeds_R: torch.Tensor
    sample_index_R: torch.Tensor
    positions_R: torch.Tensor
    draft_logits_RKV: torch.Tensor | None = None
    temperature_R: torch.Tensor | None = None


class VerifyDrafts(Protocol):
    """Which of each row's drafts hold, and the one token that follows them."""

    def workspace_bytes(
        self, drafts_RK: torch.Tensor, target: torch.Tensor, rejection: Rejection | None = None
    ) -> int:
        """What `workspace` must hold for a call with tensors of these shapes."""
        ...

    def __call__(
        self,
        drafts_RK: torch.Tensor,
        target: torch.Tensor,
        *,
        rejection: Rejection | None = None,
        query_start_loc_R1: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        workspace: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens_RQ, num_accepted_R), int64 and int32; new, or `out` of int32 or int64 each.

        A row's drafts end at its first -1. Place i of a row is where the target saw its last token
        (i = 0) or draft i - 1, so what the target says there is about draft i. `target` holds it
        as [R, Q], or as [T] with row r at [query_start_loc_R1[r], query_start_loc_R1[r + 1]); a
        row has at most its places' number less one of drafts. Row r of tokens_RQ is its accepted
        drafts, then one token more (recovered, or bonus if every draft held), then -1. A row
        without places, or with some that `target` has not, has num_accepted -1 and -1 throughout;
        `advance` stops it.

        Exact, without `rejection`: `target` is int32 or int64, the ids that the target drew at the
        places. A draft is accepted if and only if it equals that id, and so do all before it; the
        token after them is the id drawn there. So tokens are those of a run without drafts,
        whatever drew them.

        By `rejection`: `target` has a last dimension V of logits, float32, bfloat16 or float16, an
        id that filters dropped being -inf. With p and q the target's and the drafter's
        probabilities, draft d is accepted if u q(d) < p(d); the token in the place of the first
        that is not is drawn from max(p - q, 0), or from p where rounding leaves nothing of that;
        the bonus from p: the first id whose running sum of weights, in order of ids, passes u times
        the whole. Every token is distributed as the target's own. Sums as in the contracts of the
        logits: backends may differ where u lies within 2^-20 of an edge. Where logits or the
        temperature are no numbers, the token is -1, which `advance` refuses.
        """
        ...
