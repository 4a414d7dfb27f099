"""LLM: batches come back whole and in order, samples one by one, and misuse is refused by name."""

import math
from typing import Any

import pytest

from syncline.engine.engine import LLMEngine
from syncline.engine.errors import (
    EngineClosedError,
    MissingResultsError,
    NotReadyError,
    PromptError,
    PromptTooLongError,
    TokenIdError,
)
from syncline.engine.intake import Prompt
from syncline.engine.llm import LLM
from syncline.engine.outputs import RequestOutput, Sample
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import EOS_TOKEN_ID, NUM_TOKEN_IDS
from syncline.engine.testing.engines import MakeLLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def ids_of(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def drain(llm: LLM) -> list[Sample]:
    samples: list[Sample] = []
    while got := llm.poll():
        samples += got
    return samples


def test_outputs_come_in_input_order_prompt_major_with_every_sample(llm: LLM) -> None:
    prompts: list[Prompt] = ["abc", "0123456789,0123456789", [3, 1, 2], "z"]
    params = SamplingParams(n=3, max_tokens=5, seed=7, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["abc", prompts[1], None, "z"]
    assert outputs[2].prompt_token_ids == (3, 1, 2)
    for output in outputs:
        assert output.finished
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        for completion in output.outputs:
            assert len(completion.token_ids) == len(completion.logprobs) == 5
            assert all(math.isfinite(logprob) and logprob < 0 for logprob in completion.logprobs)
            assert completion.finish_reason == "length"
            assert completion.weight_versions == ((0, 5),)
            assert len(completion.text) <= 5


def test_samples_are_in_index_order_whichever_ended_first(llm: LLM) -> None:
    params = SamplingParams(n=8, seed=1, max_tokens=40, stop_token_ids=list(range(12)))
    (output,) = llm.generate("abc", params)
    lengths = [len(completion.token_ids) for completion in output.outputs]
    assert lengths != sorted(lengths), "the samples of this seed end in another order"
    assert [completion.index for completion in output.outputs] == list(range(8))
    (alone,) = llm.generate(
        "abc", SamplingParams(n=1, seed=1, max_tokens=40, stop_token_ids=list(range(12)))
    )
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    assert len(llm.generate("abc", GREEDY)) == 1
    assert len(llm.generate([1, 2, 3], GREEDY)) == 1
    assert len(llm.generate([[1, 2, 3]], GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "0123,"
    ids = llm.engine.parts.tokenizer.encode(text)
    assert ids_of(llm.generate([text], GREEDY)) == ids_of(llm.generate([list(ids)], GREEDY))


@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1])
def test_siblings_differ_and_a_seed_gives_the_same_again(make_llm: MakeLLM, seed: int) -> None:
    params = SamplingParams(n=4, seed=seed, max_tokens=16, ignore_eos=True)
    llm = make_llm()
    (first,) = ids_of(llm.generate("abc", params))
    assert len(set(first)) == 4
    assert ids_of(llm.generate("abc", params)) == [first]
    assert ids_of(make_llm(seed=9).generate("abc", params)) == [first]
    assert params.seed == seed


def test_seeded_samples_do_not_depend_on_order_or_company(llm: LLM) -> None:
    prompts = ["abc", "01,", "xyz 12", "q"]
    params = [SamplingParams(n=2, seed=i, max_tokens=9, ignore_eos=True) for i in range(4)]
    together = ids_of(llm.generate(prompts, params))
    backwards = ids_of(llm.generate(prompts[::-1], params[::-1]))
    alone = [ids_of(llm.generate(p, one))[0] for p, one in zip(prompts, params, strict=True)]
    assert together == backwards[::-1] == alone


def test_without_a_seed_equal_prompts_get_different_draws_and_runs_repeat(
    make_llm: MakeLLM,
) -> None:
    free = SamplingParams(max_tokens=16, ignore_eos=True)
    first, second = make_llm(seed=3), make_llm(seed=3)
    drawn = ids_of(first.generate(["abc"] * 3, free))
    assert len({completion for group in drawn for completion in group}) == 3
    assert ids_of(second.generate(["abc"] * 3, free)) == drawn
    assert ids_of(first.generate(["abc"] * 3, free)) != drawn
    assert ids_of(make_llm(seed=4).generate(["abc"] * 3, free)) != drawn


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_kv_blocks", [64, 12])
def test_pool_size_and_steps_in_flight_change_no_sample(
    make_llm: MakeLLM, depth: int, num_kv_blocks: int
) -> None:
    prompts = ["abcdefgh", "01234567", "98765432", "ab01cd23"]
    params = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True)
    roomy = make_llm(num_kv_blocks=256).generate(prompts, params)
    llm = make_llm(num_kv_blocks=num_kv_blocks, max_steps_in_flight=depth)
    outputs = llm.generate(prompts, params)
    assert ids_of(outputs) == ids_of(roomy)
    for output, expected in zip(outputs, roomy, strict=True):
        for got, want in zip(output.outputs, expected.outputs, strict=True):
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    if num_kv_blocks == 12:
        assert llm.stats.num_preemptions > 0
        assert any(c.num_preemptions for output in outputs for c in output.outputs)
    assert llm.engine.parts.scheduler.steps_in_flight == 0


def test_true_vocabulary_is_the_tokenizers_and_padding_is_never_sampled(llm: LLM) -> None:
    assert llm.true_vocab_size == NUM_TOKEN_IDS
    hot = SamplingParams(n=8, temperature=50.0, max_tokens=32, seed=0, ignore_eos=True)
    outputs = llm.generate("abc", hot)
    drawn = {i for completion in outputs[0].outputs for i in completion.token_ids}
    assert max(drawn) < NUM_TOKEN_IDS
    assert len(drawn) > 20


def test_score_gives_the_logprobs_that_sampling_recorded(llm: LLM) -> None:
    (output,) = llm.generate("abc01", SamplingParams(seed=5, max_tokens=12, ignore_eos=True))
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids
    scores = llm.score(token_ids)
    assert len(scores) == len(token_ids) - 1
    assert scores[-12:] == pytest.approx(output.outputs[0].logprobs, abs=1e-4)


def test_score_needs_two_tokens(llm: LLM) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        llm.score([1])


def test_prompt_logprobs_cover_every_position(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate("abcde", params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 5
    for token_id, entry in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None
        assert token_id in entry
        assert 2 <= len(entry) <= 3


def test_top_logprobs_come_per_token_and_agree_with_the_sampled_one(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(max_tokens=6, logprobs=3, seed=1))
    completion = output.outputs[0]
    assert completion.top_logprobs is not None
    assert len(completion.top_logprobs) == len(completion.token_ids)
    for token_id, logprob, top in zip(
        completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top.get(token_id, logprob) == pytest.approx(logprob, abs=1e-6)


def test_a_stop_string_cuts_the_text_and_keeps_its_tokens(llm: LLM) -> None:
    (free,) = llm.generate("abc", GREEDY)
    text = free.outputs[0].text
    assert len(text) == 8, "the greedy text of this checkpoint holds no special token"
    stop = text[3:5]
    end = text.index(stop) + 2
    for include in (False, True):
        params = SamplingParams(
            temperature=0.0, max_tokens=8, stop=stop, include_stop_str_in_output=include
        )
        (output,) = llm.generate("abc", params)
        completion = output.outputs[0]
        assert completion.finish_reason == "stop"
        assert completion.stop_reason == stop
        assert completion.text == text[: end if include else end - 2]
        assert completion.token_ids == free.outputs[0].token_ids[:end]
        assert len(completion.logprobs) == end


def test_stop_ids_and_eos_end_a_sample_where_they_appear(llm: LLM) -> None:
    (free,) = llm.generate("abc", GREEDY)
    wanted = free.outputs[0].token_ids[2]
    first = free.outputs[0].token_ids.index(wanted)
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[wanted])
    (output,) = llm.generate("abc", params)
    assert output.outputs[0].token_ids == free.outputs[0].token_ids[: first + 1]
    assert output.outputs[0].stop_reason == wanted
    # A bias of 100 makes the end of sequence certain.
    certain = {EOS_TOKEN_ID: 100.0}
    params = SamplingParams(max_tokens=8, min_tokens=3, logit_bias=certain, seed=0)
    (output,) = llm.generate("abc", params)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert len(completion.token_ids) == 4
    assert EOS_TOKEN_ID not in completion.token_ids[:3]
    assert completion.token_ids[3] == EOS_TOKEN_ID


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ("", PromptError, "empty"),
        ([[]], PromptError, "empty"),
        ([[NUM_TOKEN_IDS]], TokenIdError, f"token id {NUM_TOKEN_IDS} at position 0"),
        ([[1, -1]], TokenIdError, "position 1"),
        ([[True]], PromptError, "integers"),
        ([[1.0]], PromptError, "integers"),
        ([[0] * 512], PromptTooLongError, "max_model_len=512"),
    ],
)
def test_a_prompt_that_cannot_be_taken_refuses_the_whole_call(
    llm: LLM, prompt: Any, error: type[Exception], text: str
) -> None:
    prompts = [prompt] if isinstance(prompt, str) else prompt
    with pytest.raises(error, match=text):
        llm.generate(["abc", *prompts], GREEDY)
    assert llm.engine.num_requests == 0
    assert not llm.engine.has_work
    assert len(llm.generate("abc", GREEDY)) == 1


def test_the_longest_prompt_that_fits_gets_one_token(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=16)
    (output,) = llm.generate([[1] * 15], GREEDY)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(PromptTooLongError):
        llm.generate([[1] * 16], GREEDY)


def test_a_request_that_can_never_fit_ends_with_its_reason(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kv_blocks=3)
    too_big, fine = llm.generate([[1] * 20, [1, 2]], GREEDY)
    assert too_big.outputs[0].finish_reason == "error"
    assert "pool has 3" in too_big.outputs[0].finish_detail
    assert too_big.outputs[0].token_ids == ()
    assert fine.outputs[0].finish_reason == "length"


def test_parameters_are_one_or_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="1 items for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="mixes"):
        llm.generate([1, "a"], GREEDY)  # type: ignore[arg-type]  # the test


def test_samples_come_out_as_they_finish(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (12, 3, 6)]
    ids = llm.submit(["abc", "0,", "xy"], params)
    assert [sample.request_id for sample in llm.poll()] == [ids[1]]
    assert [sample.request_id for sample in llm.poll()] == [ids[2]]
    assert [sample.request_id for sample in drain(llm)] == [ids[0]]
    assert llm.poll() == []


def test_generate_keeps_what_a_submit_under_way_finishes(llm: LLM) -> None:
    (submitted,) = llm.submit("abc", SamplingParams(max_tokens=2, ignore_eos=True))
    (output,) = llm.generate("xyz", SamplingParams(max_tokens=10, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 10
    assert [sample.request_id for sample in llm.poll()] == [submitted]


def test_poll_returns_in_time_with_nothing(llm: LLM) -> None:
    llm.submit("abc", SamplingParams(max_tokens=100, ignore_eos=True))
    assert llm.poll(timeout_s=0.0) == []
    assert len(drain(llm)) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_returns_partial_tokens_with_their_logprobs(make_llm: MakeLLM, depth: int) -> None:
    llm = make_llm(max_steps_in_flight=depth)
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    (whole,) = llm.generate("abc", greedy)
    first, second = llm.submit(["abc", "abd"], greedy)
    for _ in range(6):
        assert llm.engine.step() == []
    (aborted,) = llm.abort(first)
    assert aborted.output.finish_reason == "abort"
    num_tokens = len(aborted.output.token_ids)
    assert 0 < num_tokens < 30
    assert aborted.output.token_ids == whole.outputs[0].token_ids[:num_tokens]
    assert aborted.output.logprobs == pytest.approx(
        whole.outputs[0].logprobs[:num_tokens], abs=1e-4
    )
    assert llm.abort(first) == []
    assert llm.abort("nobody") == []
    assert [sample.request_id for sample in drain(llm)] == [second]


def test_pause_keep_freezes_and_resume_goes_on_as_if_nothing_had_been(make_llm: MakeLLM) -> None:
    llm = make_llm(max_steps_in_flight=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    (whole,) = llm.generate("abc", greedy)
    llm.submit("abc", greedy)
    for _ in range(4):
        llm.engine.step()
    llm.pause("keep")
    assert llm.poll() == []
    with pytest.raises(NotReadyError, match="paused"):
        llm.generate("x", greedy)
    with pytest.raises(NotReadyError, match="paused already"):
        llm.pause("keep")
    llm.resume()
    (sample,) = drain(llm)
    assert sample.output.token_ids == whole.outputs[0].token_ids
    assert sample.output.num_preemptions == 0
    with pytest.raises(NotReadyError, match="not paused"):
        llm.resume()


def test_pause_wait_ends_what_has_begun_and_admits_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1)
    first, second = llm.submit(["abc", "xyz"], GREEDY)
    llm.engine.step()
    llm.pause("wait")
    assert [sample.request_id for sample in llm.poll()] == [first]
    assert llm.poll() == []
    llm.resume()
    assert [sample.request_id for sample in drain(llm)] == [second]


def test_pause_wait_does_not_take_an_older_pause_for_its_own(llm: LLM) -> None:
    (request_id,) = llm.submit("abc", GREEDY)
    llm.engine.step()
    llm.pause("keep")
    assert llm.poll() == []
    llm.resume()
    llm.pause("wait")
    assert not llm.engine.has_work
    assert [sample.request_id for sample in llm.poll()] == [request_id]


def test_pause_abort_ends_everything_with_what_there_is(llm: LLM) -> None:
    ids = llm.submit(["abc", "xyz"], SamplingParams(max_tokens=30, ignore_eos=True))
    llm.engine.step()
    llm.pause("abort")
    samples = llm.poll()
    assert {sample.request_id for sample in samples} == set(ids)
    assert {sample.output.finish_reason for sample in samples} == {"abort"}
    llm.resume()
    assert len(llm.generate("abc", GREEDY)) == 1


def test_a_closed_engine_says_so(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate("abc", GREEDY)


def test_request_ids_are_unique_while_unfinished(llm: LLM) -> None:
    engine: LLMEngine = llm.engine
    engine.add_request("mine", "abc", GREEDY)
    with pytest.raises(ValueError, match="mine"):
        engine.add_request("mine", "abd", GREEDY)
    while engine.has_work:
        engine.step()
    engine.add_request("mine", "abd", GREEDY)


def test_missing_results_are_named() -> None:
    error = MissingResultsError([(0, 1), (3, 0)], 8, "waiting_for_blocks")
    assert str(error) == (
        "2 of 8 samples have no result: prompt 0 sample 1, prompt 3 sample 0 (waiting_for_blocks)"
    )
    assert error.missing == ((0, 1), (3, 0))


def test_a_progress_bar_shows_only_on_long_calls_and_when_wanted(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["abc"] * 4, GREEDY)
    llm.generate(["abc"] * 4, GREEDY, use_tqdm=False)
    captured = capsys.readouterr()
    assert "generate" not in captured.err + captured.out
