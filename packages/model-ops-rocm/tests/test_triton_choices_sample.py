"""Which kernels filtered logits are launched with; needs Triton and no GPU."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm.testing.cases import logits
from syncline.model_ops_rocm.testing.parity import Maker
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.testing.waits import ahead_of_wait
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER, CompiledLaunch
from syncline.model_ops_rocm.triton.ops.logits import SAMPLE_OP

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")

PAIRS, SINGLY = "collect_pairs_kernel", "collect_kernel"
# What a call is given, which no kernel of it writes.
FILTERS = {"temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "marks_ptr"}
GIVEN = {*FILTERS, "logits_ptr", "seeds_ptr", "samples_ptr", "positions_ptr"}
# Before its wait a kernel may read what was given, if the first of the call has waited by then, and
# what kernels wrote that the one ahead has waited for: so these let it begin only after their own.
TURN = {"tile_stats_kernel", PAIRS, SINGLY}
FOUND = {"settle_kernel": {"lows_ptr", "highs_ptr", "maxima_ptr", "sums_ptr"}}


def compiled_for(logits_RV: torch.Tensor, arch: str = "sm_90") -> list[CompiledLaunch]:
    make = Maker(logits_RV.dtype)
    distribution, draw = logits.filters(make, len(logits_RV)), logits.draws(make, len(logits_RV))
    with stand_in_driver(arch), LAUNCHER.compiling(is_preparing=False) as compiled:
        SAMPLE_OP(logits_RV, distribution, draw)
    return list(compiled)


def launched(logits_RV: torch.Tensor, arch: str = "sm_90") -> set[str]:
    return {one.binary.metadata.name for one in compiled_for(logits_RV, arch)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_in_rows_of_whole_32_bytes_are_collected_in_pairs(dtype: torch.dtype) -> None:
    wide = torch.empty(4, 2_064, dtype=dtype)
    for logits_RV in (wide, wide[:, :2_050], wide[:, 8:]):
        names = launched(logits_RV)
        assert PAIRS in names
        assert SINGLY not in names


def test_other_logits_are_collected_one_by_one() -> None:
    wide = torch.empty(4, 2_064, dtype=torch.bfloat16)
    apart = torch.empty(2_064, 16, dtype=torch.bfloat16).T[:4]
    odd = torch.empty(4, 2_056, dtype=torch.bfloat16)
    for logits_RV in (wide[:, 1:-1], wide[:, :2_051], apart, odd, wide.float()):
        names = launched(logits_RV)
        assert SINGLY in names
        assert PAIRS not in names
    assert PAIRS not in launched(wide, "gfx942")


def test_cases_of_both_kinds_are_compared_with_the_reference() -> None:
    sample = cast(Callable[..., object], SAMPLE_OP)
    cases = [case for case in logits.CASES if case.op == "sample"]
    with stand_in_driver("sm_90"):
        names = set()
        for case in cases:
            call = case.build(Maker(torch.bfloat16))
            with LAUNCHER.compiling(is_preparing=False) as compiled:
                sample(**call)
            names |= {one.binary.metadata.name for one in compiled}
    assert {PAIRS, SINGLY} <= names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_read_ahead_of_their_wait_what_none_still_writes(dtype: torch.dtype) -> None:
    compiled = compiled_for(torch.empty(4, 2_064, dtype=dtype))
    names = [one.binary.metadata.name for one in compiled]
    assert len(names) == 7 and TURN & set(names) and set(FOUND) < set(names)
    for one, name in zip(compiled, names, strict=True):
        ahead = ahead_of_wait(one.binary.asm["ttir"])
        # Of those that end early, too, since the next one relies on it.
        assert ahead.num_waits == (2 if name == "settle_kernel" else 1), name
        assert ahead.lets_next_begin == (name not in TURN), name
        assert not ahead.is_written and not ahead.is_cached, name
        assert ahead.is_read <= GIVEN | FOUND.get(name, set()), name
        assert not (name in TURN and ahead.is_read), name
        assert FOUND.get(name, set()) - {"highs_ptr"} <= ahead.is_read, name
    bracket = compiled[names.index("bracket_kernel")].binary.asm["ttir"]
    assert "logits_ptr" in ahead_of_wait(bracket).is_read
