"""The prefill side: an ended prompt's blocks belong to whoever reads them, until told."""

from dataclasses import replace

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import (
    FinishLoad,
    FinishReason,
    FinishSend,
    Handoff,
    IdleCause,
    Record,
    RecordingScheduler,
    RemotePrefill,
    Request,
    Scheduler,
    TransferError,
    TransferId,
    TransfersInFlightError,
    replay,
)
from syncline.scheduler_core.oracle import (
    HashModel,
    OracleKV,
    OracleRunner,
    Scenario,
    reference_output,
    run,
)
from syncline.scheduler_core.testing import make_config, make_request, make_result, step


def make_handing(num_blocks: int = 8, depth: int = 1) -> tuple[Scheduler, KVCacheManager]:
    kv = KVCacheManager(num_blocks, 4)
    config = make_config(max_num_batched_tokens=8, max_steps_in_flight=depth)
    return Scheduler(config, kv), kv


def handing(request: Request) -> Request:
    return replace(request, hands_off_kv=True)


def test_an_ended_prompt_is_kept_until_it_has_been_sent() -> None:
    scheduler, kv = make_handing()
    scheduler.add(handing(make_request("a", 10, 1)))
    step(scheduler)
    block_ids = tuple(scheduler.sequences[0].table.block_ids)
    assert scheduler.take_handoffs() == []
    step(scheduler)
    (handoff,) = scheduler.take_handoffs()
    assert handoff == Handoff(
        transfer_id=handoff.transfer_id,
        seq_id=scheduler.take_finished()[0].seq_id,
        request_id="a",
        sample_index=0,
        num_tokens=10,
        block_ids=block_ids,
        first_token_id=7,
        first_logprob=-0.5,
        weight_version=0,
    )
    assert scheduler.take_handoffs() == []
    assert (kv.num_free_blocks, scheduler.num_transfers) == (5, 1)
    with pytest.raises(TransfersInFlightError, match="1 transfers own blocks") as caught:
        scheduler.resize_pool(4)
    assert (caught.value.action, caught.value.num_transfers) == ("resize the pool", 1)
    # A request that needs those blocks waits for the transfer.
    scheduler.add(make_request("b", 24, 1))
    assert scheduler.plan() is None
    assert scheduler.idle_cause is IdleCause.WAITING_FOR_TRANSFER
    with pytest.raises(TransferError, match="send"):
        scheduler.finish_send(TransferId(handoff.transfer_id + 1))
    scheduler.check_integrity()
    scheduler.finish_send(handoff.transfer_id)
    with pytest.raises(TransferError, match="send"):
        scheduler.finish_send(handoff.transfer_id)
    while scheduler.has_unfinished:
        step(scheduler)
    scheduler.check_integrity()
    assert (kv.num_free_blocks, scheduler.num_transfers) == (8, 0)


def test_each_sample_hands_off_its_prompt_and_an_aborted_one_does_not() -> None:
    scheduler, kv = make_handing()
    scheduler.add(handing(make_request("a", 6, 2, num_samples=2)))
    scheduler.add(handing(make_request("b", 5, 9)))
    scheduler.add(make_request("c", 3, 1))
    for _ in range(4):
        step(scheduler)
        scheduler.check_integrity()
    scheduler.abort("b")
    handoffs = scheduler.take_handoffs()
    assert [(h.request_id, h.sample_index) for h in handoffs] == [("a", 0), ("a", 1)]
    assert scheduler.num_transfers == 2
    for handoff in handoffs:
        scheduler.finish_send(handoff.transfer_id)
    scheduler.check_integrity()
    assert kv.num_free_blocks == 8 and not scheduler.has_unfinished


def test_a_prompt_whose_blocks_were_lost_is_handed_off_empty() -> None:
    """Preempted with its last token in flight, or ended when its KV epoch was over."""
    scheduler, kv = make_handing(depth=2)
    scheduler.add(handing(make_request("a", 6, 1)))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.preempt_one()
    scheduler.apply(make_result(plan))
    scheduler.add(handing(make_request("b", 6, 3)))
    step(scheduler)
    scheduler.bump_kv_epoch()
    scheduler.set_weight_version(1, policy="keep_kv")
    step(scheduler)
    step(scheduler)
    handoffs = scheduler.take_handoffs()
    assert [(h.request_id, h.num_tokens, h.block_ids) for h in handoffs] == [
        ("a", 0, ()),
        ("b", 0, ()),
    ]
    for handoff in handoffs:
        scheduler.finish_send(handoff.transfer_id)
    assert kv.num_free_blocks == 8


@pytest.mark.parametrize("num_prompt", [1, 4, 7, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_engine_computes_the_prompt_and_another_goes_on(num_prompt: int, depth: int) -> None:
    """What the second returns is what one engine alone would have; the KV is read from the first,
    after others have run there."""
    request = make_request("a", num_prompt, 9)
    scheduler, _ = make_handing(num_blocks=6, depth=depth)
    runner = OracleRunner(OracleKV(6, 4))
    first = handing(replace(request, stop=replace(request.stop, max_tokens=1)))
    for added in (first, make_request("noise", 9, 6)):
        scheduler.add(added)
    while scheduler.has_unfinished:
        while (plan := scheduler.plan()) is not None:
            runner.launch(plan)
        scheduler.apply(runner.collect())
        scheduler.check_integrity()
    (handoff,) = scheduler.take_handoffs()
    assert handoff.num_tokens == num_prompt
    prefill = RemotePrefill(
        first_token_id=handoff.first_token_id,
        first_logprob=handoff.first_logprob,
        weight_version=handoff.weight_version,
        transfer=tuple(
            runner.kv.read(handoff.block_ids[p // 4], p % 4).context for p in range(num_prompt)
        ),
    )
    scheduler.finish_send(handoff.transfer_id)
    scenario = Scenario(
        requests=(replace(request, remote_prefill=prefill),),
        num_blocks=8,
        config=make_config(max_steps_in_flight=depth),
    )
    outcome = run(scenario)
    expected = reference_output(HashModel(), request, 0, max_model_len=128)
    sequence = outcome.sequences["a", 0]
    assert tuple(sequence.output_token_ids) == expected.token_ids
    assert tuple(sequence.logprobs) == expected.logprobs
    assert sequence.finish_reason is FinishReason.LENGTH
    assert outcome.stats.num_prefill_tokens == 0


def test_remote_loads_and_sends_are_replayed_with_the_plans_they_lead_to() -> None:
    records: list[Record] = []
    config = make_config()
    scheduler = RecordingScheduler(config, KVCacheManager(6, 4), on_record=records.append)
    prefill = RemotePrefill(first_token_id=5, first_logprob=-0.5, transfer=("host", 7))
    scheduler.add(handing(replace(make_request("a", 9, 3), remote_prefill=prefill)))
    scheduler.add(make_request("b", 11, 9))
    digests: list[str] = []
    while scheduler.has_unfinished:
        plan = step(scheduler)
        digests.append(plan.digest())
        for load in plan.kv_loads:
            assert load.remote == ("host", 7)
            scheduler.finish_load(load.transfer_id, 9)
        for handoff in scheduler.take_handoffs():
            scheduler.finish_send(handoff.transfer_id)
    assert {FinishLoad, FinishSend} <= {type(record) for record in records}
    replica = Scheduler(config, KVCacheManager(6, 4))
    assert [plan.digest() for plan in replay(replica, records)] == digests
    assert replica.metrics() == scheduler.metrics()
