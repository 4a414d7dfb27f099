"""What the documents say is so: commands are those CI runs, links lead somewhere, examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "packages/*/*.md")
    for path in ROOT.glob(pattern)
)
READMES = [path for path in DOCUMENTS if path.name == "README.md" and "examples" not in path.parts]
EXAMPLE_LIMIT_S = 120
WARNINGS = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]


def _code(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_ci_runs_the_two_commands_of_the_readme_as_they_stand_there() -> None:
    commands = [block.strip() for block in _code(ROOT / "README.md", "sh")]
    script = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert [command.rpartition(" -s ")[2] for command in commands] == ["demo", "tests"]
    assert [command for command in commands if command not in script] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_every_link_into_the_repository_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#[^)\s]*)?\)", path.read_text("utf-8"))
    assert [link for link in links if link and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", READMES, ids=_name)
def test_the_first_example_of_a_readme_runs(path: Path) -> None:
    examples = _code(path, "python")
    assert examples, f"{path} shows no example"
    done = subprocess.run(
        [sys.executable, *WARNINGS, "-"],
        input=examples[0],
        capture_output=True,
        text=True,
        timeout=EXAMPLE_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=_name)
def test_every_example_runs(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *WARNINGS, str(path)],
        capture_output=True,
        text=True,
        timeout=EXAMPLE_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
