"""The README's example runs as printed and prints what its comments say."""

import re
from pathlib import Path

import pytest


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parents[1] / "README.md"
    if not readme.exists():
        pytest.skip("the tests are laid out without the README")
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(readme), "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"print\(error\)  # (.*)", blocks[0])
    assert printed == promised and len(promised) == 2
