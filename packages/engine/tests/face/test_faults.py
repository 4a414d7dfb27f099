"""The count probe is proved able to see: clean when the engine is right, and not when it is not.

On the shipped counter. Each fault stands behind the Protocol of the part it spoils. What the demo
sees of weights written in flight and of waking without new ones is in `test_demo`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from syncline.engine.build import build_parts
from syncline.engine.config import EngineConfig
from syncline.engine.engine import EngineParts, LLMEngine
from syncline.engine.llm import LLM
from syncline.engine.outputs import Sample
from syncline.engine.probes.count import CountProbe, CountReport, run_count_probe
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.shipped import shipped_checkpoint
from syncline.engine.testing.checkpoints import TinyModel
from syncline.engine.testing.engines import SMALL, MakeLLM
from syncline.engine.testing.stand_ins import (
    BlockFreedInUse,
    FinalAtPromptBoundary,
    LateRunner,
    StopTokenLeftAtPreemption,
    UnfencedGuard,
    WeightsWrittenInFlight,
    scale_weights,
)
from syncline.scheduler_core import StepsInFlightError

COUNTER = shipped_checkpoint("counter")
PROBE = CountProbe(num_requests=8, max_tokens=64)
FORCED = CountProbe(num_requests=8, max_tokens=90, force_preempt_every=3, until_preemptions=12)


def probe_counter(
    probe: CountProbe,
    change: Callable[[EngineParts], EngineParts] = lambda parts: parts,
    **config: Any,
) -> CountReport:
    settings = EngineConfig.from_kwargs(
        **{"model": COUNTER, "num_kv_blocks": 128, "max_num_seqs": 8, **config}
    )
    with LLMEngine(settings, change(build_parts(settings))) as engine:
        return run_count_probe(engine, probe)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("probe", "num_kv_blocks", "budget"),
    [(PROBE, 128, 8192), (PROBE, 32, 8192), (PROBE, 32, 24), (FORCED, 128, 32)],
)
def test_the_counter_is_clean_whatever_the_pool_the_budget_and_the_depth(
    probe: CountProbe, num_kv_blocks: int, budget: int, depth: int
) -> None:
    report = probe_counter(
        probe,
        num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=budget,
        max_steps_in_flight=depth,
        admission_policy="greedy",
    )
    assert report.passed, report.to_json()
    assert report.counts.num_clean == 8
    assert (report.num_preemptions > 0) == (num_kv_blocks == 32 or probe is FORCED)


def test_a_stop_token_left_in_the_context_breaks_the_count() -> None:
    def change(parts: EngineParts) -> EngineParts:
        (eos_token_id,) = parts.limits.eos_token_ids
        return replace(parts, scheduler=StopTokenLeftAtPreemption(parts.scheduler, eos_token_id))

    report = probe_counter(FORCED, change)
    assert not report.passed
    assert report.counts.num_breaks > 0
    assert report.counts.num_foreign_numbers == 0


def test_a_recompute_that_ends_at_the_prompt_reads_the_numbers_of_others() -> None:
    faults: list[FinalAtPromptBoundary] = []

    def change(parts: EngineParts) -> EngineParts:
        faults.append(FinalAtPromptBoundary(parts.runner))
        return replace(parts, runner=faults[0])

    # A small budget makes a recompute several chunks; a small pool makes blocks change hands.
    report = probe_counter(
        CountProbe(num_requests=8, max_tokens=150),
        change,
        num_kv_blocks=50,
        max_num_batched_tokens=40,
        enable_prefix_caching=False,
    )
    assert faults[0].num_skipped > 0
    assert not report.passed
    assert report.counts.num_drifted > 0, report.to_json()


def test_a_block_freed_in_use_makes_requests_go_on_with_the_numbers_of_others() -> None:
    faults: list[BlockFreedInUse] = []

    def change(parts: EngineParts) -> EngineParts:
        faults.append(BlockFreedInUse(parts.runner, after=20))
        return replace(parts, runner=faults[0])

    report = probe_counter(PROBE, change)
    assert faults[0].num_shared > 0
    assert not report.passed
    assert report.counts.num_drifted > 0, report.to_json()


def test_weights_written_under_a_step_in_flight_break_the_count() -> None:
    def change(parts: EngineParts) -> EngineParts:
        slots = parts.name_table.slots.values()
        return replace(
            parts,
            runner=WeightsWrittenInFlight(parts.runner, 40, lambda: scale_weights(slots, 3.0)),
        )

    report = probe_counter(PROBE, change)
    assert not report.passed
    assert report.counts.num_breaks > 0


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def late_llm(tiny_model: str) -> Iterator[Callable[..., LLM]]:
    """Engines with two steps in flight, executed as late as a device might."""
    made: list[LLM] = []

    def make(**parts_changed: Any) -> LLM:
        settings = EngineConfig.from_kwargs(model=tiny_model, max_steps_in_flight=2, **SMALL)
        parts = build_parts(settings)
        parts = replace(parts, runner=LateRunner(parts.runner), **parts_changed)
        made.append(LLM.from_engine(LLMEngine(settings, parts)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def run_into_an_update(llm: LLM) -> Sample:
    """An update while a step is in flight, then on to the end."""
    llm.submit("abc", GREEDY)
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.parts.scheduler.steps_in_flight == 1
    llm.update_weights(TinyModel(seed=1).tensors().items(), version=1)
    (sample,) = llm.poll()
    return sample


def test_a_guard_waits_for_the_step_in_flight(
    late_llm: Callable[..., LLM], make_llm: MakeLLM
) -> None:
    sample = run_into_an_update(late_llm())
    (old_version, num_old), _ = sample.output.weight_versions
    (expected,) = make_llm().generate("abc", GREEDY)
    assert old_version == 0
    assert sample.output.token_ids[:num_old] == expected.outputs[0].token_ids[:num_old]
    assert sample.output.logprobs[:num_old] == pytest.approx(
        expected.outputs[0].logprobs[:num_old], abs=1e-5
    )


def test_an_update_past_the_guard_is_still_refused_by_the_scheduler(
    late_llm: Callable[..., LLM],
) -> None:
    llm = late_llm(make_guard=lambda loop, on_first_write: UnfencedGuard())
    with pytest.raises(StepsInFlightError, match="1 steps are in flight"):
        run_into_an_update(llm)
