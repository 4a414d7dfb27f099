"""Paged attention by Triton: one launch for the decode rows, one for the others.

Decode rows may be split along KV: then their parts lie in the workspace, and a third launch merges
them. How often depends on capture-time numbers alone.
"""

from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.attention import (
    PAGED_ATTENTION,
    AttentionOptions,
    check_host_lengths,
    check_paged_attention,
    plain_layout,
    pool_of,
    require_support,
)
from syncline.model_ops_rocm.arguments.dense import check_caches
from syncline.model_ops_rocm.checks import require_out, require_workspace
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata, KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.kv.support import KVSupport
from syncline.model_ops_rocm.quant import CodeType
from syncline.model_ops_rocm.triton.configs.attention import MAX_HEAD_DIM, WANTED_PROGRAMS
from syncline.model_ops_rocm.triton.configs.base import ConfigKey
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.attention import decode_kernel, prefill_kernel
from syncline.model_ops_rocm.triton.kv_places import ORDERS, places_of, scales_per
from syncline.model_ops_rocm.triton.launch import (
    IS_INTERPRETED,
    LAUNCHER,
    overlaps,
    require_reachable,
)
from syncline.model_ops_rocm.triton.ops.merge import launch_merge
from syncline.model_ops_rocm.triton.targets import LaunchConfig, casts_natively

SUPPORT: Final = KVSupport(
    op=PAGED_ATTENTION,
    backend="triton",
    orders=ORDERS,
    block_sizes=(16, 256),
    max_head_dim=MAX_HEAD_DIM,
    head_dim_multiple=8,
)
_MIN_BLOCK: Final = 16  # of a matrix instruction
_MAX_DECODE_ROWS: Final = 64
_MIN_SPLIT_TOKENS: Final = 64
_MAX_WHOLE_TOKENS: Final = 256  # merging parts costs more than reading so few at once
_MAX_SPLITS: Final = 32
# The code, and how a kernel decodes it: by an instruction, by integers.
_CODES: Final = {
    torch.float8_e4m3fn: (CodeType.E4M3FN, 1, 3),
    torch.float8_e4m3fnuz: (CodeType.E4M3FNUZ, 2, 4),
}
_Chosen = tuple[ConfigKey, LaunchConfig]


class _Cache(NamedTuple):
    pool: KVPool
    k: torch.Tensor
    v: torch.Tensor
    scales: KVScales | None


class _Step(NamedTuple):
    """One call, its arguments checked."""

    q: torch.Tensor
    cache: _Cache
    meta: AttentionMetadata
    options: AttentionOptions
    out: torch.Tensor

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.cache.pool.num_kv_heads


class _Units(NamedTuple):
    """How decode rows are cut: query heads and tokens of a tile, and parts of the KV."""

    block_m: int
    packed: int
    num_q_blocks: int
    num_units: int  # tiles of queries, of all rows
    num_splits: int


class TritonPagedAttention:
    """See `contracts.PagedAttention`."""

    __slots__ = ()

    @property
    def kv_support(self) -> KVSupport:
        return SUPPORT

    def workspace_bytes(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        layout: KVLayout | None = None,
        batch_invariant: bool = False,
    ) -> int:
        if batch_invariant:
            return 0
        _, num_heads, head_dim = q_TNH.shape
        places = layout or plain_layout(k_cache)
        num_kv_heads = k_cache.shape[2 if places.order == KVOrder.NHD else 1]
        arch = LAUNCHER.config(PAGED_ATTENTION, q_TNH.dtype, head_dim, "decode")[0].arch
        largest = 0
        # Fewer rows are split more often: the most parts are somewhere between one row and all.
        for num_rows in range(1, min(meta.num_decode_rows, WANTED_PROGRAMS[arch] // 2) + 1):
            units = _units(
                *(meta, num_rows, num_heads, num_kv_heads),
                *(places.kernel_block_size, arch),
            )
            num_tokens = num_rows * meta.decode_query_len
            num_bytes = _parts_bytes(units.num_splits, num_tokens, num_heads, head_dim)
            largest = max(largest, num_bytes)
        return largest

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        layout: KVLayout | None = None,
        kv_scales: KVScales | None = None,
        window: int | None = None,
        sinks_N: torch.Tensor | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        lse_TN: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layout is None:
            check_caches(PAGED_ATTENTION, k_cache, v_cache)
            layout = plain_layout(k_cache)
        pool = pool_of(PAGED_ATTENTION, k_cache, v_cache, layout, kv_scales)
        options = AttentionOptions(
            scale=scale,
            window=window,
            sinks_N=sinks_N,
            batch_invariant=batch_invariant,
            lse_TN=lse_TN,
        )
        check_paged_attention(q_TNH, pool, meta, options)
        require_support(PAGED_ATTENTION, SUPPORT, pool)
        check_host_lengths(meta, layout.kernel_block_size)
        if out is None:
            out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        else:
            require_out(PAGED_ATTENTION, out, q_TNH.shape, q_TNH.dtype)
        cache = _Cache(pool, k_cache, v_cache, kv_scales)
        step = _Step(q_TNH, cache, meta, options, out)
        _require_reachable(step)
        if batch_invariant:
            # Every row by one kernel with one shape of tile, its KV walked from the first token on.
            _many(step, "invariant", first_row=0, num_tokens=q_TNH.shape[0])
            return out
        _decode(step, workspace)
        num_rest = q_TNH.shape[0] - meta.num_decode_tokens
        _many(step, "prefill", first_row=meta.num_decode_rows, num_tokens=num_rest)
        return out


PAGED: Final = TritonPagedAttention()


def _require_reachable(step: _Step) -> None:
    meta, scales = step.meta, step.cache.scales or (None, None)
    require_reachable(
        PAGED_ATTENTION,
        q=step.q,
        k_cache=step.cache.k,
        v_cache=step.cache.v,
        k_scale=scales[0],
        v_scale=scales[1],
        out=step.out,
        sinks=step.options.sinks_N,
        lse=step.options.lse_TN,
    )
    require_reachable(
        PAGED_ATTENTION,
        query_start_loc=meta.query_start_loc,
        seq_lens=meta.seq_lens,
        block_tables=meta.block_tables,
    )


def _chosen(step: _Step, kind: str) -> _Chosen:
    dtype = step.q.dtype
    if step.cache.k.dtype in _CODES and dtype.itemsize == 2 and kind != "invariant":
        # Both kinds of queries become float16.
        kind, dtype = f"{kind}_fp8", torch.bfloat16
    return LAUNCHER.config(PAGED_ATTENTION, dtype, step.q.shape[2], kind)


def _units(
    meta: AttentionMetadata,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    arch: str,
) -> _Units:
    group = num_heads // num_kv_heads
    block_m = min(max(power_of_two(meta.decode_query_len * group), _MIN_BLOCK), _MAX_DECODE_ROWS)
    packed = min(group, block_m)
    num_q_blocks = -(-meta.decode_query_len // (block_m // packed))
    num_units = num_rows * num_kv_heads * -(-group // packed) * num_q_blocks
    longest = meta.block_tables.shape[1] * block_size
    longest = min(longest, meta.max_seq_len or longest)
    wanted = min(WANTED_PROGRAMS[arch] // max(num_units, 1), -(-longest // _MIN_SPLIT_TOKENS))
    wanted = 1 if longest <= _MAX_WHOLE_TOKENS else wanted
    num_splits = 1 << max(min(wanted, _MAX_SPLITS).bit_length() - 1, 0)
    return _Units(block_m, packed, num_q_blocks, num_units, num_splits)


def _decode(step: _Step, workspace: torch.Tensor | None) -> None:
    if step.meta.num_decode_rows == 0:
        return
    chosen = _chosen(step, "decode")
    pool = step.cache.pool
    units = _units(
        *(step.meta, step.meta.num_decode_rows, step.q.shape[1], pool.num_kv_heads),
        *(pool.layout.kernel_block_size, chosen[0].arch),
    )
    if units.num_splits == 1 or LAUNCHER.is_compiling:
        # Which of the two a number of rows needs, nothing but that number says: both are compiled.
        lse = step.options.lse_TN
        _decode_launch(step, chosen, units._replace(num_splits=1), step.out, lse)
    if units.num_splits > 1 or LAUNCHER.is_compiling:
        units = units._replace(num_splits=max(units.num_splits, 2))
        parts, parts_lse = _parts(step, units.num_splits, workspace)
        _decode_launch(step, chosen, units, parts, parts_lse)
        num_tokens, lse = step.meta.num_decode_tokens, step.options.lse_TN
        merged = None if lse is None else lse[:num_tokens]
        launch_merge(parts, parts_lse, step.out[:num_tokens], merged, _MAX_SPLITS)


def _decode_launch(
    step: _Step,
    chosen: _Chosen,
    units: _Units,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    is_split = units.num_splits > 1
    LAUNCHER.launch(
        decode_kernel,
        (units.num_units, units.num_splits),
        chosen,
        (
            *_pointers(step, chosen, out, lse),
            *(step.meta.seq_lens, step.meta.block_tables, step.options.scale),
            units.num_splits,
            *step.q.stride(),
            *(out.stride() if is_split else (0, *out.stride())),
            *_lse_strides(lse, is_split=is_split),
            *step.meta.block_tables.stride(),
            step.meta.block_tables.shape[1] * step.cache.pool.layout.kernel_block_size,
            *places_of(step.cache.pool)[2:],
        ),
        _constants(step, chosen)
        | {
            "PACKED": units.packed,
            "NUM_Q_BLOCKS": units.num_q_blocks,
            "Q_LEN": step.meta.decode_query_len,
            "IS_SPLIT": is_split,
            "OVERLAP": overlaps(chosen[1]),
            "BLOCK_M": units.block_m,
        },
    )


def _lse_strides(lse: torch.Tensor | None, *, is_split: bool) -> tuple[int, ...]:
    if lse is None:
        return (0, 0, 0)
    return lse.stride() if is_split else (0, *lse.stride())


def _many(step: _Step, kind: str, *, first_row: int, num_tokens: int) -> None:
    """The rows from `first_row` on, which have any number of queries, `num_tokens` together."""
    meta = step.meta
    num_rows = meta.seq_lens.shape[0] - first_row
    if num_tokens == 0:
        return
    chosen = _chosen(step, kind)
    block_m = chosen[1].constants["BLOCK_M"]
    packed = min(step.group, block_m)
    num_groups = -(-step.group // packed)
    lse = step.options.lse_TN
    LAUNCHER.launch(
        prefill_kernel,
        (
            step.cache.pool.num_kv_heads * num_groups,
            # A partial block of each row, and of the tokens past the last row.
            num_tokens // (block_m // packed) + num_rows + 1,
        ),
        chosen,
        (
            *_pointers(step, chosen, step.out, lse),
            *(meta.query_start_loc, meta.seq_lens, meta.block_tables, step.options.scale),
            *(first_row, num_rows, step.q.shape[0]),
            *step.q.stride(),
            *step.out.stride(),
            *_lse_strides(lse, is_split=False)[1:],
            *meta.block_tables.stride(),
            *places_of(step.cache.pool)[2:],
        ),
        _constants(step, chosen) | {"PACKED": packed},
    )


def _parts_bytes(num_splits: int, num_tokens: int, num_heads: int, head_dim: int) -> int:
    return 4 * num_splits * num_tokens * num_heads * (head_dim + 1) if num_splits > 1 else 0


def _parts(
    step: _Step, num_splits: int, workspace: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [splits, T, N, D] and their logarithms [splits, T, N], float32, in the workspace.

    Stored as [T, N, splits, D]: then only the stride of a token depends on how many there are.
    """
    _, num_heads, head_dim = step.q.shape
    num_tokens = step.meta.num_decode_tokens
    num_bytes = _parts_bytes(num_splits, num_tokens, num_heads, head_dim)
    if workspace is None or LAUNCHER.is_compiling:
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=step.q.device)
    memory = require_workspace(PAGED_ATTENTION, workspace, num_bytes)
    numbers = memory[:num_bytes].view(torch.float32)
    shape = (num_tokens, num_heads, num_splits)
    cut = num_bytes // 4 * head_dim // (head_dim + 1)
    parts = numbers[:cut].view(*shape, head_dim).permute(2, 0, 1, 3)
    return parts, numbers[cut:].view(shape).permute(2, 0, 1)


def _stored(cache: _Cache, arch: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The caches as a kernel takes them, and how it decodes an element."""
    if cache.k.dtype not in _CODES:
        return cache.k, cache.v, 0
    code, native, integer = _CODES[cache.k.dtype]
    is_native = casts_natively(arch, code) and not IS_INTERPRETED
    k, v = cache.k.view(torch.uint8), cache.v.view(torch.uint8)
    return k, v, native if is_native else integer


def _pointers(
    step: _Step, chosen: _Chosen, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[object, ...]:
    k, v, _ = _stored(step.cache, chosen[0].arch)
    scales = step.cache.scales or (None, None)
    return (step.q, k, v, out, lse, *scales, step.options.sinks_N)


def _constants(step: _Step, chosen: _Chosen) -> dict[str, object]:
    pool = step.cache.pool
    places = places_of(pool)
    block_dim = max(power_of_two(pool.head_dim), _MIN_BLOCK)
    return {
        "NUM_KV_HEADS": pool.num_kv_heads,
        "GROUP": step.group,
        "WINDOW": step.options.window or 0,
        "SHAPE": (pool.layout.kernel_block_size, pool.head_dim, block_dim),
        "KEYS": places.keys,
        "VALUES": places.values,
        "CODE": _stored(step.cache, chosen[0].arch)[2],
        "SCALES_PER": scales_per(pool),
    }
