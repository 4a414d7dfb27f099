"""Mixture of experts on a GPU at the size of a model: the same bits in every batch and every run.

`python -m pytest -m gpu packages/model-ops-rocm/tests/test_triton_gpu_moe.py` runs it.
"""

from typing import Any  # Any: one call's keywords

import pytest
import torch

from syncline.model_ops_rocm import Quantised, RowMajor, detect_arch, prepare, select
from syncline.model_ops_rocm.quant import CodeType, Granularity
from syncline.model_ops_rocm.testing.parity import recorded
from syncline.model_ops_rocm.triton import sealed

pytestmark = pytest.mark.gpu

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 32, 4, 2_048, 768
DTYPE = torch.bfloat16
ROWS = ("x_TH", "weights_TK", "ids_TK")


@pytest.fixture(scope="module")
def call() -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE)

    num_tokens = 700
    order = torch.rand((num_tokens, NUM_EXPERTS), generator=generator, device="cuda").argsort(dim=1)
    return {
        "x_TH": randn(num_tokens, HIDDEN),
        "w13": randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN).mul_(HIDDEN**-0.5),
        "w2": randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE).mul_(INTERMEDIATE**-0.5),
        "weights_TK": randn(num_tokens, TOP_K).float().softmax(dim=1),
        "ids_TK": order[:, :TOP_K].to(torch.int32).contiguous(),
        "layout": RowMajor(),
    }


def experts(**call: Any) -> torch.Tensor:
    return select("moe_experts", backend="triton", arch=detect_arch(), dtype=DTYPE)(**call)


def part_of(call: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return call | {name: call[name][start:stop] for name in ROWS}


def test_a_token_has_the_same_bits_in_every_batch_if_that_is_asked_for(
    call: dict[str, Any],
) -> None:
    whole = experts(**call, batch_invariant=True)
    for start, stop in ((0, 1), (699, 700), (5, 13), (100, 164), (300, 556)):
        part = experts(**part_of(call, start, stop), batch_invariant=True)
        assert torch.equal(part, whole[start:stop])
    reversed_rows = call | {name: call[name].flip(0) for name in ROWS}
    assert torch.equal(experts(**reversed_rows, batch_invariant=True).flip(0), whole)


@pytest.mark.parametrize("num_tokens", [1, 5, 20, 200, 700])
def test_every_way_of_computing_is_near_the_reference_and_repeats_itself(
    call: dict[str, Any], num_tokens: int
) -> None:
    part = part_of(call, 0, num_tokens)
    wanted = select("moe_experts", dtype=DTYPE)(**part)
    found = experts(**part)
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert float(error) < 2e-3
    for _ in range(20):
        # One workspace for all, so that a call that started too early would read another's.
        assert torch.equal(experts(**part), found)


@pytest.mark.parametrize("granularity", [Granularity.TOKEN, Granularity.BLOCK_1X128])
@pytest.mark.parametrize("num_tokens", [1, 5, 200, 700])
def test_codes_times_codes_are_near_the_reference_and_do_not_depend_on_the_batch(
    call: dict[str, Any], num_tokens: int, granularity: Granularity
) -> None:
    recipe = Quantised(granularity=granularity, code=CodeType.E4M3FN)
    is_row = granularity is Granularity.TOKEN
    codes: dict[str, Any] = {"recipe": recipe, "scales": []}
    for name in ("w13", "w2"):
        rows, columns = call[name].shape[1:]
        codes[name] = (call[name] * 16.0).to(torch.float8_e4m3fn)
        shape = (rows, 1) if is_row else (rows // 128, columns // 128)
        codes["scales"].append((torch.rand(NUM_EXPERTS, *shape, device="cuda") + 0.5) / 16.0)
    codes["scales"] = tuple(codes["scales"])
    part = part_of(call, 0, num_tokens) | codes
    wanted = select("moe_experts", dtype=DTYPE)(**part)
    found = experts(**part)
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    # What SwiGLU gives may round to another bfloat16, by at most d = 2^-9 of it on average. It then
    # falls on another code, by a step s of at most 2^-3, with a probability of d / s: the mean
    # square of that is s^2 * d / s.
    bound = (2**-3 * 2**-9) ** 0.5
    assert float(error) < bound
    # To encode nothing is further away.
    plain = experts(**{name: one for name, one in part.items() if name != "recipe"})
    assert float((plain.float() - wanted.float()).norm() / wanted.float().norm()) > bound
    whole = experts(**call | codes, batch_invariant=True)
    assert torch.equal(experts(**part, batch_invariant=True), whole[:num_tokens])


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_steps_that_share_their_memory_in_a_graph_do_not_meet(
    call: dict[str, Any], num_tokens: int
) -> None:
    op = select("moe_experts", backend="triton", arch=detect_arch(), dtype=DTYPE)
    route = select("moe_route", backend="triton", arch=detect_arch(), dtype=DTYPE)
    size = op.workspace_bytes(call["w13"], TOP_K, num_tokens, DTYPE)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    logits = torch.randn(40, num_tokens, NUM_EXPERTS, device="cuda", dtype=DTYPE)
    shape = (num_tokens, TOP_K)
    routed = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda").int()
    parts = [part_of(call, 16 * start, 16 * start + num_tokens) for start in range(40)]
    outs = [torch.empty_like(part["x_TH"]) for part in parts]

    def step() -> None:
        for one, part, out in zip(logits, parts, outs, strict=True):
            weights, ids = route(one, TOP_K, out=routed)
            op(**part | {"weights_TK": weights, "ids_TK": ids}, out=out, workspace=workspace)

    graph, _ = recorded(step)
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for one, part, out in zip(logits, parts, outs, strict=True):
            weights, ids = route(one, TOP_K)
            torch.cuda.synchronize()
            wanted = experts(**part | {"weights_TK": weights, "ids_TK": ids})
            torch.cuda.synchronize()
            assert torch.equal(out, wanted)


def test_what_was_prepared_runs_with_any_number_of_tokens(call: dict[str, Any]) -> None:
    arch = detect_arch()
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    for batch_invariant in (False, True):
        example = meta | {"batch_invariant": batch_invariant}
        prepare("moe_experts", [example], backend="triton", arch=arch, dtype=DTYPE)
        with sealed():
            for num_tokens in (0, 1, 8, 9, 40, 300, 700):
                experts(**part_of(call, 0, num_tokens), batch_invariant=batch_invariant)
    torch.cuda.synchronize()
