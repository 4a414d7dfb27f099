"""From logits to tokens and logprobs in PyTorch; knows no request.

A row of a result is a function of that row alone.
"""

import torch

from syncline.model_ops_rocm.arguments.logits import (
    COMBINE_PARTIALS,
    LOGITS_PARTIALS,
    NUM_PARTIALS,
    SAMPLE,
    TOKEN_LOGPROBS,
    TOP_LOGPROBS,
    check_distribution,
    check_draw,
    check_floats,
    check_indices,
    check_logits,
    check_num_top,
    check_out,
    check_pair_out,
    check_partials,
    check_shard,
    inputs_of,
)
from syncline.model_ops_rocm.checks import require_kind
from syncline.model_ops_rocm.contracts.logits import (
    PLAIN,
    WHOLE,
    Distribution,
    Draw,
    Vocabulary,
)
from syncline.model_ops_rocm.reference.distribution import (
    NAN,
    NEG_INF,
    Rows,
    best_and_others,
    combined,
    divisors,
    real_logits,
    rows_of,
)
from syncline.model_ops_rocm.reference.philox import PURPOSE_SAMPLE, uniforms

_Pair = tuple[torch.Tensor, torch.Tensor]


class _NoWorkspace:
    """What these ops need while they run, PyTorch allocates."""

    __slots__ = ()

    def workspace_bytes(self, logits_RV: torch.Tensor) -> int:
        return 0


class TorchSample(_NoWorkspace):
    """See `contracts.Sample`."""

    __slots__ = ()

    def __call__(
        self,
        logits_RV: torch.Tensor,
        distribution: Distribution,
        draw: Draw,
        *,
        vocabulary: Vocabulary = WHOLE,
        out: _Pair | None = None,
        workspace: torch.Tensor | None = None,
    ) -> _Pair:
        num_rows = logits_RV.shape[0]
        num_real = check_logits(SAMPLE, logits_RV, vocabulary)
        check_distribution(SAMPLE, distribution, vocabulary, num_rows)
        check_draw(SAMPLE, draw, num_rows)
        inputs = inputs_of(logits_RV, distribution, vocabulary, **draw._asdict())
        check_pair_out(SAMPLE, out, (num_rows,), inputs)
        rows = rows_of(logits_RV, distribution, vocabulary, num_real)
        u_R = uniforms(draw.seeds_R, draw.sample_index_R, draw.positions_R, PURPOSE_SAMPLE)
        columns_R, is_here_R = _chosen(rows, u_R, distribution.temperature_R, vocabulary)
        logprobs_R = rows.logprobs_of(columns_R[:, None], vocabulary.first_id)[:, 0]
        ids_R = torch.where(is_here_R, columns_R + vocabulary.first_id, -1)
        logprobs_R = torch.where(is_here_R, logprobs_R, NEG_INF)
        is_bad_R = rows.is_bad_R | (draw.positions_R < 0)
        return _given(out, ids_R.masked_fill(is_bad_R, -1), logprobs_R.masked_fill(is_bad_R, NAN))


class TorchTokenLogprobs(_NoWorkspace):
    """See `contracts.TokenLogprobs`."""

    __slots__ = ()

    def __call__(
        self,
        logits_RV: torch.Tensor,
        token_ids_R: torch.Tensor,
        *,
        distribution: Distribution = PLAIN,
        vocabulary: Vocabulary = WHOLE,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_rows = logits_RV.shape[0]
        num_real = check_logits(TOKEN_LOGPROBS, logits_RV, vocabulary)
        check_distribution(TOKEN_LOGPROBS, distribution, vocabulary, num_rows)
        check_indices(TOKEN_LOGPROBS, "token_ids", token_ids_R, num_rows)
        inputs = inputs_of(logits_RV, distribution, vocabulary, token_ids=token_ids_R)
        check_out(TOKEN_LOGPROBS, out, (num_rows,), inputs)
        rows = rows_of(logits_RV, distribution, vocabulary, num_real)
        columns_R = token_ids_R.to(torch.int64) - vocabulary.first_id
        is_here_R = (columns_R >= 0) & (columns_R < num_real)
        safe_R1 = columns_R.clamp(0, max(num_real - 1, 0))[:, None]
        logprobs_R = rows.logprobs_of(safe_R1, vocabulary.first_id)[:, 0]
        elsewhere = NAN if vocabulary.partials_SRP is None else NEG_INF
        logprobs_R = torch.where(is_here_R | rows.is_bad_R, logprobs_R, elsewhere)
        size = vocabulary.true_size
        is_no_id_R = token_ids_R < 0 if size is None else (token_ids_R < 0) | (token_ids_R >= size)
        logprobs_R = logprobs_R.masked_fill(is_no_id_R, NAN).masked_fill(token_ids_R == -1, 0.0)
        return logprobs_R if out is None else out.copy_(logprobs_R)


class TorchTopLogprobs(_NoWorkspace):
    """See `contracts.TopLogprobs`."""

    __slots__ = ()

    def __call__(
        self,
        logits_RV: torch.Tensor,
        num_top: int,
        *,
        distribution: Distribution = PLAIN,
        vocabulary: Vocabulary = WHOLE,
        out: _Pair | None = None,
        workspace: torch.Tensor | None = None,
    ) -> _Pair:
        num_rows = logits_RV.shape[0]
        num_real = check_logits(TOP_LOGPROBS, logits_RV, vocabulary)
        check_num_top(logits_RV, num_top)
        check_distribution(TOP_LOGPROBS, distribution, vocabulary, num_rows)
        inputs = inputs_of(logits_RV, distribution, vocabulary)
        check_pair_out(TOP_LOGPROBS, out, (num_rows, num_top), inputs)
        rows = rows_of(logits_RV, distribution, vocabulary, num_real)
        # A stable sort, not topk: topk leaves open which of two equal logits it lists.
        gaps_RN, columns_RN = (
            one[:, :num_top] for one in rows.gaps_RV.sort(dim=1, descending=True, stable=True)
        )
        logprobs_RN = rows.logprobs_of(columns_RN, vocabulary.first_id)
        is_none_RN = (gaps_RN == NEG_INF) | rows.is_bad_R[:, None]
        ids_RN = torch.where(is_none_RN, -1, columns_RN + vocabulary.first_id)
        padding = (0, num_top - ids_RN.shape[1])
        ids_RN = torch.nn.functional.pad(ids_RN, padding, value=-1)
        logprobs_RN = torch.nn.functional.pad(logprobs_RN, padding, value=NEG_INF)
        return _given(out, ids_RN, logprobs_RN.masked_fill(rows.is_bad_R[:, None], NAN))


class TorchLogitsPartials(_NoWorkspace):
    """See `contracts.LogitsPartials`."""

    __slots__ = ()

    def __call__(
        self,
        logits_RV: torch.Tensor,
        *,
        temperature_R: torch.Tensor | None = None,
        vocabulary: Vocabulary = WHOLE,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_rows = logits_RV.shape[0]
        require_kind(LOGITS_PARTIALS, "vocabulary", vocabulary, Vocabulary)
        vocabulary = vocabulary._replace(partials_SRP=None)
        num_real = check_shard(LOGITS_PARTIALS, logits_RV, vocabulary)
        check_floats(LOGITS_PARTIALS, "temperature", temperature_R, num_rows)
        inputs = {"logits": logits_RV, "temperature": temperature_R}
        check_out(LOGITS_PARTIALS, out, (num_rows, NUM_PARTIALS), inputs)
        x_RV = real_logits(logits_RV, num_real)
        divisor_R, _, is_bad_R = divisors(temperature_R, x_RV)
        largest_R = x_RV.amax(dim=1)
        best_R, others_R = best_and_others((x_RV - largest_R[:, None]) / divisor_R[:, None])
        found_RP = torch.stack((largest_R, others_R, (best_R + vocabulary.first_id).double()), 1)
        empty, bad = found_RP.new_tensor([[NEG_INF, 0.0, -1.0], [NAN, NAN, -1.0]])
        found_RP = torch.where((is_bad_R | others_R.isnan())[:, None], bad, found_RP)
        is_empty_R = (largest_R == NEG_INF) & ~is_bad_R
        found_RP = torch.where(is_empty_R[:, None], empty, found_RP)
        return found_RP if out is None else out.copy_(found_RP)


def combine_partials(
    partials_SRP: torch.Tensor,
    *,
    temperature_R: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.CombinePartials`."""
    check_partials(COMBINE_PARTIALS, "partials", partials_SRP, None)
    num_rows = partials_SRP.shape[1]
    check_floats(COMBINE_PARTIALS, "temperature", temperature_R, num_rows)
    inputs = {"partials": partials_SRP, "temperature": temperature_R}
    check_out(COMBINE_PARTIALS, out, (num_rows, NUM_PARTIALS), inputs)
    divisor_R, _, is_bad_R = divisors(temperature_R, partials_SRP[0])
    whole_RP, _ = combined(partials_SRP, divisor_R)
    bad = whole_RP.new_tensor([NAN, NAN, -1.0])
    whole_RP = torch.where(is_bad_R[:, None], bad, whole_RP)
    return whole_RP if out is None else out.copy_(whole_RP)


def _chosen(
    rows: Rows, u_R: torch.Tensor, temperature_R: torch.Tensor | None, vocabulary: Vocabulary
) -> _Pair:
    """The column of each row's token, and whether it is one of this shard's."""
    until_SR = rows.mass_SR.cumsum(dim=0)
    target_R = u_R * until_SR[-1]
    # Every shard finds the same one: the first whose running mass passes the target.
    is_here_R = (until_SR <= target_R).sum(dim=0) == vocabulary.shard
    before_R = until_SR[vocabulary.shard] - rows.mass_SR[vocabulary.shard]
    running_RV = rows.gaps_RV.exp().cumsum(dim=1)
    columns_R = torch.searchsorted(running_RV, (target_R - before_R)[:, None], right=True)[:, 0]
    if temperature_R is not None:
        best_R = rows.best_R - vocabulary.first_id
        is_greedy_R = temperature_R == 0.0
        columns_R = torch.where(is_greedy_R, best_R, columns_R)
        is_best_here_R = (best_R >= 0) & (best_R < running_RV.shape[1])
        is_here_R = torch.where(is_greedy_R, is_best_here_R, is_here_R)
    return columns_R.clamp(0, running_RV.shape[1] - 1), is_here_R


def _given(out: _Pair | None, ids: torch.Tensor, logprobs: torch.Tensor) -> _Pair:
    if out is None:
        return ids, logprobs
    return out[0].copy_(ids), out[1].copy_(logprobs)
