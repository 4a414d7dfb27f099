"""The README's first example runs and prints what it says."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_first_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    if not README.is_file():
        pytest.skip("the README is not part of this tree: the tests run beside a built wheel")
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    promised = re.search(r"print\(.*\)  # (.*)", example[1])
    assert promised is not None
    exec(compile(example[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == promised[1]
