"""What the documents say is so: commands are those CI runs, links lead somewhere, examples run,
and each test that the table of faults names is there."""

import ast
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


@pytest.mark.parametrize(
    ("name", "number"), [("scheduling.md", 11), ("kv-cache.md", 7)], ids=["scheduling", "kv-cache"]
)
def test_the_worked_examples_of_the_pure_packages_run(name: str, number: int) -> None:
    examples = _code(ROOT / "docs" / name, "python")
    assert len(examples) >= number
    for i, example in enumerate(examples):
        exec(compile(example, f"{name}, example {i}", "exec"), {})


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


EXPECTED_FAULTS = {
    *(f"#{n}" for n in (15, 16, 28, 29, 30, 35, 36, 48, 68, 75, 82, 90)),
    *(f"D{n}" for n in (*range(1, 24), 50, *range(61, 67))),
    *(f"B{n:02}" for n in (1, 2, 3, 5, 6, 7, 9, 10, 12, 13, 15, 28, 35, 37, 39)),
}


def _fault_rows() -> dict[str, list[str]]:
    """Item -> its other cells. Fails on a row that is not of four cells, or occurs twice."""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines():
        if re.match(r"\| [#DB]\d+ ", line):
            item, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 3, line
            assert item not in rows, line
            rows[item] = cells
    return rows


def test_every_known_fault_has_its_row_and_a_test_or_another_package() -> None:
    rows = _fault_rows()
    assert rows.keys() == EXPECTED_FAULTS
    for item, (fault, reason, tests) in rows.items():
        assert fault and reason, item
        assert "::" in tests or re.search(r"Not here: .*syncline-[a-z-]+", reason), item
        assert item[0] != "B" or "](https://github.com/" in fault, item


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    named = re.findall(
        r"`([a-z-]+)/(test_\w+\.py)::(\w+)`", (ROOT / "docs/faults.md").read_text("utf-8")
    )
    assert len(named) > len(EXPECTED_FAULTS)
    defined: dict[Path, set[str]] = {}
    for package, file, test in named:
        path = ROOT / "packages" / package / "tests" / file
        if path not in defined:
            body = ast.parse(path.read_text("utf-8")).body
            functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
            assigned = [node for node in body if isinstance(node, ast.Assign)]
            names = {ast.unparse(target) for node in assigned for target in node.targets}
            defined[path] = functions | names
        assert test in defined[path], f"{package}/{file} has no {test}"
