"""Speculative rejection sampling: by enumeration and by statistics, distributed as the target."""

from collections.abc import Callable
from itertools import product
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import Rejection, select
from syncline.model_ops_rocm.reference.philox import PURPOSE_ACCEPT, PURPOSE_RECOVER, uniforms
from syncline.model_ops_rocm.testing.syncs import NoHostSync

verify = select("verify_drafts", dtype=torch.float32)
NEG_INF = float("-inf")
DRAFTER = 7  # the purpose that these tests draw drafts with


def rejection_of(
    num_rows: int,
    draft_logits_RKV: torch.Tensor | None = None,
    *,
    seed: int = 0,
    temperature: float | None = None,
    position: int = 5,
) -> Rejection:
    """Rows of different requests, each at the same position."""
    return Rejection(
        seeds_R=torch.arange(num_rows) * 7_919 + seed,
        sample_index_R=torch.zeros(num_rows, dtype=torch.int32),
        positions_R=torch.full((num_rows,), position, dtype=torch.int32),
        draft_logits_RKV=draft_logits_RKV,
        temperature_R=None if temperature is None else torch.full((num_rows,), temperature),
    )


def draws(rejection: Rejection, offset: int, purpose: int) -> torch.Tensor:
    positions = rejection.positions_R + offset
    return uniforms(rejection.seeds_R, rejection.sample_index_R, positions, purpose)


def inverted(weights: list[float], u: float) -> int:
    total, running = sum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if weight > 0.0 and running > u * total:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0.0)


def one_row(
    p: list[list[float]], q: list[list[float]], drafts: list[int], u: list[float], v: list[float]
) -> list[int]:
    """Leviathan's algorithm for one row, with accept draws `u` and recover draws `v`."""
    tokens: list[int] = []
    for place, draft in enumerate(drafts):
        if u[place] * q[place][draft] < p[place][draft]:
            tokens.append(draft)
            continue
        residual = [max(a - b, 0.0) for a, b in zip(p[place], q[place], strict=True)]
        return [*tokens, inverted(residual, v[place])]
    return [*tokens, inverted(p[len(drafts)], v[len(drafts)])]


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_a_row_yields_what_the_algorithm_says(num_drafts: int, is_certain: bool) -> None:
    num_rows, num_ids = 300, 6
    make = torch.Generator().manual_seed(num_drafts)
    logits = torch.randn(num_rows, num_drafts + 1, num_ids, generator=make)
    draft_logits = torch.randn(num_rows, num_drafts, num_ids, generator=make)
    drafts = torch.randint(0, num_ids, (num_rows, num_drafts), generator=make)
    drafts[::5, 1:] = -1
    rejection = rejection_of(num_rows, None if is_certain else draft_logits)
    with NoHostSync():
        tokens, num_accepted = verify(drafts, logits, rejection=rejection)
    p = logits.double().softmax(-1).tolist()
    q = draft_logits.double().softmax(-1).tolist()
    places = range(num_drafts + 1)
    u = torch.stack([draws(rejection, place, PURPOSE_ACCEPT) for place in places], 1).tolist()
    v = torch.stack([draws(rejection, place, PURPOSE_RECOVER) for place in places], 1).tolist()
    for row in range(num_rows):
        own = [draft for draft in drafts[row].tolist() if draft >= 0]
        if is_certain:
            q[row] = [[float(token == draft) for token in range(num_ids)] for draft in own]
        expected = one_row(p[row], q[row], own, u[row], v[row])
        assert tokens[row].tolist() == expected + [-1] * (num_drafts + 1 - len(expected))
        assert int(num_accepted[row]) == len(expected) - 1


def exact_distribution(p: list[list[float]], q: list[list[float]]) -> dict[tuple[int, ...], float]:
    """The chance of each sequence of tokens that a row yields, over its drafter's choices too."""
    num_ids, chances = len(p[0]), dict[tuple[int, ...], float]()
    for drafts in product(range(num_ids), repeat=len(q)):
        reached = 1.0
        tokens: tuple[int, ...] = ()
        for place, draft in enumerate(drafts):
            reached *= q[place][draft]
        for place, draft in enumerate(drafts):
            accepted = min(1.0, p[place][draft] / q[place][draft])
            residual = [max(a - b, 0.0) for a, b in zip(p[place], q[place], strict=True)]
            for token, weight in enumerate(residual):
                if weight:
                    chance = reached * (1.0 - accepted) * weight / sum(residual)
                    chances[(*tokens, token)] = chances.get((*tokens, token), 0.0) + chance
            reached *= accepted
            tokens = (*tokens, draft)
        for token in range(num_ids):
            chance = reached * p[len(q)][token]
            chances[(*tokens, token)] = chances.get((*tokens, token), 0.0) + chance
    return chances


def test_by_enumeration_the_algorithm_leaves_the_target_as_it_is() -> None:
    """The algorithm that the test above holds each row against: its first token is the target's.

    And so is the second, given the first, where the row has one.
    """
    p = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2]]
    q = [[0.2, 0.2, 0.6], [0.3, 0.6, 0.1]]
    chances = exact_distribution(p, q)
    assert sum(chances.values()) == pytest.approx(1.0)
    for token in range(3):
        first = sum(chance for tokens, chance in chances.items() if tokens[0] == token)
        assert first == pytest.approx(p[0][token])
        longer = {
            tokens: chance
            for tokens, chance in chances.items()
            if len(tokens) > 1 and tokens[0] == token
        }
        for second in range(3):
            chance = sum(c for tokens, c in longer.items() if tokens[1] == second)
            assert chance == pytest.approx(sum(longer.values()) * p[1][second])


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [None, 0.5, 2.0])
def test_by_statistics_every_token_is_distributed_as_the_target(temperature: float | None) -> None:
    """40,000 rows: each place's token, whatever was drafted, and whether it held."""
    num_rows, num_ids, num_drafts = 40_000, 5, 2
    make = torch.Generator().manual_seed(11)
    one = torch.randn(num_drafts + 1, num_ids, generator=make)
    two = torch.randn(num_drafts, num_ids, generator=make)
    rejection = rejection_of(
        num_rows, two.expand(num_rows, -1, -1), temperature=temperature, position=100
    )
    divisor = 1.0 if temperature is None else temperature
    p, q = (one.double() / divisor).softmax(-1), (two.double() / divisor).softmax(-1)
    drafts = torch.stack(
        [
            torch.searchsorted(q[place].cumsum(0), draws(rejection, place, DRAFTER))
            for place in range(num_drafts)
        ],
        dim=1,
    ).clamp(max=num_ids - 1)
    logits = one.expand(num_rows, -1, -1)
    tokens, num_accepted = verify(drafts, logits, rejection=rejection)
    for place in range(num_drafts + 1):
        has_token = num_accepted >= place
        num = int(has_token.sum())
        counts = torch.bincount(tokens[has_token, place], minlength=num_ids).double()
        # 4 degrees of freedom: above 23.5 once in ten thousand.
        assert chi_square(counts, p[place] * num) < 23.5
        if place < num_drafts:
            held = float((num_accepted > place).sum()) / num
            chance = float(torch.minimum(p[place], q[place]).sum())
            assert abs(held - chance) < 4.0 * (chance * (1.0 - chance) / num) ** 0.5
    # The statistic would see a drafter that is taken at its word.
    wrong = torch.bincount(drafts[:, 0], minlength=num_ids).double()
    assert chi_square(wrong, p[0] * num_rows) > 200.0


def test_a_greedy_row_accepts_the_likeliest_id_alone() -> None:
    logits = torch.tensor([[[0.0, 2.0, 2.0], [3.0, 1.0, 0.0], [0.0, 0.0, 1.0]]]).expand(4, 3, 3)
    drafts = torch.tensor([[1, 0], [2, 0], [1, 2], [1, -1]])
    for draft_logits in (None, torch.randn(4, 2, 3)):
        rejection = rejection_of(4, draft_logits, temperature=0.0)
        tokens, num_accepted = verify(drafts, logits, rejection=rejection)
        assert tokens.tolist() == [[1, 0, 2], [1, -1, -1], [1, 0, -1], [1, 0, -1]]
        assert num_accepted.tolist() == [2, 0, 1, 1]


def test_what_is_no_number_yields_the_id_that_advance_refuses() -> None:
    logits = torch.zeros(5, 2, 4)
    logits[0, 0, 1] = float("nan")
    logits[1, 1, 2] = float("nan")
    logits[2, 0] = NEG_INF
    drafts = torch.full((5, 1), 3)
    rejection = rejection_of(5, torch.zeros(5, 1, 4))
    tokens, num_accepted = verify(drafts, logits, rejection=rejection)
    assert tokens[:4].tolist() == [[-1, -1], [3, -1], [-1, -1], [3, tokens[3, 1]]]
    assert num_accepted.tolist()[:4] == [0, 1, 0, 1]
    # Neither a drafter's, nor a temperature.
    assert rejection.draft_logits_RKV is not None
    rejection.draft_logits_RKV[3, 0, 0] = float("nan")
    wrong = [rejection_of(5, None, temperature=one) for one in (-1.0, float("inf"))]
    assert verify(drafts, logits, rejection=rejection)[0][3].tolist() == [-1, -1]
    for one in wrong:
        assert verify(drafts, logits, rejection=one)[0][:, 0].tolist() == [-1] * 5


def test_padding_rows_and_ids_that_do_not_exist() -> None:
    logits = torch.zeros(3, 2, 4)
    drafts = torch.tensor([[9], [0], [4]])
    rejection = rejection_of(3)
    rejection.positions_R[1] = -1
    tokens, num_accepted = verify(drafts, logits, rejection=rejection)
    assert num_accepted.tolist() == [0, -1, 0]
    assert tokens[1].tolist() == [-1, -1]
    assert (tokens[[0, 2], 0] >= 0).all() and (tokens[[0, 2], 1] == -1).all()


def test_a_draft_that_the_drafter_could_not_have_drawn_is_refused() -> None:
    """q of it is 0, and so is p: nothing divides by it."""
    logits = torch.tensor([[[0.0, NEG_INF, 0.0], [0.0, 0.0, 0.0]]]).repeat(50, 1, 1)
    draft_logits = torch.tensor([[[0.0, NEG_INF, 0.0]]]).repeat(50, 1, 1)
    tokens, num_accepted = verify(
        torch.ones(50, 1, dtype=torch.int64), logits, rejection=rejection_of(50, draft_logits)
    )
    # p equals q, so nothing is left of the residual: the target's own weights it is.
    assert num_accepted.tolist() == [0] * 50
    assert set(tokens[:, 0].tolist()) == {0, 2}


def test_places_may_be_packed() -> None:
    make = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 8, generator=make)
    drafts = torch.randint(0, 8, (4, 2), generator=make)
    drafts[1, 1], drafts[2, 0] = -1, -1
    rejection = rejection_of(4, torch.randn(4, 2, 8, generator=make), temperature=0.7)
    expected = verify(drafts, logits, rejection=rejection)
    packed = torch.cat((logits[0], logits[1, :2], logits[2, :1], logits[3], logits[0]))
    starts = torch.tensor([0, 3, 5, 6, 9])
    found = verify(drafts, packed, rejection=rejection, query_start_loc_R1=starts)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_what_is_wrong_is_named() -> None:
    drafts, logits = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 2, 4)
    rejection = rejection_of(2)

    def refused(match: str, *args: object, **kwargs: object) -> None:
        with pytest.raises(ValueError, match=rf"^verify_drafts: {match}"):
            cast(Callable[..., object], verify)(*args, **kwargs)

    refused(
        r"target must be float32, bfloat16 or float16, got torch.int64",
        *(drafts, logits.long()),
        rejection=rejection,
    )
    refused(r"target must be int64 or int32, got torch.float32", drafts, logits[..., 0])
    refused(
        r"target must have shape \[2, 2, V\], got \[2, 1, 4\]",
        *(drafts, logits[:, :1]),
        rejection=rejection,
    )
    refused(
        r"target must have at least one id, got \[2, 2, 0\]",
        *(drafts, logits[..., :0]),
        rejection=rejection,
    )
    refused(
        r"rejection.draft_logits must have shape \[2, 1, 4\], got \[2, 1, 3\]",
        *(drafts, logits),
        rejection=rejection_of(2, torch.zeros(2, 1, 3)),
    )
    refused(
        r"rejection.draft_logits must be torch.float32, got torch.float16",
        *(drafts, logits),
        rejection=rejection_of(2, torch.zeros(2, 1, 4).half()),
    )
    refused(
        r"rejection.seeds must be torch.int64, got torch.int32",
        *(drafts, logits),
        rejection=Rejection(
            seeds_R=torch.zeros(2).int(),
            sample_index_R=rejection.sample_index_R,
            positions_R=rejection.positions_R,
        ),
    )
    refused(
        r"rejection.positions must be one-dimensional with 2 entries, got \[3\]",
        *(drafts, logits),
        rejection=Rejection(
            seeds_R=rejection.seeds_R,
            sample_index_R=rejection.sample_index_R,
            positions_R=torch.zeros(3).int(),
        ),
    )
    refused(
        r"rejection.temperature must be torch.float32, got torch.float64",
        *(drafts, logits),
        rejection=Rejection(
            seeds_R=rejection.seeds_R,
            sample_index_R=rejection.sample_index_R,
            positions_R=rejection.positions_R,
            temperature_R=torch.ones(2).double(),
        ),
    )
