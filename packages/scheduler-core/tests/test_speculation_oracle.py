"""The oracle sees what drafts can break: positions nobody reserved, KV that wrong drafts left."""

import dataclasses
import itertools

import pytest

from syncline.kv_cache import BlockId
from syncline.scheduler_core import ColumnSpan, PrefillChunk, RowJoin, SequenceId, StepPlan
from syncline.scheduler_core.oracle import (
    Drafter,
    HashModel,
    OracleError,
    OracleKV,
    OracleRunner,
    accept_all,
    accept_none,
    hash_drafter,
)

PROMPT: tuple[int, ...] = (5, 6, 7, 8, 9, 10)
MODEL = HashModel()


def join(row: int, block_ids: tuple[int, ...], token_ids: tuple[int, ...], num: int) -> RowJoin:
    return RowJoin(
        row=row,
        seq_id=SequenceId(row),
        request_id=f"r{row}",
        sample_index=0,
        token_ids=token_ids,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=num,
        block_ids=tuple(map(BlockId, block_ids)),
    )


def started(drafter: Drafter, num_blocks: int = 3) -> OracleRunner:
    """Row 0 has computed its prompt of 6 in blocks 0, 1, ... of four, and sampled a token."""
    runner = OracleRunner(OracleKV(8, 4), drafter=drafter, columns=("context",))
    first = StepPlan(
        step_id=0,
        kv_epoch=0,
        weight_version=0,
        joined=(join(0, tuple(range(num_blocks)), PROMPT, 0),),
        prefill_chunks=(PrefillChunk(row=0, start=0, stop=6, is_final=True),),
    )
    runner.launch(first)
    runner.collect()
    return runner


def verify_plan(step_id: int, num_drafts: int, window: int = 1) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        kv_epoch=0,
        weight_version=0,
        window=window,
        decode_rows=(0,),
        num_draft_tokens=(num_drafts,) if num_drafts else None,
    )


def always(num_right: int) -> Drafter:
    return lambda step, row, num_draft_tokens: num_right


def true_tokens(num_tokens: int) -> list[int]:
    token_ids = list(PROMPT)
    for _ in range(num_tokens):
        token_ids.append(MODEL.next_token(token_ids)[0])
    return token_ids


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("drafter", [accept_all, accept_none, hash_drafter(0.5)])
def test_verified_tokens_are_the_models_own(window: int, drafter: Drafter) -> None:
    for ks in itertools.product(range(4), repeat=2):
        runner = started(drafter, num_blocks=8)
        outputs = true_tokens(1)[len(PROMPT) :]
        for step_id, k in enumerate(ks, start=1):
            start = len(PROMPT) + len(outputs) - 1
            runner.launch(verify_plan(step_id, k, window))
            result = runner.collect()
            outputs += result.token_ids
            num_new = len(result.token_ids)
            assert window <= num_new <= window * (1 + k)
            assert (result.counts is None) == (k == 0 and window == 1)
            assert (result.window_counts is None) == (k == 0 or window == 1)
            assert result.counts in (None, (num_new,))
            assert result.window_counts is None or sum(result.window_counts) == num_new
            if drafter is accept_all:
                assert num_new == window * (1 + k)
            (span,) = result.columns
            # One value for each position whose token turned out right, none for a wrong draft.
            assert isinstance(span, ColumnSpan)
            assert (span.start, len(span.values)) == (start, num_new)
        assert [*PROMPT, *outputs] == true_tokens(len(outputs))


@pytest.mark.parametrize("num_right", [0, 1, 5])
def test_a_draft_beyond_the_reserved_positions_is_refused(num_right: int) -> None:
    """Two blocks of four: position 6 is the row's own, 7 its only draft's, right or wrong."""
    for num_drafts in range(4):
        runner = started(lambda step, row, k: min(num_right, k), num_blocks=2)
        if num_drafts <= 1:
            runner.launch(verify_plan(1, num_drafts))
        else:
            with pytest.raises(OracleError, match="position 8 is not reserved"):
                runner.launch(verify_plan(1, num_drafts))


def test_wrong_drafts_leave_wrong_kv_until_a_later_step_writes_there() -> None:
    runner = started(accept_none)
    contexts = [0]
    for token_id in true_tokens(3):
        contexts.append(MODEL.extend(contexts[-1], token_id, 0))
    for step_id, num_true in ((1, 7), (2, 8)):
        runner.launch(verify_plan(step_id, 2))
        slots = [runner.kv.read(p // 4, p % 4) for p in range(num_true + 2)]
        assert [slot.position for slot in slots] == list(range(num_true + 2))
        is_true = [slot.context == contexts[p + 1] for p, slot in enumerate(slots[:9])]
        assert is_true == [p < num_true for p in range(len(is_true))]


def test_a_block_with_a_wrong_draft_in_it_may_not_be_taken_over() -> None:
    """As if it had been published with its drafts: position 7 was written by a wrong one."""
    for drafter, is_wrong in ((accept_all, False), (accept_none, True)):
        runner = started(drafter)
        runner.launch(verify_plan(1, 1))
        plan = StepPlan(
            step_id=2,
            kv_epoch=0,
            weight_version=0,
            left=(0,),
            joined=(join(0, (0, 1, 3), tuple(true_tokens(3)), 8),),
            prefill_chunks=(PrefillChunk(row=0, start=8, stop=9, is_final=True),),
        )
        if is_wrong:
            with pytest.raises(OracleError, match="position 7 is read and holds"):
                runner.launch(plan)
        else:
            runner.launch(plan)


def test_a_drafter_that_answers_outside_its_drafts_is_refused() -> None:
    for num_right in (-1, 3):
        runner = started(always(num_right))
        with pytest.raises(ValueError, match=f"a drafter of 2 drafts got {num_right} right"):
            runner.launch(verify_plan(1, 2))


def test_a_row_left_between_two_verify_steps_takes_its_wrong_drafts_with_it() -> None:
    """Its blocks go to another row, which writes before it reads."""
    runner = started(accept_none)
    runner.launch(verify_plan(1, 3))
    plan = StepPlan(
        step_id=2,
        kv_epoch=0,
        weight_version=0,
        left=(0,),
        joined=(join(1, (2, 1), PROMPT, 0),),
        prefill_chunks=(PrefillChunk(row=1, start=0, stop=6, is_final=True),),
    )
    runner.launch(plan)
    runner.launch(dataclasses.replace(verify_plan(3, 1), decode_rows=(1,)))
    results = [runner.collect() for _ in range(3)]
    assert results[1].token_ids[0] == true_tokens(1)[-1]
    assert results[2].token_ids == [true_tokens(2)[-1]]
