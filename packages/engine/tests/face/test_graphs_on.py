"""`enforce_eager=False` from the outside: the same answers, also after sleep, moves and updates."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from syncline.engine.llm import LLM
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.testing.checkpoints import TinyModel
from syncline.engine.testing.engines import MakeLLM
from syncline.graph_lifecycle import Tag

OTHER = TinyModel(seed=1)
PROMPTS = ["abc", "ca", "bbbbbb"]
SAMPLED = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)


def named(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.tensors().items()


def answers(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.mark.parametrize(
    "memory", [{"arena": "poison"}, {"arena": "poison", "arena_moves": True}, {"arena": "plain"}]
)
def test_graphs_give_eager_answers_through_sleep_wake_and_update(
    make_llm: MakeLLM, memory: dict[str, object]
) -> None:
    shared = {"max_steps_in_flight": 2, "max_model_len": 32, "max_num_seqs": 6, **memory}
    eager = make_llm(**shared)
    graphs = make_llm(enforce_eager=False, **shared)
    registry = graphs.engine.parts.registry
    assert registry is not None
    keys = registry.keys
    assert keys
    assert eager.engine.parts.registry is not None
    assert not eager.engine.parts.registry.keys
    for version in (1, 2):
        before = answers(eager)
        assert answers(graphs) == before
        for llm in (eager, graphs):
            llm.sleep(level=2)
            llm.wake_up([Tag.WEIGHTS])
            llm.update_weights(named(OTHER if version == 1 else TinyModel()), version=version)
            llm.wake_up([Tag.KV_CACHE])
        after = answers(eager)
        assert answers(graphs) == after
        assert after != before
        assert set(registry.keys) == set(keys)
        assert graphs.engine.degraded is None
