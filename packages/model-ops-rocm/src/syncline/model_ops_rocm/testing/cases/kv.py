"""Calls of the ops that write and copy the KV cache."""

from typing import Final

import torch

from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker


def _kv_write(num_tokens: int, heads: int, block_size: int, head_dim: int) -> Case:
    def build(make: Maker) -> Arguments:
        fused = make.randn(num_tokens, 2 * heads * head_dim, pad=8)
        k, v = fused.chunk(2, dim=1)
        cut = heads * head_dim
        slots = make.distinct(num_tokens, 9 * block_size, torch.int32)
        slots[2::4] = -1
        return {
            "k_TKH": k[:, :cut].view(num_tokens, heads, head_dim),
            "v_TKH": v[:, :cut].view(num_tokens, heads, head_dim),
            "k_cache": make.nan(9, heads, block_size, head_dim),
            "v_cache": make.nan(9, heads, block_size, head_dim),
            "slot_mapping": slots,
        }

    return Case(
        op="kv_write", label=f"{num_tokens}x{heads}x{head_dim}-block-{block_size}", build=build
    )


def _stored_write(
    num_tokens: int, order: KVOrder, scale: KVScale, code: torch.dtype | None = None
) -> Case:
    """Into every order of storage; tokens of zeros, infinities and NaN are among them."""

    def build(make: Maker) -> Arguments:
        layout = KVLayout(order=order, dtype=code or make.dtype, kernel_block_size=16, scale=scale)
        pool = KVPool(layout=layout, num_blocks=4, block_size=16, num_kv_heads=3, head_dim=32)
        cache = {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=make.device)
            for name, spec in pool.specs().items()
        }
        k, v = make.randn(2, num_tokens, 3, 32, pad=8)
        if scale == KVScale.NONE:
            k, v = k.to(layout.dtype), v.to(layout.dtype)
        else:
            k[1:2], v[2:3, 1] = 0.0, 0.0
            k[3:4, 2, 5], v[4:5, 0, 1] = float("inf"), float("nan")
        for name in ("k_scale", "v_scale"):
            if scale in (KVScale.TENSOR, KVScale.HEAD):
                cache[name] = make.randn(*cache[name].shape).float().abs() + 0.01
        slots = make.distinct(num_tokens, pool.num_slots, torch.int32)
        slots[5:6] = -1
        call: Arguments = {
            "k_TKH": k,
            "v_TKH": v,
            "k_cache": cache["k"],
            "v_cache": cache["v"],
            "slot_mapping": slots,
            "layout": layout,
        }
        if scale != KVScale.NONE:
            call["kv_scales"] = (cache["k_scale"], cache["v_scale"])
        return call

    stored = "" if code is None else f"-{str(code).removeprefix('torch.float8_')}-{scale}"
    return Case(op="kv_write", label=f"{num_tokens}x3x32-{order}{stored}", build=build)


def _kv_copy(shape: tuple[int, int, int, int], *, on_host: bool, skips: bool = False) -> Case:
    def build(make: Maker) -> Arguments:
        call: Arguments = {"k_cache": make.randn(*shape), "v_cache": make.randn(*shape)}
        targets, sources = make.distinct(3, shape[0]), make.distinct(3, shape[0])
        pairs = torch.stack((sources, targets), dim=1)
        if skips:
            pairs[1, 0] = -1
        if on_host:
            return call | {"pairs": tuple((int(one), int(two)) for one, two in pairs.tolist())}
        num_bytes = 2 * 3 * shape[1] * shape[2] * shape[3] * make.dtype.itemsize
        workspace = torch.zeros(num_bytes + 64, dtype=torch.uint8, device=make.device)
        return call | {"pairs": pairs, "workspace": workspace}

    label = "x".join(map(str, shape)) + ("-host" if on_host else "") + ("-skips" if skips else "")
    return Case(op="kv_copy_blocks", label=label, build=build, is_recordable=not on_host)


def _stored_copy(order: KVOrder, block_size: int) -> Case:
    """Blocks of codes, in any order of storage."""

    def build(make: Maker) -> Arguments:
        layout = KVLayout(order=order, dtype=torch.float8_e4m3fn, kernel_block_size=block_size)
        pool = KVPool(
            layout=layout, num_blocks=6, block_size=block_size, num_kv_heads=3, head_dim=16
        )
        k, v = (
            (make.randn(*pool.specs()[name].shape).float() * 3).to(layout.dtype)
            for name in ("k", "v")
        )
        pairs = torch.stack((make.distinct(4, 6), make.distinct(4, 6)), dim=1)
        pairs[2] = -1
        num_bytes = 2 * 4 * 3 * block_size * 16
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=make.device)
        return {"k_cache": k, "v_cache": v, "pairs": pairs, "workspace": workspace}

    return Case(op="kv_copy_blocks", label=f"codes-{order}-block-{block_size}", build=build)


CASES: Final[tuple[Case, ...]] = (
    _kv_write(0, 2, 4, 8),
    _kv_write(1, 1, 1, 1),
    _kv_write(11, 3, 16, 24),
    _kv_write(6, 9, 5, 64),
    _stored_write(0, KVOrder.NHD, KVScale.NONE),
    *(_stored_write(7, order, KVScale.NONE) for order in KVOrder),
    *(_stored_write(7, order, KVScale.TOKEN, torch.float8_e4m3fn) for order in KVOrder),
    _stored_write(7, KVOrder.HND, KVScale.NONE, torch.float8_e4m3fn),
    _stored_write(7, KVOrder.HND, KVScale.TENSOR, torch.float8_e4m3fn),
    _stored_write(7, KVOrder.AITER_X, KVScale.HEAD, torch.float8_e4m3fnuz),
    _stored_write(7, KVOrder.HND, KVScale.TOKEN, torch.float8_e4m3fnuz),
    _kv_copy((5, 2, 4, 8), on_host=True),
    _kv_copy((7, 3, 5, 9), on_host=False, skips=True),
    _kv_copy((4, 2, 16, 48), on_host=False),
    _stored_copy(KVOrder.NHD, 5),
    _stored_copy(KVOrder.AITER_X_SHUFFLED_V, 32),
)
