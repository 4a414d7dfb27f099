"""SamplingParams: ranges, names, and values that only look right."""

import math
from typing import Any

import pytest

from syncline.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", ["", "x"]),
        ("stop", [3]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [-1]),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("structured_outputs", {"json": {}}),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", 3),
        ("include_stop_str_in_output", None),
        # Numbers in Python that are zero, infinite or no number where logits are computed.
        ("temperature", 1e-46),
        ("temperature", 1e31),
        ("temperature", 10**400),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 1e7),
        ("logit_bias", {5: 1e39}),
        ("logit_bias", {5: -1e39}),
        ("logit_bias", {5: math.nan}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    kwargs: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        SamplingParams(**kwargs)


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_the_callers_collections_are_copied() -> None:
    bias = {1: 0.5}
    stops = [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops)
    bias[2] = 1.0
    stops.append(4)
    assert params.logit_bias == {1: 0.5}
    assert params.stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("temperature", 1e-46, r"temperature must be 0 or at least 1\.17\d*e-38, got 1e-46"),
        ("logit_bias", {5: 1e39}, r"logit_bias\[5\] must be .*1e\+30\], got 1e\+39"),
        ("repetition_penalty", 1e-40, r"repetition_penalty must be .*\[1e-06, .*got 1e-40"),
        ("min_tokens", 2**31, r"min_tokens must be at most 2147483647, got 2147483648"),
    ],
)
def test_a_limit_is_named_with_the_value(field: str, value: Any, text: str) -> None:
    kwargs: dict[str, Any] = {"max_tokens": 2**40, field: value}
    with pytest.raises(ValueError, match=text):
        SamplingParams(**kwargs)


def test_none_is_no_stop_as_in_vllm() -> None:
    kwargs: dict[str, Any] = {"stop": None, "stop_token_ids": None}
    params = SamplingParams(**kwargs)
    assert params == SamplingParams()
    assert (params.stop_strings, params.stop_token_ids) == ((), ())


def test_the_edges_are_inside() -> None:
    params = SamplingParams(
        temperature=0.0, top_p=1.0, min_p=1.0, top_k=-1, seed=2**64 - 1, min_tokens=16
    )
    assert params.is_greedy
