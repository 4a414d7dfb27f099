"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run() -> None:
    if not README.exists():
        pytest.skip("README.md is not beside the tests: they run from an unpacked wheel")
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
