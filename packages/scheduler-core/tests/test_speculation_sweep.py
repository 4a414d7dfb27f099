"""The promise, with drafts: k, acceptance, window, depth, pool, budget never change an answer."""

import itertools

import pytest

from syncline.scheduler_core import FinishReason, Request, Sequence, StopRules
from syncline.scheduler_core.oracle import (
    Drafter,
    HashModel,
    Outcome,
    Scenario,
    accept_all,
    accept_none,
    apply_at_once,
    apply_when_full,
    hash_drafter,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    assert_reference,
    check_every,
    make_config,
    make_request,
)

MAX_MODEL_LEN = 40
MODEL = HashModel()
RULES = StopRules(
    max_tokens=14,
    min_tokens=2,
    stop_token_ids=frozenset({11}),
    eos_token_ids=frozenset({12}),
    stop_sequences=((20,), (21,)),
)
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]
REQUESTS = (
    make_request("a", SHARED, stop=RULES, num_samples=2),
    make_request("b", [*SHARED, 7], stop=RULES),
    make_request("c", 13, 9),
    make_request("d", 3, 18),
)
EXPECTED = {
    (request.request_id, sample): reference_output(
        MODEL, request, sample, max_model_len=MAX_MODEL_LEN
    )
    for request in REQUESTS
    for sample in range(request.num_samples)
}
# "d" ends with 21 tokens, "c" with 22: the longest needs 21 slots, six blocks of four.
POOLS = {"roomy": 80, "tight": 12, "exactly fitting": 6, "one short": 5}


def accept_alternately(step: int, row: int, num_draft_tokens: int) -> int:
    return num_draft_tokens if (step + row) % 2 else 0


DRAFTERS: dict[str, Drafter] = {
    "all": accept_all,
    "none": accept_none,
    "alternating": accept_alternately,
    "by hash": hash_drafter(0.6),
}


def context_after(token_ids: tuple[int, ...]) -> list[int]:
    """The hash at every position: what its slot must hold."""
    context = 0
    contexts: list[int] = []
    for token_id in token_ids:
        context = MODEL.extend(context, token_id, 0)
        contexts.append(context)
    return contexts


def assert_columns(sequence: Sequence) -> None:
    """A value for every position computed here, and for each the one of its true context."""
    contexts = context_after(sequence.token_ids)
    column = sequence.columns.get("context", {})
    assert all(contexts[position] == value for position, value in column.items())
    first_output = sequence.num_prompt_tokens
    assert set(range(first_output, sequence.num_tokens - 1)) <= set(column)


def assert_true(outcome: Outcome, num_blocks: int) -> None:
    for key, sequence in outcome.sequences.items():
        assert_reference(sequence, EXPECTED[key], num_slots=num_blocks * 4)
        assert_columns(sequence)
    stats = outcome.stats
    num_resolved = stats.num_accepted_draft_tokens + stats.num_rejected_draft_tokens
    assert stats.num_draft_tokens == num_resolved
    num_kept = sum(s.num_output_tokens for s in outcome.sequences.values())
    assert stats.num_accepted_tokens == num_kept


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_output_is_that_of_the_run_without_drafts(pool: str, depth: int) -> None:
    settings = itertools.cycle(itertools.product((1, 2, 3), (4, 9, 64), (True, False)))
    for num_drafts, name in itertools.product(range(5), DRAFTERS):
        window, budget, caching = next(settings)
        config = make_config(
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=depth,
        )
        outcome = run(
            Scenario(
                requests=REQUESTS,
                num_blocks=POOLS[pool],
                config=config,
                enable_prefix_caching=caching,
                window=window,
                num_draft_tokens=num_drafts,
                drafter=DRAFTERS[name],
                columns=("context",),
            ),
            observe=check_every(4),
        )
        assert_true(outcome, POOLS[pool])
        stats = outcome.stats
        if budget == 64 and pool == "roomy" and num_drafts:
            assert stats.num_draft_tokens > 0
            assert bool(stats.num_accepted_draft_tokens) == (name != "none")
            assert bool(stats.num_rejected_draft_tokens) == (name != "all")


@pytest.mark.parametrize("seed", range(12))
def test_drafts_and_windows_may_differ_in_every_row_and_step(seed: int) -> None:
    """Numbers of drafts, windows, cut windows and lateness all change from tick to tick."""
    choose = hash_drafter(0.7, seed)  # Some number from 0 to its last argument, always the same.
    for num_blocks in (POOLS["roomy"], 9, POOLS["exactly fitting"]):
        config = make_config(
            max_num_seqs=4,
            max_num_batched_tokens=(6, 11, 64)[seed % 3],
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=1 + seed % 3,
        )
        outcome = run(
            Scenario(
                requests=REQUESTS,
                num_blocks=num_blocks,
                config=config,
                windows=lambda tick: 1 + choose(tick, 90, 2),
                drafts=lambda tick, seq_id: choose(tick, 10 + seq_id, 4),
                counts=lambda step_id, row, window: 1 + choose(step_id, 30 + row, window - 1),
                drafter=hash_drafter(0.5, seed),
                lateness=lambda tick, num: choose(tick, 91, num),
                columns=("context",),
            ),
            observe=check_every(4),
        )
        assert_true(outcome, num_blocks)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_single_sequence_ends_at_every_length_in_the_smallest_pool(depth: int) -> None:
    """D3, D5: the limit falls at every offset of a verified row, and never costs a token."""
    for max_tokens, num_drafts in itertools.product(range(1, 13), range(5)):
        request = make_request("a", 5, max_tokens)
        drafter = list(DRAFTERS.values())[(max_tokens + num_drafts) % 4]
        for num_blocks, window in ((-(-(4 + max_tokens) // 4) or 1, 1), (20, 2)):
            outcome = run(
                Scenario(
                    requests=(request,),
                    num_blocks=max(num_blocks, 2),
                    config=make_config(max_steps_in_flight=depth),
                    window=window,
                    num_draft_tokens=num_drafts,
                    drafter=drafter,
                    lateness=apply_at_once if max_tokens % 2 else apply_when_full,
                )
            )
            (sequence,) = outcome.sequences.values()
            expected = reference_output(MODEL, request, 0, max_model_len=99)
            assert tuple(sequence.output_token_ids) == expected.token_ids
            assert sequence.finish_reason is FinishReason.LENGTH
            assert outcome.stats.num_surplus_tokens == outcome.stats.num_preemptions == 0


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    request: Request = make_request("a", 4, 25)
    num_steps: dict[tuple[str, int], int] = {}
    for name, num_drafts in itertools.product(DRAFTERS, (0, 1, 3)):
        outcome = run(
            Scenario(
                requests=(request,),
                num_blocks=40,
                config=make_config(),
                num_draft_tokens=num_drafts,
                drafter=DRAFTERS[name],
            )
        )
        num_steps[name, num_drafts] = outcome.num_steps
    # One step for the prompt and its token, then 24 tokens by 1, 2 or 4.
    assert [num_steps["all", k] for k in (0, 1, 3)] == [1 + 24, 1 + 12, 1 + 6]
    assert [num_steps["none", k] for k in (0, 1, 3)] == [1 + 24] * 3
    assert num_steps["all", 3] < num_steps["by hash", 3] < num_steps["none", 3]
