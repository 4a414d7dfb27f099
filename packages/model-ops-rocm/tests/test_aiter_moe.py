"""AITER's routing and experts on the stand-in, which reads the experts as they are stored."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import LayoutError, RowMajor, Shuffle16x16, select
from syncline.model_ops_rocm.aiter.detect import detect
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.contracts import ExpertMap
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter

InstallAiter = Callable[..., FakeAiter]
Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Experts = Callable[..., torch.Tensor]
SHUFFLED = Shuffle16x16()
E, K, H, I = 6, 3, 64, 32  # noqa: E741 - experts, top-k, hidden, intermediate, as the contract has


def load(op: str) -> Callable[..., object]:
    found = implementations(detect("0.1.22", device_type="cpu", arch=lambda device: "gfx942"))
    return cast(Callable[..., object], found[op])


def weights_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn((E, 2 * I, H), generator=generator) / H**0.5
    w2 = torch.randn((E, H, I), generator=generator) / I**0.5
    return w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_answers_as_the_reference_does(
    install_aiter: InstallAiter, dtype: torch.dtype, num_tokens: int, renormalise: bool
) -> None:
    install_aiter()
    # Different numbers: which of two equal ones comes first is AITER's.
    logits = (torch.randperm(num_tokens * 40)[: num_tokens * 20] / 16).view(num_tokens, 20)
    logits = logits.to(dtype).float().add(0.0).to(dtype)
    positions = torch.arange(num_tokens) - 2
    keywords = {"renormalise": renormalise, "positions_T": positions}
    got = cast(Route, load("moe_route"))(logits, 4, **keywords)
    expected = cast(Route, select("moe_route", dtype=dtype))(logits, 4, **keywords)
    torch.testing.assert_close(got[0], expected[0])
    distinct = [len(row.unique()) == len(row) for row in logits]
    assert torch.equal(got[1][distinct], expected[1][distinct])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_without_a_softmax_have_nan_weights_and_ids_of_experts(
    install_aiter: InstallAiter, dtype: torch.dtype
) -> None:
    install_aiter()
    logits = torch.randn(5, 8).to(dtype)
    logits[0, 3] = float("nan")
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    logits[3, :6] = float("-inf")
    weights, ids = cast(Route, load("moe_route"))(logits, 3)
    expected = cast(Route, select("moe_route", dtype=dtype))(logits, 3)
    torch.testing.assert_close(weights, expected[0], equal_nan=True)
    assert weights[:3].isnan().all()
    assert torch.equal(ids[3:, :2], expected[1][3:, :2])
    assert bool(((ids >= 0) & (ids < 8)).all())
    assert ids[2, 0] == 5


def test_routing_fills_what_it_is_given(install_aiter: InstallAiter) -> None:
    install_aiter()
    logits = torch.randn(5, 8)
    out = torch.full((5, 2), -1.0), torch.full((5, 2), 99, dtype=torch.int32)
    got = cast(Route, load("moe_route"))(logits, 2, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    assert torch.equal(out[1].long(), logits.topk(2).indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_experts_multiply_what_is_stored_and_skip_what_is_marked(
    install_aiter: InstallAiter, dtype: torch.dtype, num_tokens: int
) -> None:
    fake = install_aiter()
    w13, w2 = weights_of(dtype)
    x = torch.randn(num_tokens, H + 8).to(dtype)[:, :H]
    weights = torch.rand(num_tokens, K)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(num_tokens)] or [torch.zeros(K)])
    ids = ids[:num_tokens].to(torch.int32)
    ids[1::2, 1] = -1
    ids[2:3] = -1
    weights[ids < 0] = float("nan")
    stored = (SHUFFLED.apply(w13), SHUFFLED.apply(w2))
    out = torch.full((num_tokens, H), float("nan")).to(dtype)
    experts = cast(Experts, load("moe_experts"))
    got = experts(x, *stored, weights, ids, layout=SHUFFLED, out=out)
    assert got is out
    reference = cast(Experts, select("moe_experts", dtype=dtype))
    expected = reference(x, w13, w2, weights.nan_to_num(), ids, layout=RowMajor())
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-7)
    assert fake.calls == (["fused_moe"] if num_tokens else [])
    # A flag that a loader left changes nothing: the layout says how the weights are read.
    stored[0].is_shuffled = False  # type: ignore[attr-defined]  # as a loader may leave it
    assert torch.equal(experts(x, *stored, weights, ids, layout=SHUFFLED), out)


def test_what_aiter_would_not_take_is_refused(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    w13, w2 = weights_of(torch.bfloat16)
    x, weights = torch.ones(2, H).bfloat16(), torch.ones(2, K)
    ids = torch.zeros(2, K, dtype=torch.int32)
    experts = cast(Experts, load("moe_experts"))
    with pytest.raises(LayoutError, match=r"row_major requires moe_experts to take it"):
        experts(x, w13, w2, weights, ids, layout=RowMajor())
    with pytest.raises(ValueError, match=r"moe_experts: ids must be -1 or in \[0, 6\)"):
        experts(x, w13, w2, weights, ids + E, layout=SHUFFLED)
    with pytest.raises(ValueError, match=r"moe_experts: ids must be torch.int32"):
        experts(x, w13, w2, weights, ids.long(), layout=SHUFFLED)
    with pytest.raises(ValueError, match=r"moe_experts: batch_invariant must be False for AITER"):
        experts(x, w13, w2, weights, ids, layout=SHUFFLED, batch_invariant=True)
    with pytest.raises(ValueError, match=r"moe_experts: x must be bfloat16 or float16 for AITER"):
        experts(x.float(), w13.float(), w2.float(), weights, ids, layout=SHUFFLED)
    codes = tuple(weight.to(torch.float8_e4m3fnuz) for weight in (w13, w2))
    scales = torch.ones(E, 2 * I, 1), torch.ones(E, H, 1)
    with pytest.raises(ValueError, match=r"scales must be None for AITER, which would quantise"):
        experts(x, *codes, weights, ids, layout=SHUFFLED, scales=scales)
    route = cast(Route, load("moe_route"))
    replicas = ExpertMap(torch.zeros(8, 1, dtype=torch.int32), torch.ones(8, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"moe_route: expert_map must be None for AITER"):
        route(torch.ones(2, 8), 2, expert_map=replicas)
    with pytest.raises(ValueError, match=r"moe_route: top_k must be in \[1, 8\]"):
        route(torch.ones(2, 8), 9)
    assert fake.calls == []
