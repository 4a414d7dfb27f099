"""Recorded vectors of AITER's routing and sorting of mixture of experts."""

import re
from collections.abc import Callable

import pytest
import torch

from syncline.model_ops_rocm.reference.aiter_compat_moe import grouped_topk, moe_sorting
from syncline.model_ops_rocm.testing.goldens import GoldenCase, number

Goldens = Callable[[str], list[GoldenCase]]
pytestmark = pytest.mark.golden


def test_sorted_pairs_are_the_recorded_ones_once_they_are_packed(goldens: Goldens) -> None:
    for case in goldens("moe_sorting"):
        found = moe_sorting(
            *(case.inputs["topk_ids"], case.inputs["topk_weights"]),
            *(number(case.args, "num_experts"), number(case.args, "block_size")),
            expert_mask_E=case.inputs.get("expert_mask"),
        )
        num_valid = int(case.outputs["num_valid_ids"][0])
        for field, got in found._asdict().items():
            wanted = case.outputs[field]
            assert got.dtype == wanted.dtype, (case, field)
            if field == "sorted_weights":
                # What lies behind the last block was never written there.
                got, wanted = got[:num_valid], wanted[:num_valid]
            assert torch.equal(got, wanted), (str(case), field)


def test_grouped_routing_is_the_recorded_one(goldens: Goldens) -> None:
    for case in goldens("moe_routing"):
        weights, ids = grouped_topk(
            case.inputs["gating"],
            number(case.args, "topk"),
            (number(case.args, "n_group"), number(case.args, "topk_group")),
            scoring="softmax" if "scoring_func=softmax" in case.args else "sigmoid",
            bias_E=case.inputs.get("bias"),
            renormalise=re.search(r"\brenormalize\b(?!=False)", case.args) is not None,
        )
        assert torch.equal(ids, case.outputs["ids"]), str(case)
        torch.testing.assert_close(weights, case.outputs["weights"], rtol=2e-6, atol=0.0)
