"""What is done to logits before a draw, by the reference, against plain Python; and its counts."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import LogitsRules, Vocabulary, select
from syncline.model_ops_rocm.contracts import IN_PROMPT

INF = float("inf")
apply_rules = select("apply_logits_rules", dtype=torch.float32)
count_tokens = select("count_tokens", dtype=torch.float32)


def test_rules_are_applied_in_the_order_that_is_written_down() -> None:
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0, 8.0, 3.0, 5.0]])
    counts = torch.tensor([[0, IN_PROMPT, 3, IN_PROMPT + 1, 0, 0, 0]], dtype=torch.int32)
    rules = LogitsRules(
        allowed_RW=torch.tensor([[0b0101111]], dtype=torch.int32),
        forbidden_ids_RF=torch.tensor([[0, -1]]),
        forbidden_until_R=torch.tensor([5]),
        positions_R=torch.tensor([4]),
        bias_ids_RB=torch.tensor([[2, 3, 2, 99]]),
        bias_values_RB=torch.tensor([[1.0, -5.0, 3.0, INF]]),
        counts_SV=counts,
        rows_R=torch.tensor([0]),
        repetition_R=torch.tensor([2.0]),
        frequency_R=torch.tensor([0.5]),
        presence_R=torch.tensor([0.25]),
        temperature_R=torch.tensor([0.5]),
    )
    ruled = apply_rules(logits, rules, vocabulary=Vocabulary(6))
    expected = [
        -INF,  # forbidden while the position is below 5
        (-2.0 * 2.0) / 0.5,  # in the prompt: repeated, but not counted
        ((4.0 + 1.0 + 3.0) / 2.0 - 0.5 * 3 - 0.25) / 0.5,
        ((1.0 - 5.0) * 2.0 - 0.5 - 0.25) / 0.5,  # the bias made it negative
        -INF,  # not allowed
        3.0 / 0.5,
        -INF,  # padding
    ]
    assert ruled.tolist() == [expected]
    later = rules._replace(positions_R=torch.tensor([5]))
    assert apply_rules(logits, later, vocabulary=Vocabulary(6))[0, 0] == 2.0 / 0.5


def test_what_is_neutral_changes_nothing_and_no_history_means_no_penalty() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(apply_rules(logits, LogitsRules()), logits)
    neutral = LogitsRules(
        counts_SV=torch.ones(3, 40, dtype=torch.int32),
        rows_R=torch.tensor([0, 1, -1]),
        repetition_R=torch.tensor([1.0, 1.0, 9.0]),
        presence_R=torch.tensor([0.0, 0.0, 9.0]),
        temperature_R=torch.tensor([0.0, 1.0, 0.0]),
    )
    assert torch.equal(apply_rules(logits, neutral), logits)


def test_a_result_may_be_wider_than_the_logits_or_lie_in_them() -> None:
    logits = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    bias = LogitsRules(bias_ids_RB=torch.tensor([[1]]), bias_values_RB=torch.tensor([[1.0 / 1024]]))
    wide = torch.empty(1, 2)
    assert apply_rules(logits, bias, out=wide) is wide
    assert wide.tolist() == [[1.0, 2.0 + 1.0 / 1024]]
    assert apply_rules(logits, bias, out=logits) is logits
    assert logits.tolist() == [[1.0, 2.0]]  # the bias is below the dtype's steps


def test_tokens_are_counted_where_they_belong_and_unknown_ones_nowhere() -> None:
    counts = torch.zeros(2, 5, dtype=torch.int32)
    count_tokens(torch.tensor([3, 1, 3]), torch.tensor([0, 0, 0]), counts, is_prompt=True)
    generated, rows = torch.tensor([3, 4, 4, 5, -1, 0, 2]), torch.tensor([0, 1, 1, 1, 0, 2, -1])
    count_tokens(generated, rows, counts)
    assert counts.tolist() == [[0, IN_PROMPT, 0, IN_PROMPT + 1, 0], [0, 0, 0, 0, 2]]


def test_bad_arguments_are_refused_by_name() -> None:
    logits, one = torch.zeros(2, 40), torch.ones(2)
    words, counts = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, 40, dtype=torch.int32)
    rows, ids = torch.tensor([0, 1]), torch.zeros(2, 3, dtype=torch.int64)
    refusals: list[tuple[LogitsRules, dict[str, object], str]] = [
        (LogitsRules(allowed_RW=words.long()), {}, "allowed must be torch.int32"),
        (LogitsRules(allowed_RW=words[:, :1].clone()), {}, "allowed must have at least 2 words"),
        (LogitsRules(bias_ids_RB=ids), {}, "bias_ids must be given with bias_values_RB"),
        (
            *(LogitsRules(bias_ids_RB=ids, bias_values_RB=one), {}),
            r"bias_values must have shape \[2, 3\]",
        ),
        (LogitsRules(forbidden_ids_RF=ids), {}, "forbidden_ids must be given with forbidden_unt"),
        (LogitsRules(repetition_R=one), {}, "counts must be given with repetition"),
        (LogitsRules(counts_SV=counts), {}, "counts must be given with rows_R"),
        (
            *(LogitsRules(counts_SV=counts[:, :39].clone(), rows_R=rows), {}),
            "counts must have at least 40 entries in a row",
        ),
        (
            LogitsRules(counts_SV=counts[:0], rows_R=rows),
            {},
            r"counts must have a row, got \[0, 40",
        ),
        (LogitsRules(temperature_R=one[:1]), {}, r"temperature must have shape \[2\]"),
        (LogitsRules(), {"out": logits[:1]}, r"out must have shape \[2, 40\]"),
        (LogitsRules(), {"out": logits.double()}, "out must be torch.float32 or torch.float32"),
    ]
    for rules, kwargs, message in refusals:
        with pytest.raises(ValueError, match=message):
            cast(Callable[..., object], apply_rules)(logits, rules, **kwargs)
    with pytest.raises(ValueError, match=r"count_tokens: counts must be torch.int32"):
        count_tokens(rows, rows, counts.long())
