"""What sampling reads before the kernels ahead have ended: nothing that these may still write.

Mutants these tests kill: logits, a filter, a seed or a position that is read before the wait for
the kernels ahead; a pass of the call that reads what the one before it has not written yet.
"""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm import Distribution, Draw, detect_arch, select
from syncline.model_ops_rocm.testing.late import write_late

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="a kernel begins before the one ahead has ended from sm_90 on",
    ),
]

NUM_ROWS, NUM_IDS = 8, 40_000


class Given(NamedTuple):
    """What a call is given."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def given(seed: int, dtype: torch.dtype) -> Given:
    make = torch.Generator(device="cuda").manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(NUM_ROWS, device="cuda", generator=make) * (high - low) + low

    logits = torch.randn(NUM_ROWS, NUM_IDS, device="cuda", generator=make) * (1 + seed % 3)
    return Given(
        logits=logits.to(dtype),
        temperature=uniform(0.5, 1.5),
        top_k=uniform(1, 400).long(),
        top_p=uniform(0.3, 0.95),
        min_p=uniform(0.0, 0.05),
        seeds=uniform(0, 2**30).long(),
        positions=uniform(0, 2**20).long(),
    )


class Sampling:
    """A call over operands, a workspace and results that stay where they are."""

    def __init__(self, operands: Given, filters: frozenset[str]) -> None:
        dtype = operands.logits.dtype
        self._op = select("sample", backend="triton", arch=detect_arch(), dtype=dtype)
        self._operands, self._filters = operands, filters
        num_bytes = self._op.workspace_bytes(operands.logits)
        self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        ids = torch.empty(NUM_ROWS, dtype=torch.int64, device="cuda")
        # A kernel that made it anew would wait for those ahead.
        self._samples = torch.zeros_like(ids)
        self.out = ids, torch.empty(NUM_ROWS, dtype=torch.float64, device="cuda")

    def poison(self) -> None:
        """What lies in the workspace and the results before a call may be anything."""
        self._workspace.fill_(0xFF)
        self.out[0].fill_(-7)
        self.out[1].fill_(float("nan"))

    def run(self) -> None:
        one, on = self._operands, self._filters
        distribution = Distribution(
            one.temperature,
            one.top_k if "top_k" in on else None,
            one.top_p if "top_p" in on else None,
            one.min_p if "min_p" in on else None,
        )
        draw = Draw(one.seeds, self._samples, one.positions)
        self._op(one.logits, distribution, draw, out=self.out, workspace=self._workspace)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "filters",
    [(), ("top_p",), ("top_k",), ("min_p",), ("top_k", "top_p", "min_p")],
    ids="+".join,
)
def test_all_is_read_after_a_kernel_ahead_that_writes_it_late(
    filters: tuple[str, ...], dtype: torch.dtype
) -> None:
    held = given(0, dtype)
    sampling = Sampling(held, frozenset(filters))
    seen = set()
    for seed in range(1, 9):
        new = given(seed, dtype)
        exact = Sampling(new, frozenset(filters))
        exact.poison()
        torch.cuda.synchronize()
        exact.run()
        torch.cuda.synchronize()
        sampling.poison()
        torch.cuda.synchronize()
        write_late(zip(new, held, strict=True))
        sampling.run()
        assert torch.equal(sampling.out[0], exact.out[0])
        assert torch.equal(sampling.out[1], exact.out[1])
        seen |= set(exact.out[0].tolist())
    assert len(seen) > 20
