"""The stand-in's attention over pages, token by token in the order that is stored.

It has the fault that is on record: a context of 16 pages with a partial last one loses that page.
"""

import torch

from syncline.model_ops_rocm.testing.fake_aiter.checks import Functions, abort_unless, need_dense
from syncline.model_ops_rocm.testing.fake_aiter.stored import keys_by_token, values_by_token

_HALVES = (torch.bfloat16, torch.float16)


class FakeAttention:
    """`is_right`: whether this version is without the fault."""

    def __init__(self, *, is_right: bool) -> None:
        self._is_right = is_right

    def functions(self) -> Functions:
        return {
            "pa_fwd_asm": self.pa_fwd_asm,
            "flash_attn_varlen_func": flash_attn_varlen_func,
        }

    def pa_fwd_asm(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables_stride0: int,
        max_qlen: int = 1,
        K_QScale: torch.Tensor | None = None,
        V_QScale: torch.Tensor | None = None,
        out_: torch.Tensor | None = None,
        qo_indptr: torch.Tensor | None = None,
        high_precision: int = 1,
    ) -> torch.Tensor:
        num_rows, num_heads, head_dim = Q.shape
        for name, tensor in (("Q", Q), ("K", K), ("V", V)):
            need_dense(name, tensor, _HALVES)
        abort_unless(head_dim == 128, "the kernel has heads of 128 dimensions")
        abort_unless(K.ndim == V.ndim == 5 and K.shape[3] == 16, "the kernel has pages of 16")
        abort_unless(num_heads // K.shape[1] <= 16, "more than 16 heads of a group")
        abort_unless(max_qlen == 1 and qo_indptr is None, "one token per row here")
        abort_unless(block_tables_stride0 == block_tables.stride(0), "another stride")
        _check_tables(block_tables, context_lens, K.shape[0])
        abort_unless(len(context_lens) == num_rows, "as many lengths as rows")
        out = torch.empty_like(Q) if out_ is None else out_
        keys, values = keys_by_token(K), values_by_token(V)
        for row in range(num_rows):
            length = int(context_lens[row])
            if not self._is_right and -(-length // 16) == 16 and length % 16:
                length = 240
            slots = _slots(block_tables[row], length, 16)
            attended = _attend(Q[row : row + 1], keys[slots], values[slots], 128**-0.5, None)
            out[row] = attended[0].to(out.dtype)
        return out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    min_seqlen_q: int = 0,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = False,
    window: tuple[int, int, int] = (-1, -1, 0),
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    sink_ptr: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pages of [NB, bs, kvh, hd]; bottom-right causal; the left bound of a window is inclusive."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        need_dense(name, tensor, _HALVES)
    abort_unless(scale is not None and causal and block_table is not None, "another use")
    assert block_table is not None
    assert scale is not None
    abort_unless((dropout, softcap, min_seqlen_q) == (0.0, 0.0, 0), "another use")
    abort_unless(k.shape[1] % 128 == 0, "pages that are no multiple of 128")
    abort_unless(window[1] in (-1, 0) and window[2] == 0, "another window")
    for name, starts in (("cu_q", cu_q), ("cu_k", cu_k)):
        need_dense(name, starts, (torch.int32,))
        abort_unless(len(starts) == len(block_table) + 1, f"{name} is not one per row")
    lengths = cu_k.diff()
    _check_tables(block_table, lengths, k.shape[0])
    abort_unless(int(cu_q.diff().max()) <= max_q and int(lengths.max()) <= max_k, "over the maxima")
    result = torch.empty_like(q) if out is None else out
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    for row, (start, stop) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)):
        slots = _slots(block_table[row], int(lengths[row]), k.shape[1])
        left = None if window[0] < 0 else window[0]
        attended = _attend(q[start:stop], keys[slots], values[slots], scale, left)
        result[start:stop] = attended.to(result.dtype)
    return result


def _check_tables(tables: torch.Tensor, lengths: torch.Tensor, num_blocks: int) -> None:
    """The whole table is read, whatever the lengths; a row without tokens is not on record."""
    need_dense("block_tables", tables, (torch.int32,))
    abort_unless(lengths.dtype == torch.int32, "lengths are not int32")
    inside = (tables >= 0) & (tables < num_blocks)
    abort_unless(bool(inside.all()), "a read of a block that is none")
    abort_unless(bool((lengths >= 1).all()), "a row without tokens")


def _slots(table: torch.Tensor, length: int, size: int) -> torch.Tensor:
    token = torch.arange(length)
    return table[token // size].long() * size + token % size


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, left: int | None
) -> torch.Tensor:
    """[n, heads, dim] of the last n tokens; float32, NaN where a token sees nothing."""
    group = q.shape[1] // keys.shape[1]
    spread = keys.float().repeat_interleave(group, 1), values.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), spread[0]) * scale
    place = torch.arange(len(q)).unsqueeze(1) + len(keys) - len(q)
    distance = place - torch.arange(len(keys))
    is_hidden = distance < 0
    if left is not None:
        is_hidden |= distance > left
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, spread[1])
