"""Decode rows of paged attention by Triton: how they are cut, and their launch or two.

Few rows may have a kernel of their own, `attention_few`. Of the others, rows that would not
fill the device are split along KV, as often as capture-time numbers alone say.
Their parts lie in the workspace, and are merged by the program that comes last, if the caller gave
counters, else by a second launch; the bits are the same.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.attention import PAGED_ATTENTION
from syncline.model_ops_rocm.checks import require_counters, workspace_of
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata
from syncline.model_ops_rocm.triton.configs.attention import WANTED_PROGRAMS, has_short_row
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.attention_decode import decode_kernel
from syncline.model_ops_rocm.triton.kv_places import places_of
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Chosen, overlaps
from syncline.model_ops_rocm.triton.ops import attention_few
from syncline.model_ops_rocm.triton.ops.attention_step import (
    MIN_BLOCK,
    Step,
    cache_pointers,
    chosen_for,
    constants_of,
    longest_of,
)
from syncline.model_ops_rocm.triton.ops.merge import launch_merge

_MAX_DECODE_ROWS: Final = 64
_MIN_SPLIT_TOKENS: Final = 64
_MAX_WHOLE_TOKENS: Final = 256  # merging parts costs more than reading so few at once
_MAX_SPLITS: Final = 32


class Units(NamedTuple):
    """How decode rows are cut: query heads and tokens of a tile, and parts of the KV."""

    block_m: int
    packed: int
    num_q_blocks: int
    num_units: int  # tiles of queries, of all rows
    num_splits: int
    are_short: bool  # whether a part is at most _MIN_SPLIT_TOKENS


class Parts(NamedTuple):
    """Where a split row's parts lie: [T, N, splits, D] and [T, N, splits], float32."""

    means: torch.Tensor
    lse: torch.Tensor


def units_of(
    meta: AttentionMetadata,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    arch: str,
) -> Units:
    group = num_heads // num_kv_heads
    block_m = min(max(power_of_two(meta.decode_query_len * group), MIN_BLOCK), _MAX_DECODE_ROWS)
    packed = min(group, block_m)
    num_q_blocks = -(-meta.decode_query_len // (block_m // packed))
    num_units = num_rows * num_kv_heads * -(-group // packed) * num_q_blocks
    longest = longest_of(meta, block_size)
    wanted = min(WANTED_PROGRAMS[arch] // max(num_units, 1), -(-longest // _MIN_SPLIT_TOKENS))
    wanted = 1 if longest <= _MAX_WHOLE_TOKENS else wanted
    num_splits = 1 << max(min(wanted, _MAX_SPLITS).bit_length() - 1, 0)
    are_short = longest <= num_splits * _MIN_SPLIT_TOKENS
    return Units(block_m, packed, num_q_blocks, num_units, num_splits, are_short)


def units_up_to(
    meta: AttentionMetadata, num_heads: int, num_kv_heads: int, block_size: int, arch: str
) -> Iterator[tuple[int, Units]]:
    """(rows, their units) of every number of rows that is split: fewer rows are more often."""
    for num_rows in range(1, min(meta.num_decode_rows, WANTED_PROGRAMS[arch] // 2) + 1):
        units = units_of(meta, num_rows, num_heads, num_kv_heads, block_size, arch)
        if units.num_splits > 1:
            yield num_rows, units


def parts_bytes(num_splits: int, num_tokens: int, num_heads: int, head_dim: int) -> int:
    return 4 * num_splits * num_tokens * num_heads * (head_dim + 1) if num_splits > 1 else 0


def decode(step: Step, workspace: torch.Tensor | None, counters: torch.Tensor | None) -> None:
    """The decode rows of the step, if it has any."""
    if step.meta.num_decode_rows == 0:
        return
    pool = step.cache.pool
    units = units_of(
        *(step.meta, step.meta.num_decode_rows, step.q.shape[1], pool.num_kv_heads),
        *(pool.layout.kernel_block_size, LAUNCHER.arch),
    )
    is_split = units.num_splits > 1 or LAUNCHER.is_preparing
    # Refused if they are too few or too small, whichever kernel is chosen.
    if is_split and counters is not None:
        require_counters(PAGED_ATTENTION, counters, units.num_units)
    kinds = attention_few.kinds_of(step)
    if kinds and units.num_splits > 1 and workspace is not None:
        _parts(step, units.num_splits, workspace)
    for kind in kinds:
        attention_few.attend(step, kind)
    if kinds and not LAUNCHER.is_preparing:
        return
    if units.num_splits == 1 or LAUNCHER.is_preparing:
        # Which one a number of rows needs, nothing but that number says: all are compiled.
        _launch(step, chosen_for(step, "decode"), units._replace(num_splits=1), None, None)
    if is_split:
        units = units._replace(num_splits=max(units.num_splits, 2))
        parts = _parts(step, units.num_splits, workspace)
        for chosen in _of_parts(step, are_short=units.are_short):
            _launch(step, chosen, units, parts, counters)
        if counters is None:
            num_tokens, lse = step.meta.num_decode_tokens, step.options.lse_TN
            launch_merge(
                parts.means.permute(2, 0, 1, 3),
                parts.lse.permute(2, 0, 1),
                step.out[:num_tokens],
                None if lse is None else lse[:num_tokens],
            )


def _of_parts(step: Step, *, are_short: bool) -> list[Chosen]:
    """What rows in parts are launched with; when they are prepared, all that may be."""
    split = chosen_for(step, "decode_split")
    if not has_short_row(split[0], step.q.shape[2]):
        return [split]
    short = chosen_for(step, "decode_short")
    if LAUNCHER.is_preparing:
        return [split, short]
    return [short if are_short else split]


def _launch(
    step: Step, chosen: Chosen, units: Units, parts: Parts | None, counters: torch.Tensor | None
) -> None:
    lse = step.options.lse_TN
    if parts is not None and counters is None:
        lse = None  # the merge's
    LAUNCHER.launch(
        decode_kernel,
        (units.num_units, units.num_splits),
        chosen,
        (
            *cache_pointers(step, chosen, step.out, lse, *(parts or (None, None)), counters),
            *(step.meta.seq_lens, step.meta.block_tables, step.options.scale),
            *(units.num_splits, step.cache.k.shape[0]),
            *step.q.stride(),
            *step.out.stride(),
            *((0, 0) if lse is None else lse.stride()),
            *step.meta.block_tables.stride(),
            step.meta.block_tables.shape[1] * step.cache.pool.layout.kernel_block_size,
            *places_of(step.cache.pool)[2:],
        ),
        constants_of(step, chosen)
        | {
            "PACKED": units.packed,
            "NUM_Q_BLOCKS": units.num_q_blocks,
            "Q_LEN": step.meta.decode_query_len,
            "IS_SPLIT": parts is not None,
            "OVERLAP": overlaps(chosen[1]),
            "NUM_ROWS": power_of_two(
                units.packed * min(step.meta.decode_query_len, units.block_m // units.packed)
            ),
            "BLOCK_M": units.block_m,
            **_apart(units.block_m),
        },
    )


def _apart(block_m: int) -> dict[str, object]:
    """No lanes for a tile of so many rows that each lane's sums of all of them would spill."""
    return {} if block_m == MIN_BLOCK else {"APART": 1}


def _parts(step: Step, num_splits: int, workspace: torch.Tensor | None) -> Parts:
    _, num_heads, head_dim = step.q.shape
    num_tokens = step.meta.num_decode_tokens
    num_bytes = parts_bytes(num_splits, num_tokens, num_heads, head_dim)
    given = None if LAUNCHER.is_compiling else workspace
    memory = workspace_of(PAGED_ATTENTION, given, num_bytes, step.q.device)
    numbers = memory[:num_bytes].view(torch.float32)
    shape = (num_tokens, num_heads, num_splits)
    cut = num_bytes // 4 * head_dim // (head_dim + 1)
    return Parts(numbers[:cut].view(*shape, head_dim), numbers[cut:].view(shape))
