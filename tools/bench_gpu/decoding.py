"""Time of what lies between two decode steps: mostly small launches, so a node's time counts.

The floor is that of the bytes alone, which says little of a small launch: no share is promised.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_timing import Machine, Row, num_operands, row_of_bytes

from syncline.model_ops_rocm import (
    Advance,
    DecodeInputs,
    DecodeState,
    Rejection,
    detect_arch,
    select,
)

NUM_STOP_IDS, NUM_ENTRIES, BLOCK_SIZE = 8, 64, 64
NUM_CALLS = 64
VOCABULARY = 151_936


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """One token per row, and rows of drafts."""
    advance = select("advance", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    for num_rows, num_queries in ((256, 1), (256, 4)) if quick else ((256, 1), (256, 4), (1, 1)):
        yield _advance(machine, advance, num_rows, num_queries)
    for num_rows, num_drafts in ((256, 3),) if quick else ((256, 3), (256, 1)):
        yield _verify(machine, num_rows, num_drafts)
    for num_rows in (256,) if quick else (256, 16):
        yield _reject(machine, num_rows)


def _advance(machine: Machine, advance: Advance, num_rows: int, num_queries: int) -> Row:
    calls: list[Callable[[], object]] = []
    for seed in range(NUM_CALLS):
        tokens, state, out, accepted, drafts = _operands(num_rows, num_queries, seed)
        calls.append(
            partial(advance, tokens, state, out, num_accepted_R=accepted, drafts_RK=drafts)
        )
    num_bytes = 4 * num_rows * (NUM_STOP_IDS + 12 + 5 * num_queries)
    return row_of_bytes(
        machine,
        "advance",
        f"{num_rows} rows x {num_queries}, {NUM_STOP_IDS} stop ids",
        calls,
        num_bytes,
        note="latency",
    )


def _verify(machine: Machine, num_rows: int, num_drafts: int) -> Row:
    verify = select("verify_drafts", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    calls: list[Callable[[], object]] = []
    for _ in range(NUM_CALLS):
        drafts = torch.randint(0, 2, (num_rows, num_drafts), dtype=torch.int32, device="cuda")
        drawn = torch.randint(0, 2, (num_rows, num_drafts + 1), device="cuda")
        out = torch.empty_like(drawn), torch.empty_like(drafts[:, 0])
        calls.append(partial(verify, drafts, drawn, out=out))
    num_bytes = num_rows * (4 * num_drafts + 16 * (num_drafts + 1) + 4)
    return row_of_bytes(
        machine,
        "verify_drafts",
        f"{num_rows} rows x {num_drafts}, exact",
        calls,
        num_bytes,
        note="latency",
    )


def _reject(machine: Machine, num_rows: int) -> Row:
    """By rejection, its launches together; half of the drafts hold."""
    verify = select("verify_drafts", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    num_drafts = 3
    of_row = (2 * num_drafts + 1) * VOCABULARY * 2
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_rows * of_row)):
        target = torch.randn(
            num_rows, num_drafts + 1, VOCABULARY, dtype=torch.bfloat16, device="cuda"
        )
        drafts = target[:, :num_drafts].argmax(dim=2)
        drafts[::2, 1] = 7
        rejection = Rejection(
            seeds_R=torch.arange(num_rows, device="cuda"),
            sample_index_R=torch.zeros(num_rows, dtype=torch.int32, device="cuda"),
            positions_R=torch.arange(num_rows, device="cuda"),
            draft_logits_RKV=target[:, :num_drafts] * 0.9,
        )
        num_bytes = verify.workspace_bytes(drafts, target, rejection)
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(target[..., 0], dtype=torch.int64), torch.empty_like(drafts[:, 0])
        calls.append(
            partial(verify, drafts, target, rejection=rejection, out=out, workspace=workspace)
        )
    return row_of_bytes(
        machine,
        "verify_drafts",
        f"{num_rows} rows x {num_drafts}, rejection, {VOCABULARY:,} ids",
        calls,
        num_rows * of_row,
        note="all launches; every logit once",
    )


def _operands(
    num_rows: int, num_queries: int, seed: int
) -> tuple[torch.Tensor, DecodeState, DecodeInputs, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, generator=generator, dtype=torch.int32, device="cuda"
        )

    # Replays go on where the last one ended: the rows must neither stop nor leave their table.
    num_tokens = drawn(1, 500, num_rows)
    state = DecodeState(
        num_tokens_S=num_tokens,
        last_ids_S=drawn(0, 150_000, num_rows),
        is_alive_S=torch.ones(num_rows, dtype=torch.bool, device="cuda"),
        faults_S=drawn(0, 1, num_rows),
        min_num_tokens_S=num_tokens + 1_000_000,
        max_num_tokens_S=num_tokens + 2_000_000,
        stop_ids_SE=drawn(0, 150_000, num_rows, NUM_STOP_IDS),
        block_tables_SM=drawn(0, 9_999, num_rows, NUM_ENTRIES),
        block_size=BLOCK_SIZE,
    )
    num_places = num_rows * num_queries
    out = DecodeInputs(
        input_ids_T=drawn(0, 9, num_places),
        positions_T=drawn(0, 9, num_places),
        slot_mapping_T=drawn(0, 9, num_places),
        seq_lens_R=drawn(0, 9, num_rows),
        num_new_R=drawn(0, 9, num_rows),
        query_start_loc_R1=torch.arange(
            0, num_places + 1, num_queries, dtype=torch.int32, device="cuda"
        ),
        rows_R=torch.randperm(num_rows, generator=generator, device="cuda").int(),
    )
    tokens = drawn(0, 150_000, num_rows, num_queries)
    accepted = drawn(0, num_queries, num_rows)
    return tokens, state, out, accepted, drawn(0, 150_000, num_rows, num_queries - 1)
