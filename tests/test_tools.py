"""The checks of the repository object to what they are for, and to nothing else."""

import shutil
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


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        ('[{"one", "two"}], ids=str', True),
        ('[((1, 2), frozenset({"one", "two"}))], ids=str', True),
        ('[{"one"}, ("one", "two")], ids=str', False),
        ('[{"one", "two"}]', False),
        ('[{"one", "two"}], ids=["both"]', False),
    ],
)
def test_a_case_that_a_set_names_is_refused_though_it_is_deselected(
    tmp_path: Path, values: str, is_refused: bool
) -> None:
    shutil.copy(TOOLS.parent / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n", "utf-8")
    (tmp_path / "test_cases.py").write_text(
        "import pytest\n@pytest.mark.gpu\n"
        f"@pytest.mark.parametrize('value', {values})\ndef test_it(value): pass\n"
        "def test_other(): pass\n",
        "utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("whose order differs between processes" in done.stderr) == is_refused
    assert (done.returncode != 0) == is_refused, done.stdout


TOY_SOURCE = """
def half(number):
    if number < 0:
        raise ValueError(number)
    return number // 2
"""
TOY_TEST = """
import pytest
from syncline.toy import half

@pytest.mark.parametrize("number", [4, 6])
def test_half(number):
    assert half(number) == number / 2

def test_nothing():
    assert half(2)

def test_never():
    assert half(2) == 5
"""
TOY_MUTANTS = [
    ("seen", "// 2", "// 3", "test_half"),
    ("not seen", "< 0", "< -1", "test_half"),
    ("seen by too weak a test", "// 2", "// 1", "test_nothing"),
    ("not there", "number // 4", "number", "test_half"),
    ("there twice", "number)", "0)", "test_half"),
    ("not Python", "// 2", "// (", "test_half"),
    ("only spaces", "// 2", "//  2", "test_half"),
    ("not importable", "def half", "import no_such_module\\n\\ndef half", "test_half"),
    ("a wrong name", "number // 2", "numbr // 2", "test_half"),
    ("no such test", "// 2", "// 4", "test_other"),
    ("a test that never passes", "// 2", "// 5", "test_never"),
]


def _mutants(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TOOLS / "mutants.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_mutant_command_tells_what_is_killed_from_what_is_not(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "toy"
    (package / "src" / "syncline" / "toy").mkdir(parents=True)
    (package / "tests").mkdir()
    source = package / "src" / "syncline" / "toy" / "__init__.py"
    source.write_text(TOY_SOURCE, "utf-8")
    (package / "tests" / "test_toy.py").write_text(TOY_TEST, "utf-8")
    entries = [
        f'[[mutant]]\nname = "{name}"\nfile = "__init__.py"\nold = "{old}"\nnew = "{new}"\n'
        f'killed_by = "test_toy.py::{test}"\n'
        for name, old, new, test in TOY_MUTANTS
    ]
    (package / "tests" / "mutants.toml").write_text("\n".join(entries), "utf-8")
    done = _mutants("--root", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-len(TOY_MUTANTS) :] == [
        "1 killed, 10 not, 0 not tried",
        "  not there: stale: its text occurs 0 times in __init__.py",
        "  there twice: stale: its text occurs 2 times in __init__.py",
        "  not Python: bad: does not compile: '(' was never closed",
        "  only spaces: bad: changes nothing",
        "  no such test: stale: no test test_toy.py::test_other",
        "  not seen: survived: its test passes",
        "  seen by too weak a test: survived: its test passes",
        "  not importable: bad: cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'",
        "  a wrong name: bad: its test fails by NameError",
        "  a test that never passes: stale: its test does not pass without it",
    ]
    assert source.read_text("utf-8") == TOY_SOURCE
    assert _mutants("--root", str(tmp_path), "seen", "--list").stdout.count("\n") == 3
    assert _mutants("--root", str(tmp_path), "unheard of").returncode == 2


def test_every_mutant_of_the_packages_still_applies() -> None:
    done = _mutants("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(_mutants("--list").stdout.splitlines()) >= 150
