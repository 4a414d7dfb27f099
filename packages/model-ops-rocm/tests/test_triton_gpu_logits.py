"""Cuts of usual rows are found in what was collected of them, on a GPU.

A row whose bracket holds no cut, or more than there is room for, is read at every step of a search,
which takes many times as long for all: where it happens is a matter of how brackets are guessed.
"""

import importlib

import pytest
import torch

from syncline.model_ops_rocm import Distribution
from syncline.model_ops_rocm.contracts.logits import WHOLE

pytestmark = pytest.mark.gpu

NUM_ROWS, NUM_IDS = 512, 151_936


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("scale", "middle", "top_p"),
    [
        (1.0, 0.0, 0.9),
        (1.0, 0.0, 0.5),
        (1.0, 0.0, 0.999),
        (1.0, 20.0, 0.9),
        (1.0, -20.0, 0.9),
        (2.5, 12.0, 0.9),
        (3.0, 0.0, 0.98),
        (3.0, 0.0, 0.9),
        (3.0, 0.0, 0.5),
        (6.0, 0.0, 0.5),
    ],
)
def test_no_usual_row_is_read_again(
    dtype: torch.dtype, scale: float, middle: float, top_p: float
) -> None:
    rows_of = importlib.import_module("syncline.model_ops_rocm.triton.ops.logits_rows")
    make = torch.Generator(device="cuda").manual_seed(11)
    logits = torch.randn(NUM_ROWS, NUM_IDS, device="cuda", generator=make)
    logits = logits.mul_(scale).add_(middle).to(dtype)
    filters = Distribution(None, None, torch.full((NUM_ROWS,), top_p, device="cuda"))
    given = rows_of.Operands(logits, filters, WHOLE, NUM_IDS, None, None)
    stats = rows_of.begin("sample", given).stats
    lows, highs, cuts = stats.lows[:NUM_ROWS], stats.highs[:NUM_ROWS], stats.cuts[:NUM_ROWS]
    # Not +inf: no row was read again.
    is_held = (lows <= cuts) & (cuts < highs) & (lows < float("inf"))
    assert is_held.sum() == NUM_ROWS
