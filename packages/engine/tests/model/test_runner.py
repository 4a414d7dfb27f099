"""ModelRunner under the real scheduler: against transformers, and against itself under pressure."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from syncline.engine.config import EngineConfig
from syncline.engine.errors import RunnerError
from syncline.engine.runner import ModelRunner
from syncline.engine.runner.protocol import (
    PROMPT_LOGPROBS_COLUMN,
    TOP_LOGPROBS_COLUMN,
    PromptLogprob,
)
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import NUM_TOKEN_IDS, TinyModel, write_tiny_checkpoint
from syncline.engine.testing.driving import Ask, load_runner, new_scheduler, run, run_to_end
from syncline.engine.testing.driving import add as add_request
from syncline.scheduler_core import FinishReason, Sequence, StepPlan

TINY = TinyModel(vocab_size=64, intermediate_size=64, num_heads=4, num_kv_heads=2)
VOCAB = NUM_TOKEN_IDS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), TINY)


def configure(checkpoint: str, **fields: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 96,
        "block_size": 4,
        "num_kv_blocks": 200,
    }  # Any: EngineConfig checks its own fields
    return EngineConfig(model=checkpoint, **(defaults | fields))


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return tuple(ids)


def asks(temperature: float, n: int = 1, max_tokens: int = 20) -> list[Ask]:
    """Prompts of many lengths, two of them equal, two sharing a long prefix."""
    shared = random_prompt(21, 99)
    prompts = [random_prompt(length, length) for length in (1, 3, 4, 17, 30, 41)]
    prompts += [prompts[3], (*shared, 1, 2, 3), (*shared, 4, 5)]
    params = SamplingParams(temperature=temperature, n=n, max_tokens=max_tokens, ignore_eos=True)
    return [Ask(prompt=prompt, params=params, seed=i) for i, prompt in enumerate(prompts)]


def tokens(finished: dict[tuple[str, int], Sequence]) -> dict[tuple[str, int], list[int]]:
    return {key: list(sequence.output_token_ids) for key, sequence in finished.items()}


def reference_logprobs(checkpoint: str, ids: tuple[int, ...]) -> torch.Tensor:
    """transformers' log-probabilities over the real vocabulary after every token."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :, :VOCAB]
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("layout", ["row_major", "shuffle_16x16"])
def test_greedy_tokens_and_logprobs_equal_transformers(checkpoint: str, layout: str) -> None:
    config = configure(checkpoint, weight_layout=layout)
    requests = asks(0.0)
    finished = run(load_runner(config, true_vocab_size=VOCAB), config, requests)
    assert len(finished) == len(requests)
    for index, ask in enumerate(requests):
        sequence = finished[str(index), 0]
        assert sequence.finish_reason is FinishReason.LENGTH
        ids = ask.prompt + tuple(sequence.output_token_ids)
        expected = reference_logprobs(checkpoint, ids[:-1])[len(ask.prompt) - 1 :]
        assert sequence.output_token_ids == expected.argmax(-1).tolist()
        chosen = expected.max(-1).values
        assert torch.allclose(torch.tensor(sequence.logprobs), chosen, atol=1e-4)


@pytest.fixture(scope="module")
def roomy(checkpoint: str) -> dict[float, dict[tuple[str, int], Sequence]]:
    """What an engine without any pressure says, by temperature."""
    config = configure(checkpoint)
    return {
        temperature: run(load_runner(config, true_vocab_size=VOCAB), config, asks(temperature, n=2))
        for temperature in (0.0, 1.0)
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "pressure",
    [
        {"num_kv_blocks": 40},
        {"max_num_batched_tokens": 8},
        {"max_steps_in_flight": 2},
        {"max_steps_in_flight": 2, "num_kv_blocks": 40, "max_num_batched_tokens": 11},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"block_size": 16, "num_kv_blocks": 50},
        {"arena": "plain"},
    ],
    ids=lambda pressure: " ".join(f"{key}={value}" for key, value in pressure.items()),
)
def test_tokens_do_not_depend_on_pressure(
    checkpoint: str,
    roomy: dict[float, dict[tuple[str, int], Sequence]],
    temperature: float,
    pressure: dict[str, Any],
) -> None:
    expected = roomy[temperature]
    tight = configure(checkpoint, **pressure)
    got = run(load_runner(tight, true_vocab_size=VOCAB), tight, asks(temperature, n=2))
    assert tokens(got) == tokens(expected)
    for key, sequence in got.items():
        assert torch.allclose(
            torch.tensor(sequence.logprobs), torch.tensor(expected[key].logprobs), atol=1e-4
        )
    if temperature:
        assert got["0", 0].output_token_ids != got["0", 1].output_token_ids
    else:
        assert got["0", 0].output_token_ids == got["0", 1].output_token_ids


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_go_on_as_if_nothing_had_happened(checkpoint: str, depth: int) -> None:
    config = configure(checkpoint, max_steps_in_flight=depth)
    params = SamplingParams(
        temperature=0.8, max_tokens=24, repetition_penalty=1.2, presence_penalty=0.3,
        min_tokens=20, logprobs=2,
    )  # fmt: skip
    requests = [
        Ask(prompt=random_prompt(9, i), params=params, seed=i, eos=frozenset(range(0, VOCAB, 3)))
        for i in range(4)
    ]
    expected = run(load_runner(config, true_vocab_size=VOCAB), config, requests)
    runner = load_runner(config, true_vocab_size=VOCAB)
    got = run(runner, config, requests, preempt_every=3)
    assert sum(sequence.num_preemptions for sequence in got.values()) >= 4
    assert tokens(got) == tokens(expected)
    for key, sequence in got.items():
        column = sequence.columns[TOP_LOGPROBS_COLUMN]
        assert column.keys() == expected[key].columns[TOP_LOGPROBS_COLUMN].keys()


def test_a_plan_may_be_launched_before_the_last_result_is_collected(checkpoint: str) -> None:
    config = configure(checkpoint, max_steps_in_flight=2)
    runner = load_runner(config, true_vocab_size=VOCAB)
    scheduler = new_scheduler(config, runner.settings)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    add_request(scheduler, runner, "a", Ask(prompt=(1, 2, 3), params=params), VOCAB)
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        runner.launch(plan)
    assert runner.num_in_flight == 2
    run_to_end(scheduler, runner)
    assert runner.num_in_flight == 0


def test_samples_of_a_request_do_not_depend_on_who_else_runs(checkpoint: str) -> None:
    config = configure(checkpoint)
    requests = asks(1.0, n=3)
    together = run(load_runner(config, true_vocab_size=VOCAB), config, requests)
    alone = run(load_runner(config, true_vocab_size=VOCAB), config, requests[4:5])
    for sample in range(3):
        assert alone["0", sample].output_token_ids == together["4", sample].output_token_ids


def test_a_continued_prompt_draws_what_the_longer_sample_drew(checkpoint: str) -> None:
    config = configure(checkpoint)
    params = SamplingParams(temperature=1.0, max_tokens=16)

    def generate(prompt: tuple[int, ...]) -> dict[tuple[str, int], Sequence]:
        runner = load_runner(config, true_vocab_size=VOCAB)
        return run(runner, config, [Ask(prompt=prompt, params=params, seed=5)])

    prompt = random_prompt(7, 3)
    ids = generate(prompt)["0", 0].output_token_ids
    again = generate(prompt + tuple(ids[:6]))
    assert again["0", 0].output_token_ids[:10] == ids[6:]


@pytest.mark.parametrize("budget", [64, 9])
def test_prompt_logprobs_are_those_of_transformers_at_every_position(
    checkpoint: str, budget: int
) -> None:
    config = configure(checkpoint, max_num_batched_tokens=budget)
    runner = load_runner(config, true_vocab_size=VOCAB)
    prompts = [random_prompt(length, length) for length in (1, 2, 23, 23)]
    params = [
        SamplingParams(temperature=0.5, max_tokens=2, prompt_logprobs=k) for k in (0, 1, 3, 0)
    ]
    requests = [Ask(prompt=p, params=q) for p, q in zip(prompts, params, strict=True)]
    requests.append(Ask(prompt=prompts[2], params=SamplingParams(max_tokens=2)))
    finished = run(runner, config, requests)
    assert PROMPT_LOGPROBS_COLUMN not in finished["4", 0].columns
    for index, ask in enumerate(requests[:4]):
        column = finished[str(index), 0].columns[PROMPT_LOGPROBS_COLUMN]
        assert sorted(column) == list(range(len(ask.prompt)))
        assert column[0] is None
        expected = reference_logprobs(checkpoint, ask.prompt)
        for position in range(1, len(ask.prompt)):
            value = column[position]
            assert isinstance(value, PromptLogprob)
            row = expected[position - 1]
            assert value.logprob == pytest.approx(row[ask.prompt[position]].item(), abs=1e-4)
            top = row.topk(ask.params.prompt_logprobs or 0)
            assert [token_id for token_id, _ in value.top] == top.indices.tolist()


def test_top_logprobs_stand_at_the_position_of_the_sampled_token(checkpoint: str) -> None:
    config = configure(checkpoint)
    runner = load_runner(config, true_vocab_size=VOCAB)
    with_top = SamplingParams(temperature=1.0, max_tokens=5, logprobs=4)
    filtered = SamplingParams(temperature=1.0, max_tokens=5, logprobs=4, top_k=2)
    plain = SamplingParams(temperature=1.0, max_tokens=5)
    prompt = random_prompt(6, 1)
    finished = run(
        runner, config, [Ask(prompt=prompt, params=p, seed=8) for p in (plain, with_top, filtered)]
    )
    assert TOP_LOGPROBS_COLUMN not in finished["0", 0].columns
    sequence = finished["1", 0]
    assert sequence.output_token_ids == finished["0", 0].output_token_ids
    column = sequence.columns[TOP_LOGPROBS_COLUMN]
    assert sorted(column) == [6, 7, 8, 9, 10]
    expected = reference_logprobs(checkpoint, prompt + tuple(sequence.output_token_ids[:-1]))[5:]
    for position, row in zip(range(6, 11), expected, strict=True):
        pairs: Any = column[position]  # Any: a column holds objects; its form is what is tested
        assert [token_id for token_id, _ in pairs] == row.topk(4).indices.tolist()
        assert [logprob for _, logprob in pairs] == pytest.approx(
            row.topk(4).values.tolist(), abs=1e-4
        )
    few: Any = finished["2", 0].columns[TOP_LOGPROBS_COLUMN][6]  # Any: as above
    assert len(few) == 2 and math.exp(few[0][1]) + math.exp(few[1][1]) == pytest.approx(1.0)


def test_a_row_of_nan_ends_its_own_request_alone(checkpoint: str) -> None:
    config = configure(checkpoint, enable_prefix_caching=False)
    runner = load_runner(config, true_vocab_size=VOCAB)
    scheduler = new_scheduler(config, runner.settings)
    params = SamplingParams(temperature=1.0, max_tokens=8)
    for name in ("good", "bad"):
        add_request(scheduler, runner, name, Ask(prompt=random_prompt(5, 1), params=params), VOCAB)
    plan = scheduler.plan()
    assert plan is not None
    block = next(join for join in plan.joined if join.request_id == "bad").block_ids[0]
    runner.launch(plan)
    scheduler.apply(runner.collect())
    runner.kv_caches[0].k_BKCD[block] = math.nan
    finished = run_to_end(scheduler, runner)
    assert finished["bad", 0].finish_reason is FinishReason.ERROR
    assert "request bad" in finished["bad", 0].finish_detail
    assert finished["good", 0].finish_reason is FinishReason.LENGTH
    assert finished["good", 0].num_output_tokens == 8


def test_poisoned_weights_are_an_error_of_every_row_and_not_tokens(checkpoint: str) -> None:
    config = configure(checkpoint)
    runner = load_runner(config, true_vocab_size=VOCAB)
    for slot in runner.slots:
        if slot.name == "model.norm.weight":
            slot.storage["weight"].fill_(math.nan)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    finished = run(
        runner, config, [Ask(prompt=(1, 2), params=params), Ask(prompt=(3,), params=params)]
    )
    for sequence in finished.values():
        assert sequence.finish_reason is FinishReason.ERROR
        assert sequence.num_output_tokens == 0


def test_padded_rows_of_the_embedding_are_never_sampled(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path, TinyModel(vocab_size=256, scale=0.5))
    config = configure(directory)
    params = SamplingParams(temperature=5.0, max_tokens=40, n=4, logprobs=8)
    finished = run(
        load_runner(config, true_vocab_size=VOCAB), config, [Ask(prompt=(1,), params=params)]
    )
    for sequence in finished.values():
        assert max(sequence.output_token_ids) < VOCAB
        for pairs in sequence.columns[TOP_LOGPROBS_COLUMN].values():
            assert isinstance(pairs, tuple)
            assert all(token_id < VOCAB for token_id, _ in pairs)


def new_plan(step_id: int, **fields: Any) -> StepPlan:  # Any: as StepPlan says
    return StepPlan(step_id=step_id, kv_epoch=0, weight_version=0, **fields)


def test_what_cannot_be_done_is_refused_by_name_and_changes_nothing(checkpoint: str) -> None:
    config = configure(checkpoint)
    runner = load_runner(config, true_vocab_size=VOCAB)
    with pytest.raises(RunnerError, match="no step is in flight"):
        runner.collect()
    with pytest.raises(RunnerError, match="'x' is not registered"):
        runner.forget("x")
    sampling = ResolvedSampling(params=SamplingParams(), seed=0, true_vocab_size=VOCAB)
    runner.register("x", sampling)
    with pytest.raises(RunnerError, match="'x' is registered already"):
        runner.register("x", sampling)
    with pytest.raises(RunnerError, match="resolved for 5 ids, the model has"):
        runner.register("y", ResolvedSampling(params=SamplingParams(), seed=0, true_vocab_size=5))
    with pytest.raises(RunnerError, match="a window of 2 steps is not supported"):
        runner.launch(new_plan(0, window=2))
    with pytest.raises(RunnerError, match="draft tokens are not supported"):
        runner.launch(new_plan(0, num_draft_tokens=(1,), decode_rows=(0,)))
    runner.forget("x")
    scheduler = new_scheduler(config, runner.settings)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    add_request(scheduler, runner, "z", Ask(prompt=(1,), params=params), VOCAB)
    plan = scheduler.plan()
    assert plan is not None
    runner.forget("z")
    with pytest.raises(RunnerError, match="'z' is joined but not registered"):
        runner.launch(plan)
    runner.register("z", ResolvedSampling(params=params, seed=0, true_vocab_size=VOCAB))
    runner.launch(plan)
    with pytest.raises(RunnerError, match="plans run in order"):
        runner.launch(plan)
    scheduler.apply(runner.collect())
    assert run_to_end(scheduler, runner)["z", 0].num_output_tokens == 2


def test_a_forgotten_request_may_still_be_in_flight(checkpoint: str) -> None:
    config = configure(checkpoint, max_steps_in_flight=2)
    runner = load_runner(config, true_vocab_size=VOCAB)
    scheduler = new_scheduler(config, runner.settings)
    params = SamplingParams(temperature=1.0, max_tokens=20)
    add_request(scheduler, runner, "a", Ask(prompt=(1,), params=params), VOCAB)
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        runner.launch(plan)
    scheduler.abort("a")
    runner.forget("a")
    add_request(scheduler, runner, "a", Ask(prompt=(2,), params=params), VOCAB)
    finished = run_to_end(scheduler, runner)
    assert finished["a", 0].num_output_tokens == 20


def test_every_copy_of_a_runner_is_its_own(checkpoint: str) -> None:
    config = configure(checkpoint)
    first, second = (load_runner(config, true_vocab_size=VOCAB) for _ in range(2))
    assert isinstance(first, ModelRunner)
    one = run(first, config, asks(1.0))
    two = run(second, config, asks(1.0))
    assert tokens(one) == tokens(two)
