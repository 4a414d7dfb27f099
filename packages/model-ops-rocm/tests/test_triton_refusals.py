"""What the reference refuses, Triton's wrappers refuse before anything is compiled or launched.

Without a GPU: a stand-in driver says which one there is, and a launch that would compile is an
error of its own, so that a call which passes every check shows as that.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    AttentionMetadata,
    NoConfigurationError,
    NotPreparedError,
    OpError,
    select,
)
from syncline.model_ops_rocm.testing.cases import CASES
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker
from syncline.model_ops_rocm.testing.refusals import (
    calls_of_wrong_kinds,
    one_per_shape_of_call,
    overlaid_calls,
    wrong_calls,
)
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton import BACKEND
from syncline.model_ops_rocm.triton.targets import SUPPORTED_ARCHS

Ops = Mapping[str, Callable[..., object]]
OPS = {entry.op for entry in BACKEND.entries}
CALLED = [case for case in one_per_shape_of_call(CASES) if case.op in OPS]
# A CPU looks at values, which a device cannot do without waiting.
OF_VALUES = ("must be in [", "must be -1 or in [", "must name each destination once")
# Refused by both, each in its own words: the reference takes one more order of storage.
OWN_WORDS = ("k_cache must be contiguous",)


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER

    if IS_INTERPRETED:
        pytest.skip("Triton was imported to interpret")
    with LAUNCHER.sealed(), LAUNCHER.compiling() as compiled:
        yield cast(Ops, BACKEND.load())
        assert compiled == []


def refusal_of(op: Callable[..., object], call: Arguments) -> str | None:
    """None if every check was passed."""
    try:
        op(**call)
    except NotPreparedError:
        return None
    except (ValueError, OpError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_what_the_reference_refuses_is_refused_in_the_same_words(ops: Ops, case: Case) -> None:
    reference = cast(Callable[..., object], select(case.op, dtype=torch.float32))
    with stand_in_driver("sm_90"):
        assert refusal_of(ops[case.op], case.build(Maker(torch.float32))) is None
        for wrong in wrong_calls(case, Maker(torch.float32)):
            try:
                call = wrong.build(Maker(torch.float32))
            except ValueError:
                continue  # no backend is asked
            expected = refusal_of(reference, wrong.build(Maker(torch.float32)))
            if expected is None or any(words in expected for words in OF_VALUES):
                continue
            found = refusal_of(ops[case.op], call)
            assert found is not None, f"{wrong}: {expected}"
            if not any(words in expected or words in found for words in OWN_WORDS):
                assert found == expected, str(wrong)


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_an_argument_of_another_class_is_refused_in_the_same_words(ops: Ops, case: Case) -> None:
    reference = cast(Callable[..., object], select(case.op, dtype=torch.float32))
    calls = zip(*(calls_of_wrong_kinds(case, Maker(torch.float32)) for _ in range(2)), strict=True)
    with stand_in_driver("sm_90"):
        for (label, call), (_, same) in calls:
            expected = refusal_of(reference, same)
            assert _nameless(refusal_of(ops[case.op], call)) == _nameless(expected or label)


def _nameless(refusal: str | None) -> str | None:
    """Without the address of an object."""
    return None if refusal is None else re.sub(" at 0x[0-9a-f]+", "", refusal)


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_a_result_over_another_tensor_of_the_call_is_refused(ops: Ops, case: Case) -> None:
    reference = cast(Callable[..., object], select(case.op, dtype=torch.float32))
    calls = zip(*(overlaid_calls(case, Maker(torch.float32)) for _ in range(2)), strict=True)
    with stand_in_driver("sm_90"):
        for (label, call), (_, same) in calls:
            assert refusal_of(ops[case.op], call) == (refusal_of(reference, same) or label)


@pytest.mark.parametrize("arch", SUPPORTED_ARCHS)
@pytest.mark.parametrize("head_dim", [4, 12, 264, 512])
def test_a_head_size_that_no_kernel_has_is_refused(ops: Ops, head_dim: int, arch: str) -> None:
    q, k = torch.zeros(2, 4, head_dim), torch.zeros(2, 2, head_dim)
    cache = torch.zeros(6, 2, 16, head_dim)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([5, 9], dtype=torch.int32),
        block_tables=torch.zeros(2, 2, dtype=torch.int32),
        num_decode_rows=2,
    )
    with stand_in_driver(arch):
        with pytest.raises(ValueError, match=rf"^paged_attention: .* head_dim {head_dim}"):
            ops["paged_attention"](q, cache, cache.clone(), meta, scale=1.0)
        if head_dim <= 256:
            return
        slots = torch.tensor([0, 1])
        with pytest.raises(NoConfigurationError, match=rf"^kv_write: .* and width {head_dim}"):
            ops["kv_write"](k, k, cache, cache.clone(), slots)
        with pytest.raises(NoConfigurationError, match=rf"^rotary_embedding: .*{head_dim}"):
            ops["rotary_embedding"](q, k, torch.zeros(4, head_dim), slots)
