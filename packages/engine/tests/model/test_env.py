"""Environment variables are read as written or refused by name."""

import pytest

from syncline.engine.env import Environment, read_environment
from syncline.engine.errors import EngineConfigError


def test_nothing_set_is_the_default() -> None:
    assert read_environment({"PATH": "/bin"}) == Environment()


def test_values_are_read() -> None:
    variables = {"SYNCLINE_OP_BACKEND": "triton", "SYNCLINE_NUM_THREADS": "3"}
    assert read_environment(variables) == Environment(op_backend="triton", num_threads=3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SYNCLINE_OP_BACKEND", "cuda", "must be one of torch, triton, aiter, got 'cuda'"),
        ("SYNCLINE_NUM_THREADS", "0", "must be a positive integer, got '0'"),
        ("SYNCLINE_NUM_THREADS", "two", "must be a positive integer, got 'two'"),
        ("SYNCLINE_NUM_THREAD", "2", "did you mean SYNCLINE_NUM_THREADS?"),
    ],
)
def test_a_malformed_or_misspelt_variable_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        read_environment({name: value})
    assert message in str(caught.value)
    assert caught.value.field == name
