"""What a long sequence costs in bytes, whatever part of it is prompt or output."""

import gc
import tracemalloc

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import Request, Scheduler, SchedulerConfig, StepResult, StopRules
from syncline.scheduler_core.testing import num_yielding_rows

NUM_TOKENS = 32_768
MAX_BYTES = 1_500_000


def run_to(scheduler: Scheduler, num_tokens: int) -> None:
    """Plan and apply until the only sequence has so many tokens."""
    (sequence,) = scheduler.sequences
    window = 32
    while sequence.num_tokens < num_tokens:
        plan = scheduler.plan(window=min(window, num_tokens - sequence.num_tokens))
        assert plan is not None
        count = num_yielding_rows(plan) * plan.window
        scheduler.apply(
            StepResult(
                step_id=plan.step_id,
                # Ids above 256, so that each is an object of its own, as a device's are.
                token_ids=[1000 + (plan.step_id * 7 + i) % 50_000 for i in range(count)],
                logprobs=[-1.5 * (plan.step_id + i) for i in range(count)],
                counts=(plan.window,) if plan.decode_rows else None,
            )
        )


@pytest.mark.parametrize("num_prompt_tokens", [16, NUM_TOKENS // 2, NUM_TOKENS - 16])
def test_the_books_of_a_sequence_of_32k_tokens_stay_under_a_megabyte_and_a_half(
    num_prompt_tokens: int,
) -> None:
    kv = KVCacheManager(NUM_TOKENS // 16 + 4, 16)
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=4096, max_model_len=NUM_TOKENS + 16
    )
    scheduler = Scheduler(config, kv)
    prompt = tuple(range(1000, 1000 + num_prompt_tokens))
    request = Request(
        request_id="long", prompt_token_ids=prompt, stop=StopRules(max_tokens=NUM_TOKENS)
    )
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        scheduler.add(request)
        run_to(scheduler, NUM_TOKENS)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert scheduler.sequences[0].num_tokens == NUM_TOKENS
    assert NUM_TOKENS * 2 < after - before < MAX_BYTES
    scheduler.check_integrity()
