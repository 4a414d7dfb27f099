"""What only the Triton kernels of mixture of experts do, interpreted on the CPU."""

from collections.abc import Callable, Mapping
from typing import Any, cast  # Any: keywords of calls that are wrong on purpose

import pytest
import torch

from syncline.model_ops_rocm import (
    LayoutError,
    NoConfigurationError,
    Quantised,
    RowMajor,
    Shuffle16x16,
    select,
)
from syncline.model_ops_rocm.layouts import Shuffle32x16
from syncline.model_ops_rocm.quant import CodeType, Granularity
from syncline.model_ops_rocm.testing.cases.moe import experts_call
from syncline.model_ops_rocm.testing.parity import Arguments, Maker

Ops = Mapping[str, Callable[..., Any]]
E4M3FN = torch.float8_e4m3fn
ROWS = ("x_TH", "weights_TK", "ids_TK")


def call_of(num_tokens: int, num_experts: int = 4, top_k: int = 2) -> Arguments:
    call = experts_call(Maker(torch.float32), num_tokens, num_experts, top_k, 32, 16)
    return {name: value for name, value in call.items() if name != "out"}


def rows_of(call: Arguments, start: int, stop: int) -> Arguments:
    return call | {name: cast(torch.Tensor, call[name])[start:stop] for name in ROWS}


@pytest.mark.parametrize("num_tokens", [40, 600])  # 600 have so many pairs that they are counted
def test_a_token_has_the_same_bits_in_every_batch_if_that_is_asked_for(
    kernels: Ops, num_tokens: int
) -> None:
    call = call_of(num_tokens) | {"batch_invariant": True}
    whole = kernels["moe_experts"](**call)
    for start, stop in ((0, 1), (num_tokens - 1, num_tokens), (5, 25)):
        part = kernels["moe_experts"](**rows_of(call, start, stop))
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("granularity", [Granularity.TOKEN, Granularity.BLOCK_1X128])
def test_a_token_has_the_same_bits_in_every_batch_of_codes(
    kernels: Ops, granularity: Granularity
) -> None:
    call = call_of(40) | {"batch_invariant": True}
    per_row = granularity is Granularity.TOKEN
    scales = tuple(torch.rand(4, rows if per_row else 1, 1) + 0.5 for rows in (32, 32))
    stored = {name: cast(torch.Tensor, call[name]).to(E4M3FN) for name in ("w13", "w2")}
    call |= stored
    call |= {"scales": scales, "recipe": Quantised(granularity=granularity, code=CodeType.E4M3FN)}
    whole = kernels["moe_experts"](**call)
    for start, stop in ((0, 1), (39, 40), (5, 15)):
        part = kernels["moe_experts"](**rows_of(call, start, stop))
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_configurations_of_another_architecture_answer_alike(kernels: Ops, arch: str) -> None:
    from syncline.model_ops_rocm.triton.launch import LAUNCHER

    for num_tokens in (1, 20):
        call = call_of(num_tokens)
        wanted = select("moe_experts", dtype=torch.float32)(**call)  # type: ignore[arg-type]  # keywords of one call
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LAUNCHER, "interpreted_arch", arch)
            torch.testing.assert_close(kernels["moe_experts"](**call), wanted, rtol=1e-5, atol=1e-5)


def test_the_sum_over_a_few_tokens_is_that_of_moe_combine(kernels: Ops) -> None:
    call = call_of(3)
    alone = []
    for slot in range(2):
        ids = cast(torch.Tensor, call["ids_TK"])[:, slot : slot + 1].contiguous()
        ones = {"weights_TK": torch.ones(3, 1), "ids_TK": ids}
        alone.append(kernels["moe_experts"](**call | ones))
    places = torch.arange(6, dtype=torch.int32).view(3, 2)
    y = torch.stack(alone, dim=1).flatten(0, 1)
    combined = kernels["moe_combine"](y, call["weights_TK"], places)
    assert torch.equal(kernels["moe_experts"](**call), combined)


def test_a_workspace_for_more_tokens_serves_fewer_and_its_bytes_do_not_matter(
    kernels: Ops,
) -> None:
    op = kernels["moe_experts"]
    call = call_of(20)
    size = cast(Any, op).workspace_bytes(call["w13"], 2, 30, torch.float32)
    assert size >= cast(Any, op).workspace_bytes(call["w13"], 2, 20, torch.float32)
    poisoned = torch.full((size,), 255, dtype=torch.uint8)
    for num_tokens in (1, 20):
        part = rows_of(call, 0, num_tokens)
        assert torch.equal(op(**part, workspace=poisoned), op(**part))


def test_what_only_this_backend_refuses_is_named(kernels: Ops) -> None:
    op, call = kernels["moe_experts"], call_of(3)
    assert cast(Any, op).layouts == (RowMajor(), Shuffle16x16())
    shuffled = {
        "layout": Shuffle32x16(),
        "w2": torch.zeros(4, 32, 32),
        "w13": torch.zeros(4, 64, 32),
    }
    fnuz = {
        name: torch.zeros(4, 32, size).to(torch.float8_e4m3fnuz)
        for name, size in (("w13", 32), ("w2", 16))
    }
    scales = {"scales": (torch.ones(4, 32, 1), torch.ones(4, 32, 1))}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"workspace": torch.zeros(64, dtype=torch.uint8)}, r"workspace must be contiguous uint8"),
        (
            {"workspace": torch.zeros(2**20, dtype=torch.uint8)[1:]},
            r"workspace must be aligned to 16",
        ),
        (fnuz | scales, r"w13 must be float8_e4m3fn on sm_90, got torch.float8_e4m3fnuz"),
        ({"x_TH": torch.zeros(3, 32, device="meta")}, r"x must be on the current device, cpu"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=f"moe_experts: {message}"):
            op(**call | arguments)
    with pytest.raises(LayoutError, match=r"moe_experts .*shuffle_32x16|shuffle_32x16"):
        op(**call | shuffled)
    with pytest.raises(NoConfigurationError, match=r"moe_route: .* width 2000"):
        kernels["moe_route"](torch.zeros(1, 2_000), 2)
