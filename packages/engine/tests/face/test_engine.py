"""LLMEngine against parts that misbehave: nothing is lost in silence."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from syncline.engine.engine import EngineParts, LLMEngine
from syncline.engine.errors import EngineError, EngineFailedError, MissingResultsError
from syncline.engine.llm import LLM
from syncline.engine.protocols import SchedulerLike
from syncline.engine.runner.protocol import Runner
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import TinyModel
from syncline.engine.testing.engines import MakeLLM
from syncline.engine.testing.stand_ins import (
    RunnerStandIn,
    SchedulerStandIn,
    WeightsWrittenInFlight,
    scale_weights,
)
from syncline.scheduler_core import (
    IdleCause,
    Request,
    Sequence,
    SequenceId,
    StepPlan,
    StepResult,
)

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def changed(make_llm: MakeLLM, change: Callable[[EngineParts], EngineParts]) -> LLM:
    healthy = make_llm().engine
    return LLM.from_engine(LLMEngine(healthy.config, change(healthy.parts)))


class LosesSamples(SchedulerStandIn):
    """Never hands out sample 1 of the requests whose prompt begins with token 1."""

    __slots__ = ()

    def take_finished(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self.inner.take_finished()
            if sequence.prompt_token_ids[0] != 1 or sequence.sample_index != 1
        ]


def test_a_lost_sample_is_named(make_llm: MakeLLM) -> None:
    llm = changed(make_llm, lambda p: replace(p, scheduler=LosesSamples(p.scheduler)))
    params = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    with pytest.raises(MissingResultsError, match="prompt 1 sample 1") as caught:
        llm.generate([[2, 2], [1, 2], [3, 2]], params)
    assert caught.value.missing == ((1, 1),)
    assert caught.value.num_expected == 6
    assert len(llm.generate([[2, 2]], params)[0].outputs) == 2


class RefusesRequests(SchedulerStandIn):
    __slots__ = ("is_refusing",)

    def __init__(self, inner: SchedulerLike) -> None:
        super().__init__(inner)
        self.is_refusing = True

    def add(self, request: Request) -> tuple[SequenceId, ...]:
        if self.is_refusing:
            raise ValueError("not today")
        return self.inner.add(request)


def test_a_request_that_the_scheduler_refuses_leaves_no_trace(make_llm: MakeLLM) -> None:
    healthy = make_llm().engine
    refusing = RefusesRequests(healthy.parts.scheduler)
    engine = LLMEngine(healthy.config, replace(healthy.parts, scheduler=refusing))
    with pytest.raises(ValueError, match="not today"):
        engine.add_request("mine", "abc", SHORT)
    refusing.is_refusing = False
    engine.add_request("mine", "abc", SHORT)


class NeverPlans(SchedulerStandIn):
    __slots__ = ()

    def plan(self, *, window: int = 1) -> StepPlan | None:
        return None

    @property
    def idle_cause(self) -> IdleCause | None:
        return IdleCause.WAITING_FOR_BLOCKS


def test_an_engine_that_cannot_move_says_why_and_does_not_spin(make_llm: MakeLLM) -> None:
    llm = changed(make_llm, lambda p: replace(p, scheduler=NeverPlans(p.scheduler)))
    with pytest.raises(MissingResultsError, match="waiting_for_blocks"):
        llm.generate(["abc", "xyz"], SHORT)
    assert llm.engine.num_requests == 0
    llm.submit("abc", SHORT)
    with pytest.raises(EngineError, match="waiting_for_blocks"):
        llm.poll()


class Breaks(RunnerStandIn):
    __slots__ = ()

    def collect(self) -> StepResult:
        raise RuntimeError("out of luck")


def test_a_failed_step_is_raised_once_and_remembered(make_llm: MakeLLM) -> None:
    llm = changed(make_llm, lambda p: replace(p, runner=Breaks(p.runner)))
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate("abc", SHORT)
    calls: tuple[Callable[[], object], ...] = (
        lambda: llm.generate("abc", SHORT),
        lambda: llm.submit("abc", SHORT),
        llm.sleep,
        lambda: llm.update_weights([], version=1),
        llm.engine.step,
    )
    for call in calls:
        with pytest.raises(EngineFailedError, match="RuntimeError: out of luck"):
            call()


class Interrupted(SchedulerStandIn):
    """Ctrl-C between the third step and the fourth."""

    __slots__ = ("_num_calls",)

    def __init__(self, inner: SchedulerLike) -> None:
        super().__init__(inner)
        self._num_calls = 0

    def take_finished(self) -> list[Sequence]:
        self._num_calls += 1
        if self._num_calls == 5:
            raise KeyboardInterrupt
        return self.inner.take_finished()


def test_an_interrupted_generate_leaves_no_request_behind(make_llm: MakeLLM) -> None:
    llm = changed(make_llm, lambda p: replace(p, scheduler=Interrupted(p.scheduler)))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "xyz"], SamplingParams(max_tokens=100, ignore_eos=True))
    assert llm.engine.num_requests == 0
    assert llm.generate("abc", SHORT)[0].finished


class CountsChecks(SchedulerStandIn):
    __slots__ = ("num_checks",)

    def __init__(self, inner: SchedulerLike) -> None:
        super().__init__(inner)
        self.num_checks = 0

    def check_integrity(self) -> None:
        self.num_checks += 1
        self.inner.check_integrity()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_books_are_checked_whenever_the_engine_falls_idle(
    make_llm: MakeLLM, depth: int
) -> None:
    healthy = make_llm(max_steps_in_flight=depth).engine
    counting = CountsChecks(healthy.parts.scheduler)
    llm = LLM.from_engine(LLMEngine(healthy.config, replace(healthy.parts, scheduler=counting)))
    for round_number in (1, 2):
        llm.generate(["abc", "xyz"], SHORT)
        assert counting.num_checks == round_number


class RemembersForgotten(RunnerStandIn):
    """Keeps the ids it was told to forget."""

    __slots__ = ("forgotten",)

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self.forgotten: set[str] = set()

    def forget(self, request_id: str) -> None:
        self.forgotten.add(request_id)
        self.inner.forget(request_id)


def test_the_runner_forgets_every_request_however_it_ended(make_llm: MakeLLM) -> None:
    healthy = make_llm(num_kv_blocks=4).engine
    forgetting = RemembersForgotten(healthy.parts.runner)
    engine = LLMEngine(healthy.config, replace(healthy.parts, runner=forgetting))
    engine.add_request("ends", "abc", SHORT)
    engine.add_request("aborted", "abd", SHORT)
    engine.add_request("too big", [1] * 40, SHORT)
    with pytest.raises(ValueError, match="ends"):
        engine.add_request("ends", "abc", SHORT)
    engine.step()
    engine.abort("aborted")
    while engine.has_work:
        engine.step()
    assert forgetting.forgotten == {"ends", "aborted", "too big"}


def test_logits_that_are_not_numbers_end_a_sample_with_an_error_and_no_token(
    make_llm: MakeLLM,
) -> None:
    def change(parts: EngineParts) -> EngineParts:
        slots = parts.name_table.slots.values()
        return replace(
            parts,
            runner=WeightsWrittenInFlight(
                parts.runner, 3, lambda: scale_weights(slots, float("nan"))
            ),
        )

    llm = changed(make_llm, change)
    (output,) = llm.generate("abc", SHORT)
    completion = output.outputs[0]
    assert completion.finish_reason == "error"
    assert "not numbers" in completion.finish_detail
    assert len(completion.token_ids) == len(completion.logprobs) == 2
    llm.update_weights(TinyModel().tensors().items(), version=1)
    assert llm.generate("abc", SHORT)[0].outputs[0].finish_reason == "length"


def test_outputs_become_json(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate("abc", SamplingParams(n=2, max_tokens=2, logprobs=1))
    plain = output.to_json()
    assert plain["request_id"] == output.request_id
    assert isinstance(plain["outputs"], tuple)
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(output.outputs[0].logprobs))
    assert torch.isfinite(torch.tensor(output.outputs[0].logprobs)).all()


def test_a_priority_counts_under_its_policy_and_is_refused_by_name_under_fcfs(
    make_llm: MakeLLM,
) -> None:
    strict = make_llm().engine
    with pytest.raises(ValueError, match=r"priority of request 'a' must be 0 .*'fcfs', got 1"):
        strict.add_request("a", "abc", SHORT, priority=1)
    assert not strict.has_work
    strict.add_request("a", "abc", SHORT)  # Not a trace was left: the id is free.
    engine = make_llm(scheduling_policy="priority", max_num_seqs=1).engine
    for name, priority in (("late", 1), ("first", 0), ("urgent", -1)):
        engine.add_request(name, "abc", SHORT, priority=priority)
    ended: list[str] = []
    while engine.has_work:
        ended += [sample.request_id for sample in engine.step()]
    assert ended == ["urgent", "first", "late"]
