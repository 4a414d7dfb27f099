"""Prefill here, decode there: the first token comes once, KV comes whole, in part, or never."""

from dataclasses import replace
from itertools import product

import pytest

from syncline.scheduler_core import (
    FinishReason,
    IdleCause,
    RemotePrefill,
    Request,
    SequenceId,
    StopRules,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    Outcome,
    Scenario,
    Transfer,
    apply_at_once,
    apply_when_full,
    hash_drafter,
    prefill_remotely,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import (
    EndOnId,
    assert_reference,
    check_every,
    make_config,
    make_request,
    make_result,
    make_scheduler,
    step,
)

MODEL = HashModel()
MAX_MODEL_LEN = 48


def remote(request: Request, num_draft_tokens: int = 0) -> Request:
    """The same request, its prompt computed by another engine."""
    prefill = prefill_remotely(MODEL, request, num_draft_tokens=num_draft_tokens)
    return replace(request, remote_prefill=prefill)


def given(request: Request, token_id: int = 5, num_draft_tokens: int = 0) -> Request:
    """The request with a token that nobody's model samples, for tests of accounting."""
    prefill = RemotePrefill(
        first_token_id=token_id, first_logprob=-0.25, num_draft_tokens=num_draft_tokens
    )
    return replace(request, remote_prefill=prefill)


REQUESTS = (
    remote(make_request("a", 8, 9), 2),
    make_request("b", 6, 8),
    remote(make_request("c", 5, 12), 3),
    remote(make_request("d", [3, 1, 4, 1, 5, 9, 2, 6], 7), 0),
)


def make_scenario(requests: tuple[Request, ...], num_blocks: int, depth: int) -> Scenario:
    return Scenario(
        requests=requests,
        num_blocks=num_blocks,
        config=make_config(
            max_num_seqs=3,
            max_num_batched_tokens=16,
            max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=depth,
        ),
        drafter=hash_drafter(0.6),
        lateness=apply_at_once if depth == 1 else apply_when_full,
    )


def assert_true(outcome: Outcome, requests: tuple[Request, ...]) -> None:
    """Token by token the reference: the remote's is in it once, with its logprob (#30 #75)."""
    for request in requests:
        sequence = outcome.sequences[request.request_id, 0]
        expected = reference_output(MODEL, request, 0, max_model_len=MAX_MODEL_LEN)
        assert_reference(sequence, expected, may_abort=True)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_every_outcome_of_a_remote_load_gives_the_same_output(depth: int, num_drafts: int) -> None:
    """D66: failed, partial and whole loads, of prompts around the block boundaries."""
    for num_prompt in (1, 4, 5):
        request = remote(make_request("a", num_prompt, 7), num_drafts)
        for num_loaded in range(num_prompt + 1):

            def ends(
                tick: int, transfer: Transfer, num_loaded: int = num_loaded
            ) -> tuple[int, int]:
                return num_loaded % 3, num_loaded

            scenario = make_scenario((request,), 12, depth)
            outcome = run(replace(scenario, transfer_ends=ends, num_draft_tokens=num_drafts))
            assert_true(outcome, (request,))
            assert outcome.stats.num_loaded_tokens == num_loaded
            num_computed = num_prompt + 1 - num_loaded if num_loaded < num_prompt else 0
            assert outcome.stats.num_prefill_tokens == num_computed


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preemption_at_every_tick_keeps_the_remote_token_exactly_once(depth: int) -> None:
    """#30 #75 D22: also before the first verification has returned; no draft is ever stripped."""
    for num_blocks in (24, 7) if depth == 2 else (7,):
        scenario = replace(make_scenario(REQUESTS, num_blocks, depth), num_draft_tokens=3)
        num_ticks = run(scenario).num_ticks
        for tick in range(num_ticks):
            disturbed = replace(scenario, preempts=frozenset({tick, tick + 1}))
            outcome = run(disturbed, observe=check_every(4))
            assert_true(outcome, REQUESTS)


@pytest.mark.parametrize("window", [1, 3])
def test_windows_tiny_pools_and_slow_loads_change_nothing(window: int) -> None:
    for depth, num_ticks, num_blocks in product((1, 2), (0, 1, 3), (24, 6)):

        def ends(tick: int, transfer: Transfer, num_ticks: int = num_ticks) -> tuple[int, int]:
            return num_ticks, transfer.stop - transfer.start

        scenario = replace(
            make_scenario(REQUESTS, num_blocks, depth), window=window, transfer_ends=ends
        )
        assert_true(run(scenario, observe=check_every(4)), REQUESTS)


@pytest.mark.parametrize("wanted", [0, 1, 7])
@pytest.mark.parametrize(("num_drafts", "max_tokens", "granted"), [(3, 9, 3), (0, 9, 0), (7, 5, 3)])
def test_the_first_plan_decodes_with_the_remotes_drafts_whatever_is_wanted_of_others(
    wanted: int, num_drafts: int, max_tokens: int, granted: int
) -> None:
    scheduler = make_scheduler()
    scheduler.add(given(make_request("p", 7, max_tokens), 5, num_drafts))
    plan = scheduler.plan(num_draft_tokens=wanted)
    assert plan is not None and not plan.decode_rows and not plan.prefill_chunks
    (load,) = plan.kv_loads
    assert (load.start, load.stop, load.keys, len(load.block_ids)) == (0, 7, (), 2)
    scheduler.apply(make_result(plan))
    assert scheduler.plan() is None
    assert scheduler.idle_cause is IdleCause.WAITING_FOR_TRANSFER
    scheduler.finish_load(load.transfer_id, 7)
    scheduler.check_integrity()
    plan = scheduler.plan(num_draft_tokens=wanted)
    assert plan is not None
    assert plan.decode_rows == (0,) and not plan.prefill_chunks
    assert plan.joined[0].num_computed_tokens == 7
    assert plan.joined[0].token_ids[7:] == (5,)
    assert sum(plan.num_draft_tokens or ()) == granted
    scheduler.check_integrity()
    assert scheduler.preempt_one() == 0  # Before the step has returned.
    scheduler.check_integrity()
    (sequence,) = scheduler.sequences
    assert (list(sequence.output_token_ids), list(sequence.logprobs)) == ([5], [-0.25])


def test_a_second_decode_step_is_for_the_caller_to_say() -> None:
    scheduler = make_scheduler(num_blocks=99)
    scheduler.add(given(make_request("p", 7, 40), 5, 3))
    (load,) = step(scheduler).kv_loads
    scheduler.finish_load(load.transfer_id, 7)
    drafts: list[tuple[int, ...] | None] = []
    for num_wanted in (0, 0, 2):
        wanted = {SequenceId(0): num_wanted}
        plan = scheduler.plan(num_draft_tokens=wanted)
        assert plan is not None
        drafts.append(plan.num_draft_tokens)
        num_tokens = 1 + sum(plan.num_draft_tokens or ())
        result = make_result(plan, [7] * num_tokens)
        scheduler.apply(replace(result, counts=(num_tokens,)))
        scheduler.check_integrity()
    assert drafts == [(3,), None, (2,)]


@pytest.mark.parametrize(("num_drafts", "window"), [(0, 3), (2, 1)])
def test_drafts_that_came_for_one_step_are_not_planned_for_a_window(
    num_drafts: int, window: int
) -> None:
    scheduler = make_scheduler()
    scheduler.add(given(make_request("p", 7, 40), 5, num_drafts))
    (load,) = step(scheduler).kv_loads
    scheduler.finish_load(load.transfer_id, 7)
    plan = scheduler.plan(window=3)
    assert plan is not None and plan.window == window
    assert sum(plan.num_draft_tokens or ()) == num_drafts
    scheduler.check_integrity()


RULES = StopRules(max_tokens=4, stop_token_ids=frozenset({5}), eos_token_ids=frozenset({6}))


@pytest.mark.parametrize(
    ("rules", "token_id", "reason"),
    [
        (RULES, 5, FinishReason.STOP),
        (RULES, 6, FinishReason.STOP),
        (StopRules(max_tokens=1), 5, FinishReason.LENGTH),
        (StopRules(max_tokens=4, stop_sequences=((5,),)), 5, FinishReason.STOP),
        (replace(RULES, min_tokens=2), 5, None),
        (replace(RULES, ignore_eos=True), 6, None),
    ],
)
def test_the_remote_token_may_end_the_request_before_anything_is_loaded(
    rules: StopRules, token_id: int, reason: FinishReason | None
) -> None:
    scheduler = make_scheduler()
    scheduler.add(given(make_request("p", 7, stop=rules), token_id))
    finished = scheduler.take_finished()
    assert [s.finish_reason for s in finished] == ([] if reason is None else [reason])
    scheduler.check_integrity()
    plan = scheduler.plan()
    assert (plan is None) == (reason is not None)


def test_a_stop_string_may_end_it_too() -> None:
    scheduler = make_scheduler()
    request = make_request("p", 7, make_stop_matcher=lambda: EndOnId(5))
    scheduler.add(given(request))
    (sequence,) = scheduler.take_finished()
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, "end")
    assert scheduler.stats.num_accepted_tokens == 1


def test_a_remote_prompt_that_the_pool_can_never_hold_is_refused_with_its_numbers() -> None:
    for num_blocks, reason in ((2, FinishReason.LENGTH), (1, FinishReason.ERROR)):
        scheduler = make_scheduler(num_blocks=num_blocks)
        scheduler.add(given(make_request("p", 8, 9)))
        (sequence,) = scheduler.take_finished()
        assert sequence.finish_reason is reason
        assert f"the pool has {num_blocks}" in sequence.finish_detail


def test_kv_of_other_weights_is_not_loaded_and_its_token_is_kept() -> None:
    """Before it is asked for, while it comes, and after it has come."""
    for moment in range(4):
        scheduler = make_scheduler()
        request = make_request("p", 7, 3)
        prefill = RemotePrefill(first_token_id=5, first_logprob=-0.25, weight_version=1)
        if moment:
            scheduler.set_weight_version(1, policy="recompute")
        scheduler.add(replace(request, remote_prefill=prefill))
        loads = list(step(scheduler).kv_loads) if moment > 1 else []
        if moment == 3:
            scheduler.finish_load(loads[0].transfer_id, 7)
        if moment:
            scheduler.set_weight_version(2, policy="recompute")
        if moment == 2:
            scheduler.finish_load(loads[0].transfer_id, 7)
        scheduler.check_integrity()
        plan = step(scheduler)
        assert not plan.kv_loads
        assert (plan.prefill_chunks[0].start, plan.prefill_chunks[0].stop) == (0, 8)
        step(scheduler)
        (sequence,) = scheduler.take_finished()
        assert list(sequence.output_token_ids) == [5, 7, 7]
        assert list(sequence.logprobs) == [-0.25, -0.5, -0.5]
        assert sequence.version_runs == [(1, 1), (2 if moment else 0, 2)]


def test_a_remote_load_is_asked_for_once() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add(given(make_request("p", 7, 5)))
    (load,) = step(scheduler).kv_loads
    scheduler.finish_load(load.transfer_id, 7)
    step(scheduler)
    scheduler.preempt_one()
    plan = step(scheduler)
    assert not plan.kv_loads and plan.prefill_chunks[0].stop == 9


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_samples": 2}, "num_samples of request 'p' must be 1 with a remote_prefill"),
        ({"required_prompt_columns": frozenset({"x"})}, "required_prompt_columns .* must be empty"),
    ],
)
def test_what_one_remote_token_cannot_serve_is_refused(
    change: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        replace(given(make_request("p")), **change)  # type: ignore[arg-type]  # One at a time.


@pytest.mark.parametrize(
    ("token_id", "logprob", "num_drafts", "text"),
    [
        (-1, -1.0, 0, "first_token_id must be at least 0"),
        (2**32, -1.0, 0, "first_token_id must be at most"),
        (1, float("nan"), 0, "first_logprob must be finite"),
        (1, -1.0, -1, "num_draft_tokens must be at least 0"),
    ],
)
def test_a_remote_prefill_that_cannot_be_is_refused(
    token_id: int, logprob: float, num_drafts: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        RemotePrefill(first_token_id=token_id, first_logprob=logprob, num_draft_tokens=num_drafts)


def test_what_is_cached_beyond_a_remote_prompt_needs_no_load() -> None:
    """Neither at first, nor after a preemption."""
    scheduler = make_scheduler(config=make_config(max_num_seqs=1))
    request = make_request("p", 6, 9)
    scheduler.add(replace(request, request_id="same"))
    step(scheduler, 5)
    scheduler.abort("same")
    scheduler.add(make_request("q", [*request.prompt_token_ids, 5, 6, 7, 8, 9, 10], 1))
    step(scheduler)
    scheduler.add(given(make_request("p", [*request.prompt_token_ids, 5], 9), 6))
    # Both full blocks are cached: the second one holds the remote's token as well.
    plan = step(scheduler)
    assert not plan.kv_loads and plan.joined[0].num_computed_tokens == 7
    for _ in range(5):
        step(scheduler)
    scheduler.preempt_one()
    plan = step(scheduler)
    assert not plan.kv_loads and plan.joined[0].num_computed_tokens == 12
    scheduler.check_integrity()
