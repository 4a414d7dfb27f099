"""From logits to tokens and logprobs by Triton: a pass over tiles, then one program per row."""

from typing import Final

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
from syncline.model_ops_rocm.checks import (
    refuse,
    require_kind,
)
from syncline.model_ops_rocm.contracts.logits import (
    PLAIN,
    WHOLE,
    Distribution,
    Draw,
    Vocabulary,
)
from syncline.model_ops_rocm.reference.philox import PURPOSE_SAMPLE
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.logits_rows import (
    combine_kernel,
    partials_kernel,
    sample_kernel,
    token_logprobs_kernel,
    top_logprobs_kernel,
)
from syncline.model_ops_rocm.triton.launch import LAUNCHER, require_reachable
from syncline.model_ops_rocm.triton.ops.logits_rows import (
    MAX_SHARDS,
    Operands,
    begin,
    stats_bytes,
)

MAX_TOP: Final = 256
_Pair = tuple[torch.Tensor, torch.Tensor]


class _TilesInWorkspace:
    __slots__ = ()

    def workspace_bytes(self, logits_RV: torch.Tensor) -> int:
        return stats_bytes(logits_RV)


class TritonSample(_TilesInWorkspace):
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
        out = out or _new_pair(logits_RV, (num_rows,))
        marks_R = draw.positions_R
        given = Operands(logits_RV, distribution, vocabulary, num_real, marks_R, workspace)
        rows = begin(SAMPLE, given, **draw._asdict(), ids=out[0], logprobs=out[1])
        if num_rows:
            args = (logits_RV, rows.temperature, *draw, *rows.tensors, *out, *rows.sizes)
            shards = (vocabulary.shard, rows.num_shards)
            rows.finish(sample_kernel, (*args, *shards), PURPOSE=PURPOSE_SAMPLE)
        return out


class TritonTokenLogprobs(_TilesInWorkspace):
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
        if out is None:
            out = torch.empty(num_rows, dtype=torch.float64, device=logits_RV.device)
        given = Operands(logits_RV, distribution, vocabulary, num_real, token_ids_R, workspace)
        rows = begin(TOKEN_LOGPROBS, given, token_ids=token_ids_R, out=out)
        if num_rows:
            true_size = vocabulary.true_size
            if true_size is None:
                is_whole = vocabulary.partials_SRP is None
                true_size = logits_RV.shape[1] if is_whole else _NO_BOUND
            args = (logits_RV, rows.temperature, token_ids_R, *rows.tensors, out, *rows.sizes)
            rows.finish(token_logprobs_kernel, (*args, rows.num_shards, true_size))
        return out


class TritonTopLogprobs(_TilesInWorkspace):
    """See `contracts.TopLogprobs`; lists up to MAX_TOP ids, one after another."""

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
        if num_top > MAX_TOP:
            refuse(TOP_LOGPROBS, "num_top", f"be at most {MAX_TOP}", num_top)
        check_distribution(TOP_LOGPROBS, distribution, vocabulary, num_rows)
        inputs = inputs_of(logits_RV, distribution, vocabulary)
        check_pair_out(TOP_LOGPROBS, out, (num_rows, num_top), inputs)
        out = out or _new_pair(logits_RV, (num_rows, num_top))
        given = Operands(logits_RV, distribution, vocabulary, num_real, None, workspace)
        rows = begin(TOP_LOGPROBS, given, ids=out[0], logprobs=out[1])
        if num_rows:
            args = (logits_RV, rows.temperature, *rows.tensors, *out, *rows.sizes)
            rows.finish(top_logprobs_kernel, (*args, rows.num_shards, num_top))
        return out


class TritonLogitsPartials(_TilesInWorkspace):
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
        if out is None:
            out = logits_RV.new_empty((num_rows, NUM_PARTIALS), dtype=torch.float64)
        distribution = Distribution(temperature_R)
        given = Operands(logits_RV, distribution, vocabulary, num_real, None, workspace)
        rows = begin(LOGITS_PARTIALS, given, out=out)
        if num_rows:
            args = (
                logits_RV,
                rows.temperature,
                rows.stats.maxima,
                rows.stats.sums,
                out,
                *rows.sizes,
            )
            rows.finish(partials_kernel, args)
        return out


def combine_partials(
    partials_SRP: torch.Tensor,
    *,
    temperature_R: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.CombinePartials`."""
    check_partials(COMBINE_PARTIALS, "partials", partials_SRP, None)
    num_shards, num_rows, _ = partials_SRP.shape
    if num_shards > MAX_SHARDS:
        refuse(COMBINE_PARTIALS, "partials", f"have up to {MAX_SHARDS} shards", num_shards)
    check_floats(COMBINE_PARTIALS, "temperature", temperature_R, num_rows)
    inputs = {"partials": partials_SRP, "temperature": temperature_R}
    check_out(COMBINE_PARTIALS, out, (num_rows, NUM_PARTIALS), inputs)
    if out is None:
        out = torch.empty_like(partials_SRP[0])
    require_reachable(COMBINE_PARTIALS, partials=partials_SRP, temperature=temperature_R, out=out)
    if num_rows:
        temperature = partials_SRP if temperature_R is None else temperature_R
        LAUNCHER.launch(
            combine_kernel,
            (num_rows,),
            LAUNCHER.config(COMBINE_PARTIALS, torch.float32, num_shards),
            (partials_SRP, temperature, out, num_rows, num_shards),
            {
                "HAS_TEMPERATURE": temperature_R is not None,
                "SHARD_SLOTS": power_of_two(num_shards),
            },
        )
    return out


_NO_BOUND: Final = 2**31 - 1
SAMPLE_OP: Final = TritonSample()
TOKEN_LOGPROBS_OP: Final = TritonTokenLogprobs()
TOP_LOGPROBS_OP: Final = TritonTopLogprobs()
LOGITS_PARTIALS_OP: Final = TritonLogitsPartials()


def _new_pair(logits_RV: torch.Tensor, shape: tuple[int, ...]) -> _Pair:
    device = logits_RV.device
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    return ids, torch.empty(shape, dtype=torch.float64, device=device)
