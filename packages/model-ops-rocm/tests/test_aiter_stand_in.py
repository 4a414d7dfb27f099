"""That the stand-in for AITER sees what it is there to see: a wrong layout, and what aborts.

Its functions are called here without this package's ops before them.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import Shuffle16x16
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, write_tokens
from syncline.model_ops_rocm.testing.fake_aiter import AiterAbort, FakeAiter

Function = Callable[..., torch.Tensor]
SHUFFLED = Shuffle16x16()


def function(fake: FakeAiter, name: str, module: str = "aiter") -> Function:
    return cast(Function, fake.module(module)[name])


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def test_an_abort_is_stopped_by_no_handler_of_exceptions() -> None:
    assert not issubclass(AiterAbort, Exception)


@pytest.mark.parametrize(("arch", "kind"), [("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn")])
def test_a_weight_in_another_layout_is_another_weight(arch: str, kind: str) -> None:
    fake = FakeAiter(arch)
    x = halves(2, 256).to(getattr(torch, f"float8_{kind}"))
    weight = halves(128, 256).to(x.dtype)
    scales = torch.ones(2, 1), torch.ones(128, 1)
    expected = function(fake, "gemm_a8w8")(x, weight, *scales)
    shuffled = function(fake, "gemm_a8w8_bpreshuffle")
    assert torch.equal(shuffled(x, SHUFFLED.apply(weight), *scales), expected)
    assert not torch.equal(shuffled(x, weight, *scales), expected)


def test_scales_row_by_row_are_other_scales_where_columns_are_wanted() -> None:
    fake = FakeAiter()
    x, weight = (halves(128, 256).to(torch.float8_e4m3fnuz) for _ in range(2))
    of_x, of_weight = torch.rand(128, 2), torch.rand(1, 2)
    expected = function(fake, "gemm_a8w8_blockscale")(x, weight, of_x, of_weight)
    shuffled = function(fake, "gemm_a8w8_blockscale_bpreshuffle")
    stored = SHUFFLED.apply(weight)
    by_column = of_x.T.contiguous().view(of_x.shape)
    assert torch.equal(shuffled(x, stored, by_column, of_weight), expected)
    assert not torch.equal(shuffled(x, stored, of_x, of_weight), expected)


def test_experts_in_another_layout_are_other_experts() -> None:
    fake = FakeAiter()
    w13, w2 = halves(2, 64, 64), halves(2, 64, 32)
    mask = torch.tensor([1, 1, 0], dtype=torch.int32)
    members = {
        "activation": fake.module("aiter")["ActivationType"].Silu,  # type: ignore[attr-defined]  # an enumeration
        "quant_type": fake.module("aiter")["QuantType"].No,  # type: ignore[attr-defined]  # an enumeration
    }
    call = (halves(3, 64), torch.ones(3, 2), torch.tensor([[0, 2], [1, 2], [0, 2]]).int())

    def run(w13: torch.Tensor, w2: torch.Tensor, *, flagged: bool) -> torch.Tensor:
        views = [weight.view(weight.shape) for weight in (w13, w2)]
        for view in views:
            view.is_shuffled = flagged  # type: ignore[attr-defined]  # AITER's flag
        x, weights, ids = call
        experts = function(fake, "fused_moe", "aiter.fused_moe")
        return experts(x, *views, weights, ids, expert_mask=mask, **members)

    expected = run(w13, w2, flagged=False)
    stored = SHUFFLED.apply(w13), SHUFFLED.apply(w2)
    assert torch.equal(run(*stored, flagged=True), expected)
    assert not torch.equal(run(*stored, flagged=False), expected)
    with pytest.raises(TypeError, match=r"incompatible function arguments"):
        function(fake, "fused_moe", "aiter.fused_moe")(*call[:1], *stored, *call[1:])


def test_pages_in_another_order_are_other_pages() -> None:
    fake = FakeAiter(is_right=True)
    pools = {
        order: KVPool(
            layout=KVLayout(order=order, dtype=torch.bfloat16, kernel_block_size=16),
            num_blocks=2,
            block_size=16,
            num_kv_heads=1,
            head_dim=128,
        )
        for order in (KVOrder.AITER_X_SHUFFLED_V, KVOrder.AITER_X, KVOrder.NHD)
    }
    k, v = halves(2, 20, 1, 128)
    caches = {}
    for order, pool in pools.items():
        cache = {name: torch.zeros(one.shape).bfloat16() for name, one in pool.specs().items()}
        write_tokens(pool, cache, k, v, torch.arange(20))
        caches[order] = cache
    right = caches[KVOrder.AITER_X_SHUFFLED_V]
    q = halves(1, 1, 128)
    step = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), 2
    attend = function(fake, "pa_fwd_asm")
    expected = attend(q, right["k"], right["v"], *step)
    weights = (k[:, 0].float() @ q[0, 0].float() * 128**-0.5).softmax(0)
    torch.testing.assert_close(
        expected[0, 0].float(), weights @ v[:, 0].float(), rtol=2**-6, atol=2**-6
    )
    for side, order in (("v", KVOrder.AITER_X), ("k", KVOrder.NHD), ("v", KVOrder.NHD)):
        other = right | {side: caches[order][side].view(right[side].shape)}
        assert not torch.allclose(attend(q, other["k"], other["v"], *step), expected, atol=0.01)


ABORTS: dict[str, tuple[tuple[object, ...], str]] = {
    "rmsnorm2d_fwd": ((halves(2, 8).float(), halves(8).float(), 1e-6), "x is torch.float32"),
    "silu_and_mul": ((halves(2, 3), halves(2, 8)), "out does not fit x"),
    "rope_cached_positions_2c_fwd_inplace": (
        (
            *(halves(1, 2, 1, 4), halves(1, 2, 1, 4), halves(2, 1, 1, 2), halves(2, 1, 1, 2)),
            *(torch.zeros(1, 2, dtype=torch.int32), 0, True, False),
        ),
        "positions are not int64",
    ),
    "gemm_a8w8": (
        (
            *(halves(2, 8).to(torch.float8_e4m3fn), halves(4, 8).to(torch.float8_e4m3fn)),
            *(torch.ones(2, 1), torch.ones(4, 1)),
        ),
        "XQ is torch.float8_e4m3fn",
    ),
    "reshape_and_cache_flash": (
        (
            *(halves(1, 1, 8), halves(1, 1, 8), halves(2, 4, 1, 8), halves(2, 4, 1, 8)),
            *(torch.tensor([8]), "auto", torch.ones(1), torch.ones(1)),
        ),
        "a write behind the cache",
    ),
    "pa_fwd_asm": (
        (
            *(halves(1, 1, 64), halves(2, 1, 8, 16, 8), halves(2, 1, 2, 64, 8)),
            *(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1),
        ),
        "heads of 128 dimensions",
    ),
    "topk_softmax": (
        (
            *(torch.zeros(2, 2), torch.zeros(2, 2).long(), torch.zeros(2, 2).long()),
            *(halves(2, 8), True),
        ),
        "ids is torch.int64",
    ),
}


@pytest.mark.parametrize("name", ABORTS)
def test_what_this_package_refuses_would_abort(name: str) -> None:
    arguments, what = ABORTS[name]
    with pytest.raises(AiterAbort, match=what):
        function(FakeAiter("gfx942"), name)(*arguments)
