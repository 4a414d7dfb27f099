"""The README's example runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs() -> None:
    if not README.exists():
        pytest.skip("README.md is not beside the tests: they run from an unpacked wheel")
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
