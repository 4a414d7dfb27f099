"""Paged attention by AITER: decode by assembly in its own order, anything by flash in NHD.

Unit: one step. AITER's kernels are not on record for what they read of a row without tokens, or
of a block table behind a row's last block, so they get tables of valid ids and lengths of at least
1, made in the workspace; what such a row gives is overwritten with zeros.
"""

import itertools
import math
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.aiter.detect import Aiter
from syncline.model_ops_rocm.aiter.interface import PARTIAL_16_PAGES
from syncline.model_ops_rocm.aiter.ops.common import (
    HALVES,
    AiterOp,
    require_device,
    to_write,
    written,
)
from syncline.model_ops_rocm.arguments.attention import (
    PAGED_ATTENTION,
    AttentionOptions,
    check_attended,
    check_host_lengths,
    check_paged_attention,
    pool_of,
    require_support,
)
from syncline.model_ops_rocm.checks import refuse, workspace_of
from syncline.model_ops_rocm.contracts.attention import AttentionMetadata, KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder, KVScale
from syncline.model_ops_rocm.kv.pool import KVPool
from syncline.model_ops_rocm.kv.support import KVSupport

_PAGE: Final = 16  # of the assembly kernel
_FAULTY_PAGES: Final = 16
_ASM_HEAD_DIM: Final = 128
_ASM_MAX_GROUP: Final = 16
# Which pages AITER's call takes is not on record: FlashAttention's own take nothing finer.
_FLASH_PAGE_MULTIPLE: Final = 128
_FLASH_MAX_HEAD_DIM: Final = 256
_INT: Final = torch.int32.itemsize


class AiterKVSupport(KVSupport):
    """Each order has its own kernel, with its own sizes."""

    __slots__ = ()

    def why_not(self, layout: KVLayout, head_dim: int) -> str | None:
        wanted = super().why_not(layout, head_dim)
        if wanted is not None:
            return wanted
        if layout.order == KVOrder.NHD:
            if layout.kernel_block_size % _FLASH_PAGE_MULTIPLE != 0:
                return f"a kernel_block_size that is a multiple of {_FLASH_PAGE_MULTIPLE} in nhd"
            return None
        if layout.kernel_block_size != _PAGE:
            return f"a kernel_block_size of {_PAGE} in {layout.order}"
        if head_dim != _ASM_HEAD_DIM:
            return f"a head_dim of {_ASM_HEAD_DIM} in {layout.order}"
        return None


SUPPORT: Final = AiterKVSupport(
    op=PAGED_ATTENTION,
    backend="aiter",
    orders=(KVOrder.AITER_X_SHUFFLED_V, KVOrder.NHD),
    dtypes=HALVES,
    scales=(KVScale.NONE,),
    max_head_dim=_FLASH_MAX_HEAD_DIM,
    head_dim_multiple=8,
)


class _Scratch(NamedTuple):
    """The parts of a workspace."""

    tables: torch.Tensor  # int32[R, M], valid ids
    lengths: torch.Tensor  # int32[R], at least 1
    starts: torch.Tensor  # int32[R + 1], of each row's keys
    query_starts: torch.Tensor  # int32[R + 1], of each row's queries
    numbers: torch.Tensor  # int32[T]
    rows: torch.Tensor  # int32[T], of each token
    is_empty: torch.Tensor  # bool[T], whether the token's row has no tokens


class AiterPagedAttention(AiterOp):
    """`pa_fwd_asm` for AITER_X_SHUFFLED_V, decode rows alone; `flash_attn_varlen_func` for NHD."""

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
        num_rows, width = meta.block_tables.shape
        num_tokens = q_TNH.shape[0]
        return _INT * (num_rows * width + 3 * num_rows + 2 + 2 * num_tokens) + num_tokens

    def counters_size(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        meta: AttentionMetadata,
        *,
        layout: KVLayout | None = None,
        batch_invariant: bool = False,
    ) -> int:
        return 0

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
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contracts.PagedAttention`; no sinks, no LSE, and never batch-invariant."""
        if layout is None:
            orders = ", ".join(SUPPORT.orders)
            refuse(PAGED_ATTENTION, "layout", f"be one of {orders} for AITER", None)
        pool = pool_of(PAGED_ATTENTION, k_cache, v_cache, layout, kv_scales)
        options = AttentionOptions(
            scale=scale,
            window=window,
            sinks_N=sinks_N,
            batch_invariant=batch_invariant,
            lse_TN=lse_TN,
        )
        require_support(PAGED_ATTENTION, SUPPORT, pool)
        check_paged_attention(q_TNH, pool, meta, options)
        check_host_lengths(meta, layout.kernel_block_size)
        _check_options(options)
        check_attended(q_TNH, (k_cache, v_cache, *(kv_scales or ())), meta, options, out)
        self._check_devices(q_TNH, k_cache, v_cache, meta, out)
        is_flash = layout.order == KVOrder.NHD
        if not is_flash:
            _check_assembly(self.aiter, q_TNH, pool, meta, options)
        attend = self.aiter.function("flash_attn_varlen_func" if is_flash else "pa_fwd_asm")
        scratch = _scratch(q_TNH.shape[0], k_cache.shape[0], meta, workspace)
        result = to_write(out, q_TNH.shape, q_TNH)
        # Tokens that belong to no row are zero, and no kernel writes them.
        result.zero_()
        if 0 in (*q_TNH.shape[:1], *k_cache.shape[:1], *meta.block_tables.shape):
            return written(out, result)
        q = q_TNH.contiguous()
        if is_flash:
            sight = (-1, -1, 0) if window is None else (window - 1, 0, 0)
            attend(
                *(q, k_cache, v_cache, scratch.query_starts, scratch.starts),
                # The scratch has lengths of at least 1.
                *(_most_queries(meta), max(_longest(meta, layout.kernel_block_size), 1)),
                *(0, 0.0, scale, 0.0, True, sight),
                block_table=scratch.tables,
                out=result,
            )
        else:
            attend(
                *(q, k_cache, v_cache, scratch.tables, scratch.lengths),
                *(scratch.tables.stride(0), 1, None, None, result),
            )
        result.masked_fill_(scratch.is_empty.view(-1, 1, 1), 0.0)
        return written(out, result)

    def _check_devices(
        self,
        q_TNH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor | None,
    ) -> None:
        tables = {
            "meta.query_start_loc": meta.query_start_loc,
            "meta.seq_lens": meta.seq_lens,
            "meta.block_tables": meta.block_tables,
        }
        require_device(
            PAGED_ATTENTION,
            self.aiter,
            q=q_TNH,
            k_cache=k_cache,
            v_cache=v_cache,
            out=out,
            **tables,
        )


def _check_options(options: AttentionOptions) -> None:
    if options.batch_invariant:
        refuse(PAGED_ATTENTION, "batch_invariant", "be False for AITER", True)
    for name, value in (("sinks", options.sinks_N), ("lse", options.lse_TN)):
        if value is not None:
            refuse(PAGED_ATTENTION, name, "be None for AITER", list(value.shape))


def _check_assembly(
    aiter: Aiter,
    q_TNH: torch.Tensor,
    pool: KVPool,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> None:
    """What `pa_fwd_asm` takes: decode rows of one token, its own scale, no window."""
    op = PAGED_ATTENTION
    if meta.num_decode_rows != meta.seq_lens.shape[0] or meta.decode_query_len != 1:
        got = f"{meta.num_decode_rows} rows of {meta.decode_query_len} of {meta.seq_lens.shape[0]}"
        refuse(op, "meta", f"have decode rows of one token alone in {pool.layout.order}", got)
    if options.window is not None:
        refuse(op, "window", f"be None in {pool.layout.order}", options.window)
    fixed = _ASM_HEAD_DIM**-0.5
    if not math.isclose(options.scale, fixed, rel_tol=1e-6):
        refuse(op, "scale", f"be {fixed} in {pool.layout.order}", options.scale)
    group = q_TNH.shape[1] // pool.num_kv_heads
    if group > _ASM_MAX_GROUP:
        limit = f"have at most {_ASM_MAX_GROUP} heads per KV head in {pool.layout.order}"
        refuse(op, "q", limit, group)
    if PARTIAL_16_PAGES.function in aiter.faults:
        _refuse_partial_16_pages(meta, aiter.version)


def _refuse_partial_16_pages(meta: AttentionMetadata, version: str) -> None:
    """The kernel gives wrong numbers for these lengths; only the host's copies can tell."""
    first, last = (_FAULTY_PAGES - 1) * _PAGE + 1, _FAULTY_PAGES * _PAGE - 1
    what = f"be outside of [{first}, {last}], where pa_fwd_asm of amd-aiter {version} is wrong"
    if meta.seq_len_list is not None:
        for row, length in enumerate(meta.seq_len_list):
            if first <= length <= last:
                refuse(PAGED_ATTENTION, f"meta.seq_len_list of row {row}", what, length)
        return
    longest = _longest(meta, _PAGE)
    if longest >= first:
        limit = f"be given, or no length reach {first}: lengths must {what}"
        refuse(PAGED_ATTENTION, "meta.seq_len_list", limit, f"None, with up to {longest} tokens")


def _longest(meta: AttentionMetadata, block_size: int) -> int:
    """What no row's length exceeds."""
    if meta.seq_len_list is not None:
        return max(meta.seq_len_list, default=0)
    limit = meta.block_tables.shape[1] * block_size
    return limit if meta.max_seq_len is None else min(limit, meta.max_seq_len)


def _most_queries(meta: AttentionMetadata) -> int:
    """What no row's number of query tokens exceeds."""
    if meta.query_start_list is not None:
        starts = meta.query_start_list
        return max((stop - start for start, stop in itertools.pairwise(starts)), default=0)
    return max(meta.decode_query_len, meta.max_query_len or 1)


def _scratch(
    num_tokens: int, num_blocks: int, meta: AttentionMetadata, workspace: torch.Tensor | None
) -> _Scratch:
    """Filled on the device; nothing is allocated, and nothing waits."""
    num_rows, width = meta.block_tables.shape
    ends = list(
        itertools.accumulate(
            (num_rows * width, num_rows, num_rows + 1, num_rows + 1, num_tokens, num_tokens),
            initial=0,
        )
    )
    num_ints = ends[-1]
    num_bytes, device = num_ints * _INT + num_tokens, meta.seq_lens.device
    checked = workspace_of(PAGED_ATTENTION, workspace, num_bytes, device)
    if checked.data_ptr() % 16 != 0:
        refuse(PAGED_ATTENTION, "workspace", "be aligned to 16 bytes", checked.data_ptr())
    ints = checked[: num_ints * _INT].view(torch.int32)
    tables, lengths, starts, query_starts, numbers, rows = (
        ints[start:stop] for start, stop in itertools.pairwise(ends)
    )
    scratch = _Scratch(
        tables=tables.view(num_rows, width),
        lengths=lengths,
        starts=starts,
        query_starts=query_starts,
        numbers=numbers,
        rows=rows,
        is_empty=checked[num_ints * _INT :][:num_tokens].view(torch.bool),
    )
    if num_rows == 0 or num_tokens == 0:
        return scratch
    # Copies bring int64 to the int32 that AITER reads.
    scratch.query_starts.copy_(meta.query_start_loc)
    torch.arange(num_tokens, out=scratch.numbers)
    torch.bucketize(
        scratch.numbers, scratch.query_starts[1:], right=True, out_int32=True, out=scratch.rows
    )
    scratch.rows.clamp_(max=num_rows - 1)
    scratch.lengths.copy_(meta.seq_lens)
    torch.index_select(scratch.lengths, 0, scratch.rows, out=scratch.numbers)
    torch.eq(scratch.numbers, 0, out=scratch.is_empty)
    scratch.tables.copy_(meta.block_tables).clamp_(0, max(num_blocks - 1, 0))
    scratch.lengths.clamp_(min=1)
    scratch.starts[:1].zero_()
    torch.cumsum(scratch.lengths, 0, dtype=torch.int32, out=scratch.starts[1:])
    return scratch
