"""The oracle can see: plans that are wrong in one place raise, or change the output."""

import dataclasses
from collections.abc import Callable

import pytest

from syncline.kv_cache import BlockId
from syncline.scheduler_core import PrefillChunk, RowJoin, SequenceId, StepPlan
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleError,
    OracleKV,
    OracleRunner,
    Scenario,
    StuckError,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import make_config, make_request

PROMPT: tuple[int, ...] = (5, 6, 7, 8, 9, 10)


def join(row: int, blocks: tuple[int, ...], *, num_computed_tokens: int = 0) -> RowJoin:
    return RowJoin(
        row=row,
        seq_id=SequenceId(row),
        request_id=f"r{row}",
        sample_index=0,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=num_computed_tokens,
        block_ids=tuple(map(BlockId, blocks)),
    )


def chunk(row: int, start: int, stop: int, *, is_final: bool) -> PrefillChunk:
    return PrefillChunk(row=row, start=start, stop=stop, is_final=is_final)


def first_plan(row: int = 0, blocks: tuple[int, ...] = (0, 1)) -> StepPlan:
    return StepPlan(
        step_id=0,
        kv_epoch=0,
        weight_version=0,
        joined=(join(row, blocks),),
        prefill_chunks=(chunk(row, 0, 6, is_final=True),),
    )


def decode_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id, kv_epoch=0, weight_version=0, decode_rows=(0,))


def test_tokens_are_the_models_own() -> None:
    runner = OracleRunner(OracleKV(4, 4))
    for plan in (first_plan(), decode_plan(1), decode_plan(2)):
        runner.launch(plan)
    token_ids = list(PROMPT)
    for _ in range(3):
        result = runner.collect()
        assert result.counts is None
        expected = HashModel().next_token(token_ids)
        assert (result.token_ids[0], result.logprobs[0]) == expected
        assert expected[1] < 0
        token_ids.append(expected[0])


WRONG: dict[str, tuple[str, StepPlan]] = {
    "a position beyond the table": ("not reserved", decode_plan(3)),
    "a row nobody has": (
        "without having joined",
        StepPlan(step_id=3, kv_epoch=0, weight_version=0, decode_rows=(1,)),
    ),
    "a row left twice": (
        "left without having joined",
        StepPlan(step_id=3, kv_epoch=0, weight_version=0, left=(1,)),
    ),
    "a row joined over another": (
        "joined while occupied",
        StepPlan(step_id=3, kv_epoch=0, weight_version=0, joined=(join(0, (2, 3)),)),
    ),
    "a step out of order": ("launched after step 2", decode_plan(4)),
    "new blocks in the wrong place": (
        "new ones start at 3",
        dataclasses.replace(decode_plan(3), new_blocks=((0, 3, (BlockId(2),)),)),
    ),
    "a block in two hands that is written": (
        "2 holders",
        StepPlan(
            step_id=3,
            kv_epoch=0,
            weight_version=0,
            joined=(join(1, (1, 3)),),
            prefill_chunks=(chunk(1, 0, 2, is_final=False),),
        ),
    ),
    "a prefix that was never computed": (
        "is read and holds",
        StepPlan(
            step_id=3,
            kv_epoch=0,
            weight_version=0,
            joined=(join(1, (2, 3), num_computed_tokens=4),),
            prefill_chunks=(chunk(1, 4, 6, is_final=True),),
        ),
    ),
    "kv of another epoch": (
        "in another epoch",
        dataclasses.replace(decode_plan(3), kv_epoch=1, new_blocks=((0, 2, (BlockId(2),)),)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused(name: str) -> None:
    message, wrong = WRONG[name]
    runner = OracleRunner(OracleKV(4, 4))
    for plan in (first_plan(), decode_plan(1), decode_plan(2)):
        runner.launch(plan)
    with pytest.raises(OracleError, match=message) as caught:
        runner.launch(wrong)
    assert caught.value.step_id == wrong.step_id


def spoil_table(runner: OracleRunner) -> None:
    runner.kv.write(0, 1, context=123, position=1, kv_epoch=0)


def spoil_tail(runner: OracleRunner) -> None:
    runner.kv.write(1, 1, context=123, position=5, kv_epoch=0)


@pytest.mark.parametrize("spoil", [spoil_table, spoil_tail])
def test_a_slot_overwritten_by_others_is_seen_at_the_next_read(
    spoil: Callable[[OracleRunner], None],
) -> None:
    runner = OracleRunner(OracleKV(4, 4))
    runner.launch(first_plan())
    spoil(runner)
    with pytest.raises(OracleError, match="is read and holds"):
        runner.launch(decode_plan(1))


def test_a_wrong_tail_changes_the_output_even_unseen() -> None:
    runner = OracleRunner(OracleKV(4, 4), is_strict=False)
    runner.launch(first_plan())
    spoil_tail(runner)
    runner.launch(decode_plan(1))
    first, second = runner.collect(), runner.collect()
    assert second.token_ids[0] != HashModel().next_token([*PROMPT, first.token_ids[0]])[0]


def test_a_final_flag_at_the_wrong_place_changes_the_output() -> None:
    runner = OracleRunner(OracleKV(4, 4), is_strict=False)
    plan = first_plan()
    runner.launch(dataclasses.replace(plan, prefill_chunks=(chunk(0, 0, 4, is_final=True),)))
    assert runner.collect().token_ids[0] != HashModel().next_token(PROMPT)[0]


def test_a_block_is_verified_once_per_write() -> None:
    runner = OracleRunner(OracleKV(8, 4))
    runner.launch(first_plan(blocks=(0, 1, 2, 3)))
    for step_id in range(1, 9):
        runner.launch(decode_plan(step_id))
    assert runner.num_reads == 0  # Its own writes are no news.


def test_a_scheduler_that_neither_plans_nor_waits_is_reported() -> None:
    scenario = Scenario(
        requests=(make_request(),),
        num_blocks=8,
        config=make_config(),
        controls={1: lambda scheduler, runner: scheduler.pause("keep")},
    )
    with pytest.raises(StuckError, match="1 sequences left, 0 of them parked, idle: paused"):
        run(scenario)


def test_the_reference_follows_every_stop_rule() -> None:
    model = HashModel(vocab_size=8)
    request = make_request("a", 4, 12)
    free = reference_output(model, request, 0, max_model_len=99)
    assert len(free.token_ids) == 12 and free.finish_reason == "length"
    capped = reference_output(model, request, 0, max_model_len=9)
    assert capped.token_ids == free.token_ids[:5]
    other = reference_output(model, request, 1, max_model_len=99)
    assert other.token_ids != free.token_ids
