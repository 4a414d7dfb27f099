"""Speed of the ops from logits to tokens; the floor is one read of the logits, and of counts.

A shard is half of the vocabulary, as one of two GPUs has it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from gpu_timing import Machine, Row, num_operands, row_of_bytes

from syncline.model_ops_rocm import (
    Distribution,
    Draw,
    LogitsRules,
    Vocabulary,
    detect_arch,
    select,
)

TARGET: Final = 0.7
# With top_k, top_p or min_p it may take three times as long.
FILTERED_TARGET: Final = TARGET / 3
_COLUMNS: Final = 151_936
_NUM_SHARDS: Final = 2
_DTYPES: Final = (torch.bfloat16, torch.float32)
Op = Callable[..., object]


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """The promised shapes, and smaller batches, other ops and rules unless `quick`."""
    for dtype in _DTYPES:
        yield from _samples(machine, 256, dtype)
        yield from _samples(machine, 256, dtype, spread=3.0)
    if not quick:
        for num_rows in (64, 8, 1):
            yield from _samples(machine, num_rows, torch.bfloat16)
        yield from _scores(machine)
        yield from _rules(machine)
        yield from _counts(machine)
        for num_rows in (256, 1):
            yield _partials(machine, num_rows)
            yield _combined(machine, num_rows)


def _row(
    machine: Machine, name: str, batches: list[torch.Tensor], calls: list[Op], more_bytes: int = 0
) -> Row:
    logits = batches[0]
    num_rows, num_columns = logits.shape
    target = FILTERED_TARGET if "top_" in name or "min_p" in name else TARGET
    return row_of_bytes(
        machine,
        name,
        f"{num_rows} x {num_columns} {str(logits.dtype).removeprefix('torch.')}",
        calls,
        logits.numel() * logits.element_size() + more_bytes,
        target=target if name.startswith("sample") and num_rows >= 256 else None,
    )


def _batches(
    num_rows: int, dtype: torch.dtype, spread: float = 1.0, *, num_shards: int = 1
) -> list[torch.Tensor]:
    shape = num_rows, _COLUMNS // num_shards
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    number = num_operands(num_bytes)
    return [torch.randn(shape, device="cuda", dtype=dtype).mul_(spread) for _ in range(number)]


def _samples(
    machine: Machine, num_rows: int, dtype: torch.dtype, *, spread: float = 1.0
) -> Iterator[Row]:
    op = select("sample", backend="triton", arch=detect_arch(), dtype=dtype)
    batches = _batches(num_rows, dtype, spread)
    workspace = torch.empty(op.workspace_bytes(batches[0]), dtype=torch.uint8, device="cuda")
    ids = torch.arange(num_rows, device="cuda")
    draw = Draw(torch.full_like(ids, 7), ids, ids)
    out = torch.empty_like(ids), torch.empty(num_rows, dtype=torch.float64, device="cuda")
    ones = torch.ones(num_rows, device="cuda")
    top_k, top_p, min_p = torch.full_like(ids, 50), ones * 0.9, ones * 0.05
    for name, distribution in (
        ("sample, greedy", Distribution(ones * 0.0)),
        ("sample, temperature", Distribution(ones * 0.7)),
        ("sample, top_k 50", Distribution(ones, top_k_R=top_k)),
        ("sample, top_p 0.9", Distribution(ones, top_p_R=top_p)),
        ("sample, min_p 0.05", Distribution(ones, min_p_R=min_p)),
        ("sample, top_k, top_p, min_p", Distribution(ones, top_k, top_p, min_p)),
    ):
        calls: list[Op] = [
            lambda x=x, distribution=distribution: op(
                x, distribution, draw, out=out, workspace=workspace
            )
            for x in batches
        ]
        # Of normal logits three times as wide a few ids hold most of the weight.
        yield _row(machine, name + (" of peaked rows" if spread > 1.0 else ""), batches, calls)


def _scores(machine: Machine) -> Iterator[Row]:
    batches = _batches(256, torch.bfloat16)
    given = select("token_logprobs", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    top = select("top_logprobs", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    workspace = torch.empty(given.workspace_bytes(batches[0]), dtype=torch.uint8, device="cuda")
    ids = torch.randint(0, _COLUMNS, (256,), device="cuda")
    out = torch.empty(256, dtype=torch.float64, device="cuda")
    calls: list[Op] = [lambda x=x: given(x, ids, out=out, workspace=workspace) for x in batches]
    yield _row(machine, "token_logprobs", batches, calls)
    for num_top in (1, 20):
        pair = (
            torch.empty(256, num_top, dtype=torch.int64, device="cuda"),
            torch.empty(256, num_top, dtype=torch.float64, device="cuda"),
        )
        calls = [
            lambda x=x, num_top=num_top, pair=pair: top(x, num_top, out=pair, workspace=workspace)
            for x in batches
        ]
        yield _row(machine, f"top_logprobs {num_top}", batches, calls)


def _rules(machine: Machine) -> Iterator[Row]:
    op = select("apply_logits_rules", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    batches = _batches(256, torch.bfloat16)
    ones, rows_R = torch.ones(256, device="cuda"), torch.arange(256, device="cuda")
    counts = torch.zeros(256, _COLUMNS, dtype=torch.int32, device="cuda")
    penalties = LogitsRules(counts_SV=counts, rows_R=rows_R, presence_R=ones, frequency_R=ones)
    bias = LogitsRules(
        bias_ids_RB=torch.randint(0, _COLUMNS, (256, 16), device="cuda"),
        bias_values_RB=torch.zeros(256, 16, device="cuda"),
    )
    # Penalties read counts and write every logit; of the biased ids' blocks alone is anything read.
    with_counts = counts.numel() * counts.element_size() + batches[0].numel() * 2
    for name, rules, more_bytes in (
        ("penalties", penalties, with_counts),
        ("16 biased ids", bias, 0),
    ):
        calls: list[Op] = [lambda x=x, rules=rules: op(x, rules, out=x) for x in batches]
        yield _row(machine, f"apply_logits_rules in place, {name}", batches, calls, more_bytes)


def _counts(machine: Machine) -> Iterator[Row]:
    """Prompts of 512 tokens, and a token for each row of a decode step."""
    op = select("count_tokens", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    counts = torch.zeros(256, _COLUMNS, dtype=torch.int32, device="cuda")
    for num_tokens, length in ((8_192, 512), (256, 1)):
        num_bytes = num_tokens * 24  # id and row, and a count read and written
        rows_T = torch.arange(num_tokens, device="cuda") // length
        calls: list[Op] = []
        for _ in range(num_operands(num_bytes)):
            ids = torch.randint(0, _COLUMNS, (num_tokens,), device="cuda")
            calls.append(partial(op, ids, rows_T.clone(), counts, is_prompt=length > 1))
        yield row_of_bytes(
            machine,
            "count_tokens, prompts" if length > 1 else "count_tokens",
            f"{num_tokens} of {_COLUMNS}",
            calls,
            num_bytes,
            note="latency",
        )


def _partials(machine: Machine, num_rows: int) -> Row:
    op = select("logits_partials", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    shards = _batches(num_rows, torch.bfloat16, num_shards=_NUM_SHARDS)
    workspace = torch.empty(op.workspace_bytes(shards[0]), dtype=torch.uint8, device="cuda")
    vocabulary = Vocabulary(first_id=_COLUMNS - shards[0].shape[1])
    temperature = torch.full((num_rows,), 0.7, device="cuda")
    out = torch.empty(num_rows, 3, dtype=torch.float64, device="cuda")
    given = {"temperature_R": temperature, "out": out, "workspace": workspace}
    calls: list[Op] = [partial(op, x, vocabulary=vocabulary, **given) for x in shards]
    return _row(machine, "logits_partials of a shard", shards, calls)


def _combined(machine: Machine, num_rows: int) -> Row:
    op = select("combine_partials", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    temperature = torch.full((num_rows,), 0.7, device="cuda")
    num_bytes = num_rows * (24 * (_NUM_SHARDS + 1) + 4)
    calls: list[Op] = []
    for _ in range(num_operands(num_bytes)):
        partials = torch.rand(_NUM_SHARDS, num_rows, 3, dtype=torch.float64, device="cuda")
        out = torch.empty_like(partials[0])
        calls.append(partial(op, partials, temperature_R=temperature, out=out))
    return row_of_bytes(
        machine,
        "combine_partials",
        f"{num_rows} of {_NUM_SHARDS} shards",
        calls,
        num_bytes,
        note="latency",
    )
