"""The checks of the repository object to what they are for, and to nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"


def _faults(path: Path) -> str:
    script = (
        "import sys, pathlib, check_source as c; print(*c.faults_of(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=TOOLS,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\n" * 401, "401 lines"),
        ("x = 'na\u00efve'\n", "not ASCII"),
        ("import os  # noqa\n", "needs its codes and a reason"),
        ("import os  # noqa: F401\n", "needs its codes and a reason"),
        ("x: int = ''  # type: ignore[assignment]\n", "needs its codes and a reason"),
        ("x = 1\n" * 400, ""),
        ("import os  # noqa: F401 kept for its side effect\n", ""),
        ("x: int = f()  # type: ignore[assignment]  # reason: untyped library\n", ""),
        ("x = '# noqa'\n", ""),
    ],
)
def test_the_source_check_sees_what_it_is_for(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text, "utf-8")
    found = _faults(path)
    assert complaint in found
    assert bool(found) == bool(complaint)


def test_imports_of_the_packages_match_what_they_declare() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "check_imports.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
