"""Contracts of what changes logits before a token is drawn; knows no backend.

Legend beside the package's: S state rows (sequences that the device remembers), W words of 32 ids,
B biased ids and F forbidden ids of a row at most.
"""

from typing import Final, NamedTuple, Protocol

import torch

from syncline.model_ops_rocm.contracts.logits import WHOLE, Vocabulary

IN_PROMPT: Final = -(2**31)
"""The sign bit of a count: the prompt has the token. The other bits: how often it was generated."""


class LogitsRules(NamedTuple):
    """What is done to each row's logits; None, or what is neutral in a row, does nothing.

    Vectors and rows of tables are contiguous, on the device. A negative id marks a place that is
    not used; ids that no column has are ignored.
    """

    allowed_RW: torch.Tensor | None = None  # int32: bit i % 32 of word i // 32 is set for id i
    forbidden_ids_RF: torch.Tensor | None = None  # int64 or int32
    forbidden_until_R: torch.Tensor | None = None  # int64 or int32: while position < it; with
    positions_R: torch.Tensor | None = None  # the absolute position of the token to be chosen
    bias_ids_RB: torch.Tensor | None = None  # int64 or int32
    bias_values_RB: torch.Tensor | None = None  # float32
    counts_SV: torch.Tensor | None = None  # int32, an entry per id of the vocabulary
    rows_R: torch.Tensor | None = None  # int64 or int32: the row's line of counts; negative: none
    repetition_R: torch.Tensor | None = None  # float32, above 0; neutral at 1
    frequency_R: torch.Tensor | None = None  # float32
    presence_R: torch.Tensor | None = None  # float32
    temperature_R: torch.Tensor | None = None  # float32; neutral at 0 and 1


NO_RULES: Final = LogitsRules()


class ApplyLogitsRules(Protocol):
    """Masks, bias, penalties and temperature, in one pass."""

    def __call__(
        self,
        logits_RV: torch.Tensor,
        rules: LogitsRules,
        *,
        vocabulary: Vocabulary = WHOLE,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[R, V] in the logits' dtype or, by `out`, float32. `out` may be the logits themselves.

        In this order, on float32, each operation rounded by itself, and once to the result's dtype:
        1. columns that are padding, ids that are not allowed, and ids that are forbidden while the
           row's position is below `forbidden_until_R`, become -inf;
        2. each bias of an id is added, in the order of the list;
        3. an id that the prompt has or that was generated: x / repetition if x > 0, else
           x * repetition;
        4. x - frequency * count, then x - presence where count > 0, of generated tokens alone;
        5. x / temperature.
        Penalties need `counts_SV`, `rows_R`, and none, one or all of the three. Bit-equal on every
        backend. `vocabulary.partials_SRP` is not read: a shard's columns are ruled by themselves.
        """
        ...


class CountTokens(Protocol):
    """Count tokens in a table of `LogitsRules`, as they are prefilled or generated."""

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        rows_T: torch.Tensor,
        counts_SV: torch.Tensor,
        *,
        is_prompt: bool = False,
    ) -> None:
        """For each token, in place: mark its entry by IN_PROMPT, or else add 1 to it.

        int64 or int32 [T]; `counts_SV` int32, contiguous. A token or row that is negative or beyond
        the table counts nothing. Equal tokens of one row are counted each; a caller zeroes a row
        that begins anew.
        """
        ...
