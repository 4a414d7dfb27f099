"""Drafts verified against the target's own draws: the tokens of a run without drafts."""

from collections.abc import Callable
from itertools import product
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import select
from syncline.model_ops_rocm.testing.cases.decoding import CASES
from syncline.model_ops_rocm.testing.parity import Case, Maker
from syncline.model_ops_rocm.testing.syncs import NoHostSync

verify = select("verify_drafts", dtype=torch.float32)
VERIFICATIONS = [case for case in CASES if case.op == "verify_drafts" and "-of-" not in case.label]


def verified(drafts: list[int], drawn: list[int]) -> tuple[list[int], int]:
    """What a row yields, draft by draft."""
    tokens = []
    for draft, token in zip(drafts, drawn[:-1], strict=False):
        if draft < 0 or draft != token:
            break
        tokens.append(token)
    tokens.append(drawn[len(tokens)])
    return tokens, len(tokens) - 1


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_every_small_row_yields_what_a_run_without_drafts_would(num_drafts: int) -> None:
    rows = [
        (drafts, drawn)
        for drafts in product((-1, 0, 1), repeat=num_drafts)
        for drawn in product((0, 1, 2), repeat=num_drafts + 1)
    ]
    drafts = torch.tensor([one for one, _ in rows], dtype=torch.int32).reshape(
        len(rows), num_drafts
    )
    with NoHostSync():
        tokens, num_accepted = verify(drafts, torch.tensor([drawn for _, drawn in rows]))
    for row, (own, drawn) in enumerate(rows):
        expected, count = verified(list(own), list(drawn))
        assert tokens[row].tolist() == expected + [-1] * (num_drafts + 1 - len(expected))
        assert int(num_accepted[row]) == count
        assert tokens[row, : count + 1].tolist() == list(drawn[: count + 1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", VERIFICATIONS, ids=str)
def test_places_are_where_the_rows_say_or_nothing_is_yielded(case: Case, seed: int) -> None:
    call = case.build(Maker(torch.float32, seed=seed))
    drafts, target = cast(torch.Tensor, call["drafts_RK"]), cast(torch.Tensor, call["target"])
    num_rows, num_drafts = drafts.shape
    starts = [row * (num_drafts + 1) for row in range(num_rows + 1)]
    if "query_start_loc_R1" in call:
        starts = cast(torch.Tensor, call["query_start_loc_R1"]).tolist()
    flat = target.reshape(-1).tolist()
    tokens, num_accepted = cast(Callable[..., tuple[torch.Tensor, ...]], verify)(**call)
    for row in range(num_rows):
        expected: list[int] = []
        count = -1
        if starts[row] < starts[row + 1] <= len(flat):
            drawn = flat[starts[row] : starts[row + 1]]
            expected, count = verified(drafts[row].tolist(), drawn)
        assert tokens[row].tolist() == expected + [-1] * (num_drafts + 1 - len(expected))
        assert int(num_accepted[row]) == count


def test_what_is_wrong_is_named() -> None:
    drafts, target = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int64)

    def refused(match: str, *args: object, **kwargs: object) -> None:
        with pytest.raises(ValueError, match=rf"^verify_drafts: {match}"):
            cast(Callable[..., object], verify)(*args, **kwargs)

    starts = torch.tensor([0, 4, 8])
    refused(r"drafts must be int64 or int32, got torch.float32", drafts.float(), target)
    refused(r"drafts must have 2 dimensions, got \[3\]", drafts[0], target)
    refused(r"target must have shape \[2, 4\], got \[2, 3\]", drafts, drafts)
    refused(r"target must be int64 or int32, got torch.bool", drafts, target.bool())
    refused(
        r"target must have shape \[2\], got \[2, 4\]",
        *(drafts, target),
        query_start_loc_R1=starts,
    )
    refused(
        r"query_start_loc must be one-dimensional with 3 entries, got \[2\]",
        *(drafts, target.flatten()),
        query_start_loc_R1=starts[:2],
    )
    counts = torch.zeros(2, dtype=torch.int32)
    refused(
        r"out\[0\] must have shape \[2, 4\], got \[2, 3\]", drafts, target, out=(drafts, counts)
    )
    refused(r"out\[1\] must be int64 or int32", drafts, target, out=(target, counts.float()))
