"""The count probe on a model that does not count and on stand-ins: what its report says.

What it says of the shipped counter, with and without faults, is in `test_faults`.
"""

from collections.abc import Iterator

import pytest

from syncline.engine.engine import LLMEngine
from syncline.engine.probes.count import CountProbe, run_count_probe
from syncline.engine.testing.engines import MakeLLM


@pytest.fixture
def engine(make_llm: MakeLLM) -> Iterator[LLMEngine]:
    yield make_llm(num_kv_blocks=32).engine


def test_a_model_that_cannot_count_breaks_in_every_stream(engine: LLMEngine) -> None:
    report = run_count_probe(engine, CountProbe(num_requests=3, max_tokens=20))
    assert not report.passed
    assert report.counts.num_clean == 0
    assert report.num_tokens == 60
    assert report.num_short == 0
    assert report.tokens_per_s > 0
    broken = report.to_json()["streams"]
    assert isinstance(broken, list)
    assert len(broken) == 3


def test_preemptions_are_forced_every_so_many_steps_until_enough(engine: LLMEngine) -> None:
    probe = CountProbe(num_requests=2, max_tokens=20, force_preempt_every=2, until_preemptions=4)
    report = run_count_probe(engine, probe)
    assert report.num_forced_preemptions == 4
    assert report.num_preemptions >= 4
    assert report.num_recomputed_tokens > 0
    again = run_count_probe(engine, CountProbe(num_requests=2, max_tokens=20))
    assert again.num_forced_preemptions == 0
    # What the same requests wrote does not depend on the preemptions.
    assert [s.first_break for s in again.streams] == [s.first_break for s in report.streams]


def test_nothing_is_forced_between_times(engine: LLMEngine) -> None:
    probe = CountProbe(num_requests=2, max_tokens=20, force_preempt_every=8)
    assert run_count_probe(engine, probe).num_forced_preemptions == 2


def test_every_step_is_reported(engine: LLMEngine) -> None:
    seen: list[tuple[int, int]] = []
    run_count_probe(
        engine,
        CountProbe(num_requests=2, max_tokens=5),
        lambda num_ended, num_preemptions: seen.append((num_ended, num_preemptions)),
    )
    assert seen[-1] == (2, 0)
    assert len(seen) >= 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_requests", 0),
        ("num_requests", 100),
        ("max_tokens", 0),
        ("force_preempt_every", -1),
        ("until_preemptions", -1),
    ],
)
def test_a_probe_out_of_range_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field.removeprefix("num_")):
        CountProbe(**{field: value})
