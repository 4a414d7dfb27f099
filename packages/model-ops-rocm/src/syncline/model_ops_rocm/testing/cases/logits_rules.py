"""Calls of the ops that rule logits, which are bit-equal."""

from collections.abc import Callable
from typing import Final

import torch

from syncline.model_ops_rocm.contracts.logits import Vocabulary
from syncline.model_ops_rocm.contracts.logits_rules import IN_PROMPT, LogitsRules
from syncline.model_ops_rocm.testing.cases.logits import cycled
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

Rules = Callable[[Maker, int, int], LogitsRules]


def _bits(make: Maker, num_rows: int, num_ids: int) -> torch.Tensor:
    """A mask with every third word empty and every second one full."""
    num_words = num_ids // 32 + 2
    words = make.distinct(num_rows * num_words, 2**20, torch.int32) * 4_093
    words[::3], words[1::2] = 0, -1
    return words.view(num_rows, num_words)


def _allowed(make: Maker, num_rows: int, num_ids: int) -> LogitsRules:
    return LogitsRules(allowed_RW=_bits(make, num_rows, num_ids))


def _listed(make: Maker, num_rows: int, num_ids: int) -> LogitsRules:
    """Ids once, twice, in other tiles, beyond the vocabulary and unused."""
    ids = make.distinct(num_rows * 5, num_ids + 40, torch.int32).view(num_rows, 5)
    ids[:, 3], ids[1::2, 1] = ids[:, 0], -1
    values = make.randn(num_rows, 5).float().mul_(10.0)
    values[::2, 2] = float("-inf")
    return LogitsRules(
        forbidden_ids_RF=make.distinct(num_rows * 3, num_ids + 9).view(num_rows, 3),
        forbidden_until_R=make.distinct(num_rows, num_rows),
        positions_R=make.distinct(num_rows, num_rows),
        bias_ids_RB=ids,
        bias_values_RB=values,
    )


def _penalties(make: Maker, num_rows: int, num_ids: int) -> LogitsRules:
    drawn = make.randn(num_rows + 1, num_ids).float()
    counts = drawn.mul(2.0).relu().to(torch.int32)
    counts += (drawn < -1.0).to(torch.int32) * IN_PROMPT
    rows = make.distinct(num_rows, num_rows + 1)
    rows[1::4] = -1
    return LogitsRules(
        counts_SV=counts,
        rows_R=rows,
        repetition_R=cycled(make, num_rows, 1.0, 1.3, 0.7),
        frequency_R=cycled(make, num_rows, 0.0, 0.4, 0.0, -0.3),
        presence_R=cycled(make, num_rows, 0.0, 0.6, 0.1, 0.0, 1.5),
    )


def _everything(make: Maker, num_rows: int, num_ids: int) -> LogitsRules:
    given = _listed(make, num_rows, num_ids)._asdict()
    of_penalties = _penalties(make, num_rows, num_ids)._asdict()
    given |= {name: value for name, value in of_penalties.items() if value is not None}
    temperature_R = cycled(make, num_rows, 0.7, 0.0, 3.0, 1.0)
    given |= {"allowed_RW": _bits(make, num_rows, num_ids), "temperature_R": temperature_R}
    return LogitsRules(**given)


def _case(label: str, shape: tuple[int, int], rules: Rules, **more: object) -> Case:
    """`more`: `in_place`, `wide` (a float32 result), or a vocabulary."""

    def build(make: Maker) -> Arguments:
        num_rows, num_columns = shape
        logits = make.randn(num_rows, num_columns, pad=3).mul_(3.0)
        vocabulary = more.get("vocabulary", Vocabulary())
        assert isinstance(vocabulary, Vocabulary)
        given = rules(make, num_rows, vocabulary.first_id + num_columns)
        call: Arguments = {"logits_RV": logits, "rules": given, "vocabulary": vocabulary}
        if "in_place" in more:
            call["out"] = logits
        if "wide" in more:
            call["out"] = torch.full(shape, float("nan"), device=make.device)
        return call

    return Case(op="apply_logits_rules", label=label, build=build)


def _count(num_tokens: int, *, is_prompt: bool) -> Case:
    def build(make: Maker) -> Arguments:
        rows = make.distinct(num_tokens, num_tokens, torch.int32) % 5 - 1
        counts = torch.zeros(3, 40, dtype=torch.int32, device=make.device)
        counts[1, :20] = IN_PROMPT
        ids = make.distinct(num_tokens, num_tokens) % 43 - 1
        return {"token_ids_T": ids, "rows_T": rows, "counts_SV": counts, "is_prompt": is_prompt}

    label = f"{num_tokens}x3-{'prompt' if is_prompt else 'generated'}"
    return Case(op="count_tokens", label=label, build=build)


CASES: Final[tuple[Case, ...]] = (
    _case("0x8", (0, 8), _allowed),
    _case("3x70-nothing", (3, 70), lambda *_: LogitsRules(), vocabulary=Vocabulary(65)),
    _case("3x70-nothing-in-place", (3, 70), lambda *_: LogitsRules(), in_place=True),
    _case("5x1100-allowed", (5, 1_100), _allowed, vocabulary=Vocabulary(1_050)),
    _case("4x1100-listed", (4, 1_100), _listed, in_place=True),
    _case("7x33-penalties", (7, 33), _penalties, wide=True),
    _case("6x1100-everything", (6, 1_100), _everything, in_place=True),
    _case("4x50-shard", (4, 50), _everything, vocabulary=Vocabulary(190, 150)),
    _count(0, is_prompt=True),
    _count(300, is_prompt=False),
    _count(300, is_prompt=True),
)
