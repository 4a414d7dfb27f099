"""AITER's norm, activation, rotary embedding and linear against the reference, on the stand-in.

What this shows: the calls are as recorded, the layouts are the ones that AITER reads, and a bad
argument is refused before AITER sees it. It shows nothing of AITER itself.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import LayoutError, NormStyle, RowMajor, Shuffle16x16, select
from syncline.model_ops_rocm.aiter.detect import detect
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.aiter.warm import scratch_call
from syncline.model_ops_rocm.layouts import Shuffle32x16
from syncline.model_ops_rocm.testing.cases import CASES
from syncline.model_ops_rocm.testing.cases.aiter import aiter_tolerance_of
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker, assert_parity

InstallAiter = Callable[..., FakeAiter]
Op = Callable[..., torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
OPS = ("rms_norm", "rotary_embedding", "silu_and_mul")


def load(op: str, arch: str = "gfx942") -> Op:
    aiter = detect("0.1.22", device_type="cpu", arch=lambda device: arch)
    return cast(Op, implementations(aiter)[op])


def refusal_of(arguments: Arguments) -> str | None:
    """What AITER is not asked for, of what the contracts offer."""
    if arguments.get("batch_invariant", False):
        return "batch_invariant must be False for AITER"
    if arguments.get("style", NormStyle.ROUND_THEN_WEIGHT) is not NormStyle.ROUND_THEN_WEIGHT:
        return "style must be round_then_weight on aiter"
    if arguments.get("is_interleaved", False):
        return "is_interleaved must be False on aiter"
    widths = {
        tensor.shape[-1]
        for tensor in (arguments.get("cos_sin_cache"), arguments.get("q_TNH"))
        if isinstance(tensor, torch.Tensor)
    }
    is_partial = len(widths) > 1
    return "cos_sin_cache must turn all .* of a head on aiter" if is_partial else None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.op in OPS], ids=str)
def test_aiter_answers_as_the_reference_does(
    install_aiter: InstallAiter, case: Case, dtype: torch.dtype
) -> None:
    fake = install_aiter()
    reference = cast(Op, select(case.op, dtype=dtype))
    refusal = refusal_of(case.build(Maker(dtype)))
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            load(case.op)(**case.build(Maker(dtype)))
        assert fake.calls == []
        return
    tolerance = aiter_tolerance_of(case.op, dtype)
    assert_parity(case, dtype, load(case.op), reference, tolerance=tolerance)


def test_the_norm_is_the_model_sensitive_one(install_aiter: InstallAiter) -> None:
    """Rounded before the weight: bit for bit what the contract says, with a residual too."""
    install_aiter()
    x, residual = torch.randn(2, 5, 96).bfloat16()
    weight = torch.randn(96).bfloat16() * 3
    other = residual.clone()
    ours = load("rms_norm")(x, weight, 1e-6, residual_TH=residual)
    expected = select("rms_norm", dtype=torch.bfloat16)(x, weight, 1e-6, residual_TH=other)
    assert torch.equal(ours, expected)
    assert torch.equal(residual, other)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_linear_multiplies_what_is_stored(
    install_aiter: InstallAiter, arch: str, shuffled: bool, num_tokens: int
) -> None:
    install_aiter(arch)
    layout = Shuffle16x16() if shuffled else RowMajor()
    weight = torch.randn(128, 192).bfloat16()
    x = torch.randn(num_tokens, 2, 200).bfloat16()[..., 4:196]
    bias = torch.randn(128).bfloat16()
    out = torch.full((num_tokens, 2, 130), float("nan")).bfloat16()[..., :128]
    got = load("linear", arch)(x, layout.apply(weight), bias, layout=layout, out=out)
    assert got is out
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(out.float(), expected, rtol=2**-6, atol=2**-6)


def test_a_flag_on_the_weight_changes_nothing(install_aiter: InstallAiter) -> None:
    """Only the layout that the caller names says how the weight is read."""
    install_aiter()
    weight, x = torch.eye(32).bfloat16(), torch.randn(3, 32).bfloat16()
    weight.is_shuffled = True  # type: ignore[attr-defined]  # as a loader may leave it
    linear = load("linear")
    assert torch.equal(linear(x, weight, layout=RowMajor()), x)
    stored = Shuffle16x16().apply(weight)
    assert torch.equal(linear(x, stored, layout=Shuffle16x16()), x)
    # The stand-in would notice: read as row-major, the shuffled weight is another one.
    assert not torch.equal(linear(x, stored, layout=RowMajor()), x)


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
    ("rotary_embedding", (x_of(2, 1, 4), x_of(2, 1, 4), x_of(3, 2), torch.zeros(2).long()), "cos"),
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


@pytest.mark.parametrize(
    ("arch", "weight", "match"),
    [
        ("gfx950", x_of(32, 64), r"multiples of 64 where it is shuffled, got \[32, 64\]"),
        ("gfx950", x_of(64, 32), r"multiples of 64 where it is shuffled, got \[64, 32\]"),
        ("gfx942", x_of(64, 64, dtype=torch.float16), "weight must be bfloat16 where it is"),
        ("gfx942", x_of(64, 128)[:, :64], r"weight must be contiguous, got strides \(128, 1\)"),
        ("gfx942", x_of(2, 32, 64), "weight must have 2 dimensions"),
        ("gfx942", x_of(64, 64, dtype=torch.float32), "weight must be torch.bfloat16"),
    ],
)
def test_a_weight_that_aiter_would_not_take_is_refused(
    install_aiter: InstallAiter, arch: str, weight: torch.Tensor, match: str
) -> None:
    fake = install_aiter(arch)
    x = torch.ones(2, weight.shape[-1], dtype=weight.dtype)
    if weight.dtype == torch.float32:
        x = x.bfloat16()
    with pytest.raises(ValueError, match=match):
        load("linear", arch)(x, weight, layout=Shuffle16x16())
    assert fake.calls == []


def test_no_call_is_batch_invariant(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    x, weight = x_of(2, 64), x_of(64, 64)
    with pytest.raises(ValueError, match=r"rms_norm: batch_invariant must be False for AITER"):
        load("rms_norm")(x, x[0], 1e-6, batch_invariant=True)
    with pytest.raises(ValueError, match=r"linear: batch_invariant must be False for AITER"):
        load("linear")(x, weight, layout=RowMajor(), batch_invariant=True)
    assert fake.calls == []


def test_a_layout_that_linear_does_not_read_is_refused(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    x, weight = x_of(2, 64), x_of(64, 64)
    with pytest.raises(LayoutError, match=r"shuffle_32x16 requires linear to take it"):
        load("linear")(x, weight, layout=Shuffle32x16())
    with pytest.raises(LayoutError, match=r"shuffle_16x16 requires"):
        load("linear")(x_of(2, 8), x_of(8, 8), layout=Shuffle16x16())
    assert fake.calls == []


def test_a_warm_up_calls_with_memory_of_its_own(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    example = {
        "x_TH": torch.empty(4, 16, dtype=torch.bfloat16, device="meta"),
        "weight_H": torch.ones(16).bfloat16(),
        "eps": 1e-6,
        "residual_TH": torch.ones(4, 16).bfloat16(),
    }
    load("rms_norm")(**scratch_call(example, torch.device("cpu")))
    assert fake.calls == ["rmsnorm2d_fwd"]
    residual = example["residual_TH"]
    assert isinstance(residual, torch.Tensor)
    assert torch.equal(residual, torch.ones(4, 16).bfloat16())
