"""AITER's norm, activation, rotary embedding and linear against the reference, on the stand-in.

What this shows: the calls are as recorded, the layouts are the ones that AITER reads, and a bad
argument is refused before AITER sees it. It shows nothing of AITER itself.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import NormStyle, select
from syncline.model_ops_rocm.aiter import BACKEND
from syncline.model_ops_rocm.aiter.detect import detect
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter

InstallAiter = Callable[..., FakeAiter]
Op = Callable[..., torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
OPS = ("rms_norm", "rotary_embedding", "silu_and_mul")


def load(op: str, arch: str = "gfx942") -> Op:
    aiter = detect("0.1.22", device_type="cpu", arch=lambda device: arch)
    return cast(Op, implementations(aiter)[op])


def test_each_style_of_the_norm_has_its_flag(install_aiter: InstallAiter) -> None:
    """Bit for bit what the contract says, with a residual too."""
    install_aiter()
    x, residual = torch.randn(2, 5, 96).bfloat16()
    weight = torch.randn(96).bfloat16() * 3
    other = residual.clone()
    ours = load("rms_norm")(x, weight, 1e-6, residual_TH=residual)
    expected = select("rms_norm", dtype=torch.bfloat16)(x, weight, 1e-6, residual_TH=other)
    assert torch.equal(ours, expected)
    assert torch.equal(residual, other)
    style = NormStyle.WEIGHT_THEN_ROUND
    ours = load("rms_norm")(x, weight, 1e-6, style=style)
    expected = select("rms_norm", dtype=torch.bfloat16)(x, weight, 1e-6, style=style)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, load("rms_norm")(x, weight, 1e-6))
    gemma = NormStyle.ONE_PLUS_WEIGHT_THEN_ROUND
    with pytest.raises(ValueError, match=r"style must be round_then_weight or weight_then_round"):
        load("rms_norm")(x, weight, 1e-6, style=gemma)


def test_a_position_outside_is_refused_before_aiter_reads_it(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    q = torch.ones(2, 1, 4).bfloat16()
    with pytest.raises(ValueError, match=r"rotary_embedding: positions must be in \[0, 3\)"):
        load("rotary_embedding")(q, q, torch.ones(3, 4), torch.tensor([3, 0]))
    assert fake.calls == []


def x_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


REFUSED = [
    ("rms_norm", (x_of(2, 8, dtype=torch.float32), x_of(8, dtype=torch.float32), 1e-6), "bfloat16"),
    ("rms_norm", (x_of(2, 8), x_of(8, dtype=torch.float16), 1e-6), "weight must be torch.bfloat16"),
    ("rms_norm", (x_of(2, 8), x_of(9), 1e-6), r"weight must have shape \[8\]"),
    ("rms_norm", (x_of(2, 8), x_of(8), 0.0), "eps must be positive"),
    ("rms_norm", (x_of(2, 8), torch.ones(8, device="meta").bfloat16(), 1e-6), "weight must be on"),
    ("silu_and_mul", (x_of(2, 7),), "even last dimension"),
    ("silu_and_mul", (x_of(2, 8, dtype=torch.float32),), "be bfloat16 or float16 for AITER"),
    ("rotary_embedding", (x_of(2, 1, 4), x_of(2, 1, 4), x_of(3, 6), torch.zeros(2).long()), "cos"),
    (
        "rotary_embedding",
        (x_of(2, 1, 4), x_of(2, 1, 4), x_of(3, 4), torch.zeros(2)),
        "positions must be int64 or int32",
    ),
]


@pytest.mark.parametrize(("op", "arguments", "match"), REFUSED)
def test_a_bad_argument_never_reaches_aiter(
    install_aiter: InstallAiter, op: str, arguments: tuple[object, ...], match: str
) -> None:
    fake = install_aiter()
    with pytest.raises(ValueError, match=rf"{op}: .*{match}"):
        load(op)(*arguments)
    assert fake.calls == []


def test_no_call_is_batch_invariant(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    x = x_of(2, 64)
    with pytest.raises(ValueError, match=r"rms_norm: batch_invariant must be False for AITER"):
        load("rms_norm")(x, x[0], 1e-6, batch_invariant=True)
    assert fake.calls == []


def test_preparing_calls_with_memory_of_its_own(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    example = {
        "x_TH": torch.empty(4, 16, dtype=torch.bfloat16, device="meta"),
        "weight_H": torch.ones(16).bfloat16(),
        "eps": 1e-6,
        "residual_TH": torch.ones(4, 16).bfloat16(),
    }
    BACKEND.prepare(load("rms_norm"), [example, example])
    assert fake.calls == ["rmsnorm2d_fwd"] * 2
    residual = example["residual_TH"]
    assert isinstance(residual, torch.Tensor)
    assert torch.equal(residual, torch.ones(4, 16).bfloat16())
