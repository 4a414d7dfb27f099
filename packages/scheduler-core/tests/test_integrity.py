"""The check of the books sees each single book that is wrong."""

from collections.abc import Callable

import pytest

from syncline.kv_cache import BlockId, IntegrityError
from syncline.scheduler_core import FinishReason, Scheduler, StateError
from syncline.scheduler_core.lifecycle import Lifecycle
from syncline.scheduler_core.oracle import OracleError, OracleKV, OracleRunner, Slot
from syncline.scheduler_core.sequence import NEVER
from syncline.scheduler_core.testing import make_config, make_request, make_scheduler, step


def busy() -> tuple[Scheduler, Lifecycle]:
    """ "a" and "b" decode with two tokens in flight each, "c" is prefilling, "d" waits."""
    config = make_config(max_num_seqs=3, max_num_batched_tokens=12, max_steps_in_flight=2)
    scheduler = make_scheduler(config=config)
    for name in "ab":
        scheduler.add(make_request(name, 4, 20))
    step(scheduler)
    scheduler.add(make_request("c", 40, 4))
    scheduler.add(make_request("d", 4, 4))
    assert scheduler.plan() is not None
    assert scheduler.plan() is not None
    life: Lifecycle = object.__getattribute__(scheduler, "_life")
    assert (len(life.decoding), len(life.prefilling), len(life.waiting)) == (2, 1, 1)
    return scheduler, life


def wait_twice(life: Lifecycle) -> None:
    life.waiting.put(next(iter(life.waiting)))


def forget_running(life: Lifecycle) -> None:
    del life.running[next(iter(life.prefilling))]


def stand_in_two_places(life: Lifecycle) -> None:
    (seq_id,) = life.prefilling
    life.draining[seq_id] = life.prefilling[seq_id]


def share_a_row(life: Lifecycle) -> None:
    a, b, _ = life.running.values()
    a.row = b.row


def free_a_held_row(life: Lifecycle) -> None:
    life.rows.give_up(0)


def forget_a_group(life: Lifecycle) -> None:
    life.groups["b"].sequences.clear()


def finish_without_leaving(life: Lifecycle) -> None:
    next(iter(life.running.values())).finish_reason = FinishReason.ABORT


def stay_at_the_limit(life: Lifecycle) -> None:
    (c,) = life.prefilling.values()
    c.max_total_tokens = c.num_tokens


def fly_beyond_the_limit(life: Lifecycle) -> None:
    a = next(iter(life.running.values()))
    a.max_total_tokens = a.num_tokens + 1


def lose_a_logprob(life: Lifecycle) -> None:
    a = next(iter(life.running.values()))
    a.outputs.settle()
    del a.outputs.logprobs[-1]


def forget_what_is_pending(life: Lifecycle) -> None:
    next(iter(life.running.values())).decode_from = NEVER


def take_a_block_from_nowhere(life: Lifecycle) -> None:
    next(iter(life.running.values())).table.block_ids.append(BlockId(63))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wait_twice, "waits twice"),
        (forget_running, "not exactly the unfinished ones"),
        (stand_in_two_places, "exactly one of prefilling, decoding, draining"),
        (share_a_row, "hold the rows"),
        (free_a_held_row, "rows are free"),
        (forget_a_group, "groups are not exactly"),
        (finish_without_leaving, "finished, but listed"),
        (stay_at_the_limit, "at its limit"),
        (fly_beyond_the_limit, "in flight beyond its limit"),
        (lose_a_logprob, "logprobs for"),
        (forget_what_is_pending, "may be in flight, not as many"),
        (take_a_block_from_nowhere, "counts 0 holders, but 1"),
    ],
)
def test_each_wrong_book_is_found(spoil: Callable[[Lifecycle], None], message: str) -> None:
    scheduler, life = busy()
    scheduler.check_integrity()
    spoil(life)
    with pytest.raises((StateError, IntegrityError), match=message):
        scheduler.check_integrity()


def test_the_oracle_looks_at_the_tail_slot_even_of_a_block_that_it_has_verified() -> None:
    """A slot that changes without a write, so that no serial tells of it."""
    for is_tail in (False, True):
        scheduler, runner = make_scheduler(), OracleRunner(OracleKV(8, 4))
        scheduler.add(make_request("a", 6, 4))
        for _ in range(2):
            plan = scheduler.plan()
            assert plan is not None
            runner.launch(plan)
            scheduler.apply(runner.collect())
        slots: list[Slot] = object.__getattribute__(runner.kv, "_slots")
        position = 6 if is_tail else 4  # Seven positions are written, the last is the tail.
        slots[position] = slots[position]._replace(context=1)
        plan = scheduler.plan()
        assert plan is not None
        if is_tail:
            with pytest.raises(OracleError, match=r"position 6 .*is read and holds"):
                runner.launch(plan)
        else:
            runner.launch(plan)  # It was verified under this serial.
