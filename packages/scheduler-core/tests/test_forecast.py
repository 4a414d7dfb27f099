"""Admission by forecast: what it knows of lengths, that it never sticks, what it saves."""

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import IdleCause, Scheduler, SchedulerConfig, StopRules
from syncline.scheduler_core.oracle import HashModel, Scenario, reference_output, run
from syncline.scheduler_core.simulate import (
    Result,
    Setup,
    Workload,
    draw_load,
    parse_lengths,
    simulate,
)
from syncline.scheduler_core.survival import (
    ONE,
    PRIOR_HALF_LENGTH,
    OutputLengths,
    bin_of,
    first_in,
)
from syncline.scheduler_core.testing import make_config, make_request, make_scheduler, step
from syncline.scheduler_core.types import AdmissionPolicy


def test_every_length_is_in_the_bin_that_begins_at_or_before_it() -> None:
    for length in [*range(3000), 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20]:
        index = bin_of(length)
        assert first_in(index) <= length < first_in(index + 1)
        assert bin_of(first_in(index)) == index
    assert [bin_of(length) for length in (4, 7, 8, 9, 10, 16)] == [4, 7, 8, 8, 9, 12]


def num_running(*lengths: int, up_to: int = 8192) -> list[int]:
    counts = [0] * (bin_of(up_to) + 1)
    for length in lengths:
        counts[bin_of(length)] += 1
    return counts


def test_before_anything_is_known_half_of_all_outputs_reach_the_prior_length() -> None:
    survival = OutputLengths().survival(num_running())
    assert survival.reaches(0) == ONE
    assert 0.49 * ONE < survival.reaches(PRIOR_HALF_LENGTH) < 0.51 * ONE
    assert 0.32 * ONE < survival.reaches(2 * PRIOR_HALF_LENGTH) < 0.35 * ONE
    chances = [survival.reaches(length) for length in range(5000)]
    assert chances == sorted(chances, reverse=True)


def test_lengths_that_were_seen_outweigh_the_prior() -> None:
    lengths = OutputLengths()
    for length in (90, 100, 110, 120) * 25:
        lengths.note(length, is_whole=True)
    survival = lengths.survival(num_running())
    assert survival.reaches(80) > 0.97 * ONE
    assert survival.reaches(112) < 0.6 * ONE
    assert survival.reaches(128) < 0.02 * ONE


def test_outputs_that_still_run_count_against_those_that_ended_early() -> None:
    """Three of a hundred have ended at 50, the others have got to 400: few are that short."""
    lengths = OutputLengths()
    for _ in range(3):
        lengths.note(50, is_whole=True)
    assert lengths.survival(num_running()).reaches(64) < 0.3 * ONE
    assert lengths.survival(num_running(*[400] * 97)).reaches(384) > 0.95 * ONE


def test_an_output_that_was_cut_tells_only_how_far_it_got() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.note(200, is_whole=False)
    assert lengths.survival(num_running()).reaches(192) > 0.98 * ONE
    assert lengths.survival(num_running()).reaches(512) > 0.6 * ONE


def test_what_was_seen_long_ago_fades() -> None:
    lengths = OutputLengths()
    for _ in range(2000):
        lengths.note(1000, is_whole=True)
    for _ in range(8000):
        lengths.note(50, is_whole=True)
    assert lengths.survival(num_running()).reaches(64) < 0.05 * ONE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_it_never_sticks_and_changes_no_answer(depth: int, num_samples: int) -> None:
    """Every pool from one that holds nobody to the end, to one that holds everybody; blocks of one
    token too, where the moments looked at are as close together as they can be.
    """
    rules = StopRules(max_tokens=11, stop_token_ids=frozenset(range(0, 64, 9)))
    requests = tuple(
        make_request(name, 3 + 2 * i, stop=rules, num_samples=num_samples)
        for i, name in enumerate("abcd")
    )
    config = make_config(
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_steps_in_flight=depth,
        admission_policy="forecast",
    )
    for num_blocks in (5, 6, 7, 9, 12, 16, 20):
        for block_size in (1, 2, 4):
            scenario = Scenario(
                requests=requests, num_blocks=num_blocks, config=config, block_size=block_size
            )
            outcome = run(scenario)
            for request in requests:
                for sample in range(num_samples):
                    expected = reference_output(HashModel(), request, sample, max_model_len=128)
                    sequence = outcome.sequences[request.request_id, sample]
                    got = tuple(sequence.output_token_ids)
                    if "kv capacity" in sequence.finish_detail:
                        assert got == expected.token_ids[: len(got)]
                    else:
                        assert got == expected.token_ids


def test_requests_start_in_order_of_arrival() -> None:
    """A short one behind a long one that has no room waits with it."""
    scheduler = make_scheduler(
        num_blocks=16, block_size=4, config=make_config(admission_policy="forecast")
    )
    scheduler.add(make_request("a", 8, 30))
    scheduler.add(make_request("b", 30, 30))
    scheduler.add(make_request("c", 1, 1))
    started: list[str] = []
    while scheduler.has_unfinished:
        plan = step(scheduler)
        started += [join.request_id for join in plan.joined]
        if started == ["a"]:
            assert scheduler.waiting_cause is IdleCause.WAITING_FOR_BLOCKS
    assert started == ["a", "b", "c"]
    assert scheduler.stats.num_preemptions == 0


def test_a_sequence_starts_at_once_where_all_fit_at_their_longest() -> None:
    scheduler = make_scheduler(
        num_blocks=20, block_size=4, config=make_config(admission_policy="forecast")
    )
    for name in "abcd":
        scheduler.add(make_request(name, 8, 12))
    assert [join.request_id for join in step(scheduler).joined] == ["a", "b", "c", "d"]


def test_a_refused_one_starts_when_another_has_ended() -> None:
    """Pool 8 of 4 slots: one of 8 + 24 tokens fills it, so the second waits for the first's end."""
    scheduler = make_scheduler(
        num_blocks=8,
        block_size=4,
        enable_prefix_caching=False,
        config=make_config(admission_policy="forecast"),
    )
    for name in "ab":
        scheduler.add(make_request(name, 8, 24))
    num_steps = 0
    while scheduler.num_waiting:
        step(scheduler)
        num_steps += 1
    assert scheduler.stats.num_preemptions == 0
    assert num_steps == 24 + 1


def simulated(policy: AdmissionPolicy, output: str, *, num_prefixes: int = 0) -> Result:
    workload = Workload(
        num_requests=150,
        prompt=parse_lengths("10-30"),
        output=parse_lengths(output),
        prefix_len=64 if num_prefixes else 0,
        num_prefixes=num_prefixes or 1,
    )
    load = draw_load(workload, 1024)
    config = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        max_steps_in_flight=2,
        admission_policy=policy,
    )
    return simulate(load, Setup(config=config, num_blocks=160, block_size=16, check_interval=0))


@pytest.mark.parametrize("output", ["60-180", "120", "lognormal:120,0.8", "20|220"])
def test_it_preempts_and_recomputes_far_less_than_the_greedy_policy(output: str) -> None:
    greedy, forecast = simulated("greedy", output), simulated("forecast", output)
    assert forecast.stats.num_accepted_tokens == greedy.stats.num_accepted_tokens
    assert greedy.stats.num_preemptions > 50
    assert forecast.stats.num_preemptions < 0.5 * greedy.stats.num_preemptions
    assert forecast.stats.num_recomputed_tokens < 0.8 * greedy.stats.num_recomputed_tokens
    assert forecast.history.num_steps < 1.35 * greedy.history.num_steps


def test_a_shared_prefix_is_counted_once() -> None:
    """With 64 tokens of every prompt in common nearly as many run as without them."""
    alone, shared = simulated("forecast", "60-180"), simulated("forecast", "60-180", num_prefixes=1)
    assert sum(shared.history.running) / shared.history.num_steps > 0.85 * (
        sum(alone.history.running) / alone.history.num_steps
    )


def test_a_pool_that_shrinks_is_noticed_at_once() -> None:
    kv = KVCacheManager(64, 4, enable_prefix_caching=False)
    scheduler = Scheduler(make_config(admission_policy="forecast"), kv)
    for name in "abcdef":
        scheduler.add(make_request(name, 8, 24))
    assert len(step(scheduler).joined) == 6
    scheduler.resize_pool(9)
    assert len(step(scheduler).joined) == 1


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="admission_policy must be 'forecast' or"):
        SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=2,
            admission_policy="x",  # type: ignore[arg-type]  # A wrong one on purpose.
        )
