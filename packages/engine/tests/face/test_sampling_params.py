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


def test_the_edges_are_inside() -> None:
    params = SamplingParams(
        temperature=0.0, top_p=1.0, min_p=1.0, top_k=-1, seed=2**64 - 1, min_tokens=16
    )
    assert params.is_greedy
