"""Sleep, wake and weight updates: what is refused, what survives, and under which weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from syncline.engine.engine import LLMEngine
from syncline.engine.errors import EngineClosedError, NotReadyError, UpdateOrderError
from syncline.engine.llm import LLM
from syncline.engine.outputs import Sample
from syncline.engine.protocols import SchedulerLike
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import TinyModel, write_tiny_checkpoint
from syncline.engine.testing.engines import MakeLLM
from syncline.engine.testing.stand_ins import SchedulerStandIn
from syncline.graph_lifecycle import ResidencyError, Tag
from syncline.weight_sync import (
    IncompleteUpdateError,
    NonFiniteWeightError,
    ShapeMismatchError,
    StaleVersionError,
    UnknownNameError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OTHER = TinyModel(seed=1)
EMBEDDING = "model.embed_tokens.weight"


def named(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.tensors().items()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "other", OTHER)


def greedy_ids(llm: LLM, prompt: str = "abc") -> tuple[int, ...]:
    return llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


def drain(llm: LLM) -> list[Sample]:
    samples: list[Sample] = []
    while got := llm.poll():
        samples += got
    return samples


def test_an_update_serves_what_a_cold_load_serves(make_llm: MakeLLM, other_model: str) -> None:
    llm, cold = make_llm(), make_llm(model=other_model)
    old = greedy_ids(llm)
    report = llm.update_weights(named(OTHER), version=1)
    assert report.coverage == 1.0
    assert report.bytes_written == report.bytes_total
    assert llm.weight_version == 1
    (output,) = llm.generate("abc", GREEDY)
    assert output.outputs[0].token_ids == greedy_ids(cold) != old
    assert output.outputs[0].weight_versions == ((1, 12),)


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("layout", ["row_major", "shuffle_16x16"])
def test_the_colocated_cycle_gives_new_weights_every_time(
    make_llm: MakeLLM, other_model: str, mode: str, moves: bool, layout: str
) -> None:
    llm = make_llm(arena_moves=moves, weight_layout=layout)
    expected = [greedy_ids(llm), greedy_ids(make_llm(model=other_model))]
    for version in (1, 2, 3):
        slept = llm.sleep(level=2)
        assert slept.num_bytes[Tag.WEIGHTS] > 0
        assert slept.num_bytes[Tag.KV_CACHE] > 0
        llm.wake_up(["weights"])
        model = OTHER if version % 2 else TinyModel()
        llm.update_weights(named(model), version, mode="staged" if mode == "staged" else "direct")
        with pytest.raises(ResidencyError, match="kv_cache is asleep"):
            llm.generate("abc", GREEDY)
        llm.wake_up(["kv_cache"])
        assert greedy_ids(llm) == expected[version % 2]


def test_a_plain_arena_sleeps_too(make_llm: MakeLLM) -> None:
    llm = make_llm(arena="plain")
    old = greedy_ids(llm)
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(named(TinyModel()), version=1)
    assert greedy_ids(llm) == old


def test_a_sleeping_engine_refuses_to_generate_and_survives(llm: LLM) -> None:
    old = greedy_ids(llm)
    llm.sleep()
    for call in (lambda: llm.generate("abc", GREEDY), lambda: llm.submit("abc", GREEDY)):
        with pytest.raises(ResidencyError, match="kv_cache is asleep"):
            call()
    assert llm.sleep(level=1).already_asleep == (Tag.KV_CACHE,)
    llm.wake_up()
    assert greedy_ids(llm) == old
    assert llm.wake_up().num_bytes == {}


def test_weights_that_woke_are_not_valid_before_a_complete_update(llm: LLM) -> None:
    old = greedy_ids(llm)
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(ResidencyError, match="weights are not valid"):
        llm.generate("abc", GREEDY)
    tensors = dict(named(TinyModel()))
    norm = tensors.pop("model.norm.weight")
    with pytest.raises(IncompleteUpdateError, match=r"model\.norm\.weight"):
        llm.update_weights(tensors.items(), version=1)
    with pytest.raises(ResidencyError, match="weights are not valid"):
        llm.generate("abc", GREEDY)
    llm.update_weights((tensors | {"model.norm.weight": norm}).items(), version=1)
    assert greedy_ids(llm) == old


def test_the_same_version_may_come_again_only_when_its_weights_are_lost(llm: LLM) -> None:
    with pytest.raises(StaleVersionError):
        llm.update_weights(named(OTHER), version=0)
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(named(OTHER), version=0)
    assert greedy_ids(llm)


@pytest.mark.parametrize("depth", [1, 2])
def test_sleep_collects_what_is_in_flight_and_loses_no_token(make_llm: MakeLLM, depth: int) -> None:
    llm = make_llm(max_steps_in_flight=depth)
    whole = [greedy_ids(llm, prompt) for prompt in ("abc", "0123", "xyz", "98")]
    llm.submit(["abc", "0123", "xyz", "98"], GREEDY)
    for _ in range(5):
        llm.engine.step()
    llm.sleep(level=1)
    assert llm.engine.parts.scheduler.steps_in_flight == 0
    llm.wake_up()
    samples = sorted(drain(llm), key=lambda sample: int(sample.request_id.split("-")[1]))
    assert [sample.output.token_ids for sample in samples] == whole
    assert all(sample.output.num_preemptions == 1 for sample in samples)


def test_level_and_tags_are_checked_by_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="level must be 1 or 2, got 3"):
        llm.sleep(level=3)
    with pytest.raises(ValueError, match="not both"):
        llm.sleep(level=1, tags=["weights"])
    with pytest.raises(ValueError, match="tags are weights"):
        llm.sleep(tags=["wieghts"])
    with pytest.raises(ResidencyError, match="static"):
        llm.sleep(tags=["static"])
    assert greedy_ids(llm)


def test_an_update_while_the_weights_sleep_is_refused_and_the_engine_survives(llm: LLM) -> None:
    old = greedy_ids(llm)
    llm.sleep(level=2)
    with pytest.raises(ResidencyError, match="weights is asleep"):
        llm.update_weights(named(OTHER), version=1)
    llm.wake_up()
    llm.update_weights(named(TinyModel()), version=1)
    assert greedy_ids(llm) == old


def test_sleeping_in_the_middle_of_an_update_is_refused(llm: LLM) -> None:
    llm.begin_update(1)
    tensors = dict(named(OTHER))
    llm.put_weight(EMBEDDING, tensors.pop(EMBEDDING))
    with pytest.raises(NotReadyError, match="weight update is open"):
        llm.sleep(level=2)
    llm.sleep(level=1)
    for name, tensor in tensors.items():
        llm.put_weight(name, tensor)
    llm.commit_update()
    llm.wake_up()
    assert greedy_ids(llm)


def test_a_direct_update_stops_generation_from_its_first_byte_to_its_end(llm: LLM) -> None:
    old = greedy_ids(llm)
    llm.begin_update(1)
    assert greedy_ids(llm) == old  # Nothing is written yet.
    llm.put_weight(EMBEDDING, OTHER.tensors()[EMBEDDING])
    with pytest.raises(NotReadyError, match="weight update to version 1"):
        llm.generate("abc", GREEDY)
    report = llm.abort_update("changed my mind")
    assert report.live_bytes_written
    with pytest.raises(ResidencyError, match="has not been completed"):
        llm.generate("abc", GREEDY)
    llm.update_weights(named(TinyModel()), version=1)
    assert greedy_ids(llm) == old


def test_a_staged_update_lets_generation_go_on_until_its_commit(
    make_llm: MakeLLM, other_model: str
) -> None:
    llm, cold = make_llm(), make_llm(model=other_model)
    old = greedy_ids(llm)
    llm.begin_update(1, mode="staged")
    for name, tensor in named(OTHER):
        llm.put_weight(name, tensor)
        assert greedy_ids(llm) == old
    llm.commit_update()
    assert greedy_ids(llm) == greedy_ids(cold)
    llm.begin_update(2, mode="staged")
    llm.put_weight(EMBEDDING, TinyModel().tensors()[EMBEDDING])
    assert not llm.abort_update("not needed").live_bytes_written
    assert greedy_ids(llm) == greedy_ids(cold)
    assert llm.weight_version == 1


def test_a_commit_lifts_its_own_fence_and_nothing_else(llm: LLM) -> None:
    llm.pause("keep")
    llm.sleep(level=1)
    llm.update_weights(named(OTHER), version=1)
    assert llm.engine.is_paused
    with pytest.raises(ResidencyError, match="kv_cache is asleep"):
        llm.generate("abc", GREEDY)
    llm.wake_up()
    with pytest.raises(NotReadyError, match="paused"):
        llm.generate("abc", GREEDY)
    llm.resume()
    assert greedy_ids(llm)


def test_updates_are_driven_in_order(llm: LLM) -> None:
    for call in (
        llm.commit_update,
        lambda: llm.abort_update("x"),
        lambda: llm.put_weight("x", torch.zeros(1)),
    ):
        with pytest.raises(UpdateOrderError, match="no update is open"):
            call()
    llm.begin_update(1)
    with pytest.raises(UpdateOrderError, match="version 1 is open"):
        llm.begin_update(2)
    llm.abort_update("done")


def test_a_closed_engine_takes_no_commit(llm: LLM) -> None:
    llm.begin_update(1, mode="staged")
    for name, tensor in named(OTHER):
        llm.put_weight(name, tensor)
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.commit_update()


def test_a_refused_tensor_leaves_the_old_weights_serving(llm: LLM) -> None:
    old = greedy_ids(llm)
    good = OTHER.tensors()
    with pytest.raises(UnknownNameError, match=r"model\.embed_tokens\.weight"):
        llm.update_weights([("model.embed_token.weight", good[EMBEDDING])], version=1)
    with pytest.raises(ShapeMismatchError, match=r"model\.embed_tokens\.weight"):
        llm.update_weights([(EMBEDDING, good[EMBEDDING][:-1])], version=1)
    with pytest.raises(NonFiniteWeightError):
        llm.update_weights([(EMBEDDING, good[EMBEDDING] * float("nan"))], version=1)
    with pytest.raises(IncompleteUpdateError):
        llm.update_weights([], version=1)
    assert greedy_ids(llm) == old
    assert llm.weight_version == 0


def test_a_refused_tensor_may_be_mended_within_its_update(
    make_llm: MakeLLM, other_model: str
) -> None:
    llm, cold = make_llm(), make_llm(model=other_model)
    llm.begin_update(1)
    for name, tensor in named(OTHER):
        with pytest.raises(ShapeMismatchError):
            llm.put_weight(name, tensor[:-1])
        llm.put_weight(name, tensor)
    llm.commit_update()
    assert greedy_ids(llm) == greedy_ids(cold)


class NotesEpochs(SchedulerStandIn):
    """Counts how often KV lost its meaning."""

    __slots__ = ("num_bumps",)

    def __init__(self, inner: SchedulerLike) -> None:
        super().__init__(inner)
        self.num_bumps = 0

    def bump_kv_epoch(self) -> int:
        self.num_bumps += 1
        return self.inner.bump_kv_epoch()


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_kv_loses_its_meaning_at_the_first_live_byte(make_llm: MakeLLM, mode: str) -> None:
    healthy = make_llm().engine
    noting = NotesEpochs(healthy.parts.scheduler)
    llm = LLM.from_engine(LLMEngine(healthy.config, replace(healthy.parts, scheduler=noting)))
    llm.begin_update(1, mode="staged" if mode == "staged" else "direct")
    assert noting.num_bumps == 0
    for name, tensor in named(OTHER):
        llm.put_weight(name, tensor)
        assert noting.num_bumps == (1 if mode == "direct" else 0)
    llm.commit_update()
    assert noting.num_bumps == 1


def test_old_kv_is_never_found_under_new_weights(make_llm: MakeLLM, other_model: str) -> None:
    prompt = "abcdefghijklmnop"
    llm = make_llm()
    greedy_ids(llm, prompt)
    (again,) = llm.generate(prompt, GREEDY)
    assert again.num_cached_tokens > 0
    llm.update_weights(named(OTHER), version=1)
    (fresh,) = llm.generate(prompt, GREEDY)
    assert fresh.num_cached_tokens == 0
    assert fresh.outputs[0].token_ids == greedy_ids(make_llm(model=other_model), prompt)


def test_an_update_from_an_iterable_that_breaks_leaves_no_update_open(llm: LLM) -> None:
    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield from list(named(OTHER))[:3]
        raise OSError("the link broke")

    with pytest.raises(OSError, match="the link broke"):
        llm.update_weights(breaking(), version=1)
    with pytest.raises(ResidencyError, match="has not been completed"):
        llm.generate("abc", GREEDY)
    llm.update_weights(named(TinyModel()), version=1)
    assert greedy_ids(llm)


def test_tied_heads_come_under_either_name_and_untied_ones_must_come(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    llm = make_llm()
    tensors = OTHER.tensors()
    llm.update_weights((tensors | {"lm_head.weight": tensors[EMBEDDING]}).items(), version=1)
    untied = TinyModel(tie_word_embeddings=False)
    other = make_llm(model=write_tiny_checkpoint(tmp_path / "untied", untied))
    incomplete = untied.tensors()
    del incomplete["lm_head.weight"]
    with pytest.raises(IncompleteUpdateError, match="lm_head"):
        other.update_weights(incomplete.items(), version=1)
