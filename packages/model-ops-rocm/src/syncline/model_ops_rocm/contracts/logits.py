"""Contracts of the ops from logits to tokens; knows no backend. Legend: package docstring.

Besides: R rows of logits (tokens to choose, or positions to score), V their columns, S shards of a
vocabulary, N tokens listed.

A weight is exp((x - max) / T). Weights and their sums within a tile of VOCAB_TILE columns are
float32 or better; sums over tiles are float64, in a fixed order. So backends differ by 2^-20 of a
sum, and a backend from itself not at all.
A logprob is float64 and never 0.0. The likeliest id's comes from what the others hold, so that it
is exact where it is all but certain; it is at most SURE_LOGPROB.
A row whose logits are no numbers (a NaN or +inf among them, or nothing but -inf), or whose
temperature is negative, infinite or NaN, or, unless it is greedy, whose top_p or min_p is NaN, gets
the id -1 and the logprob NaN: an error that the device sees.
No op here reads a value on the host. Vectors with an entry per row are contiguous.
"""

import sys
from typing import Final, NamedTuple, Protocol

import torch

VOCAB_TILE: Final = 1_024
SURE_LOGPROB: Final = -sys.float_info.min
"""Of an id that is the only possible one, or whose rivals underflow in float64."""


class Distribution(NamedTuple):
    """How logits become probabilities; an entry per row, on the device. None: off for all rows.

    At temperature 0 a row is greedy: its distribution is that of temperature 1 without a filter.
    Else, in this order: min_p keeps ids of at least that share of the likeliest one's probability;
    top_k the k likeliest of those; top_p of those, renormalised, the likeliest until they hold so
    much, with the one that crosses it. Equal logits rank by lowest id; the likeliest always stays.
    """

    temperature_R: torch.Tensor | None = None  # float32, 0 or at least 2^-126
    top_k_R: torch.Tensor | None = None  # int64 or int32; off at 0 and below
    top_p_R: torch.Tensor | None = None  # float32; off at 1 and above
    min_p_R: torch.Tensor | None = None  # float32; off at 0 and below; 1 above 1

    @property
    def is_filtered(self) -> bool:
        """Whether any row may drop an id."""
        return any(one is not None for one in self[1:])


class Draw(NamedTuple):
    """Which random number each row's token takes; an entry per row, on the device.

    The uniform is that of `reference.philox`: key `seeds_R` (a seed below 2^64 as the int64 of its
    bits), counter (`positions_R`, `sample_index_R`, 0, 0). Position: the absolute one of the token
    to be chosen; a negative one marks a padding row, of which nothing is read.
    """

    seeds_R: torch.Tensor  # int64
    sample_index_R: torch.Tensor  # int64 or int32
    positions_R: torch.Tensor  # int64 or int32


class Vocabulary(NamedTuple):
    """Which ids the columns are, and what is known of those elsewhere. Column c is first_id + c.

    With `partials_SRP`, the columns are those of shard `shard` of S, in ascending order of ids,
    whose `logits_partials` were gathered at the same temperatures. An answer that lies in another
    shard is id -1 and logprob -inf, so the largest over the shards is the answer.
    """

    true_size: int | None = None  # ids from here on are padding: never chosen, never summed
    first_id: int = 0
    shard: int = 0
    partials_SRP: torch.Tensor | None = None  # float64 [S, R, 3]


PLAIN: Final = Distribution()
WHOLE: Final = Vocabulary()


class Sample(Protocol):
    """One token per row, and its logprob under the distribution that it was drawn from."""

    def workspace_bytes(self, logits_RV: torch.Tensor) -> int:
        """What `workspace` must hold for so many rows and columns."""
        ...

    def __call__(
        self,
        logits_RV: torch.Tensor,
        distribution: Distribution,
        draw: Draw,
        *,
        vocabulary: Vocabulary = WHOLE,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        workspace: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids int64 [R], logprobs float64 [R]); new, or `out`.

        A greedy row takes the largest logit, the lowest id on a tie. Any other row takes the first
        id whose running sum of weights, in order of ids, passes u times the whole sum, for the
        row's one uniform u; ids that a filter drops weigh nothing. A backend may choose a neighbour
        of another's id where u lies within 2^-20 of an edge between the two.

        A padding row gets -1 and NaN. A shard takes no filter: it does not know the whole row.
        """
        ...


class TokenLogprobs(Protocol):
    """The logprob of a given token per row, such as each token of a prompt."""

    def workspace_bytes(self, logits_RV: torch.Tensor) -> int:
        """What `workspace` must hold for so many rows and columns."""
        ...

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
        """float64 [R]; new, or `out`. `token_ids_R` int64 or int32.

        -1 marks a padding row, of which nothing is read: its logprob is 0.0, which no token has.
        Another id outside of the vocabulary gives NaN; one that a filter drops, or whose logit is
        -inf, gives -inf. A shard takes no filter.
        """
        ...


class TopLogprobs(Protocol):
    """The likeliest tokens of each row, and their logprobs."""

    def workspace_bytes(self, logits_RV: torch.Tensor) -> int:
        """What `workspace` must hold for so many rows and columns."""
        ...

    def __call__(
        self,
        logits_RV: torch.Tensor,
        num_top: int,
        *,
        distribution: Distribution = PLAIN,
        vocabulary: Vocabulary = WHOLE,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        workspace: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids int64 [R, N], logprobs float64 [R, N]), likeliest first, ties by lowest id.

        N = `num_top`, at least 1. Where fewer ids are possible the rest is -1 and -inf. A shard
        lists its own ids, with logprobs over all shards: the N largest of all lists are the
        answer. A shard takes no filter.
        """
        ...


class LogitsPartials(Protocol):
    """What a vocabulary shard tells the others of its rows: three numbers each."""

    def workspace_bytes(self, logits_RV: torch.Tensor) -> int:
        """What `workspace` must hold for so many rows and columns."""
        ...

    def __call__(
        self,
        logits_RV: torch.Tensor,
        *,
        temperature_R: torch.Tensor | None = None,
        vocabulary: Vocabulary = WHOLE,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float64 [R, 3]: the largest logit, the weight of all other ids, the id that has it.

        Weights are relative to that largest logit, which itself weighs 1, so the shard's mass is
        1 + the second number, and max and sum-exp of the shard are the first two. The lowest id on
        a tie. A shard without a possible id has (-inf, 0, -1), a row that is no numbers (NaN, NaN,
        -1). `vocabulary.partials_SRP` is not read.
        """
        ...


class CombinePartials(Protocol):
    """Shards' partials as those of the whole vocabulary."""

    def __call__(
        self,
        partials_SRP: torch.Tensor,
        *,
        temperature_R: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float64 [S, R, 3], contiguous, in ascending order of ids, to float64 [R, 3].

        The result is again what `LogitsPartials` gives, of the shards' union: to combine in groups
        first changes roundings of float64 alone. The third number is the greedy token.
        """
        ...
