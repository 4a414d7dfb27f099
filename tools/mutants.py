"""Faults put in by hand, one at a time, into a copy of the sources: the named test must see each.

`packages/<package>/tests/mutants.toml` lists them: a name, a file of the package, a text that
occurs exactly once in it, the text that takes its place, and the test of the same package that
fails then. A mutant is killed if that test passes without it and fails with it, by an assertion or
an error of the code under test, within `LIMIT_S`; one that cannot be imported proves nothing.
Knows no package from the inside, and never writes into the tree. Exits 1 unless all are killed.
"""

import argparse
import ast
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.resolve()
LIMIT_S = 20.0
KILLED = "killed"
FIELDS = frozenset({"name", "file", "old", "new", "killed_by"})
# A mutant with a wrong name in it fails every test: it says nothing about this one.
BAD_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "NameError", "SyntaxError"})
# What the child answers in place of pytest's own codes, 0 to 5.
NOT_IMPORTED, NOT_THE_COPY = 97, 98
ERROR_MARK = "mutants: error "
TEST_MARKS = {True: "mutants: passed ", False: "mutants: failed "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault. `killed_by` is a test id below the package's `tests` folder."""

    package: str
    name: str
    file: str
    old: str
    new: str
    killed_by: str

    @property
    def import_name(self) -> str:
        return "syncline." + self.package.replace("-", "_")

    @property
    def module(self) -> str:
        parts = Path(self.file).with_suffix("").parts
        return ".".join([self.import_name, *(part for part in parts if part != "__init__")])

    def source_in(self, root: Path) -> Path:
        return root / self.package / "src" / Path(*self.import_name.split(".")) / self.file

    def test_in(self, root: Path) -> str:
        return str(root / self.package / "tests" / self.killed_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant: `outcome` is KILLED or says what is wrong."""

    mutant: Mutant
    outcome: str
    duration_s: float = 0.0
    error: str = ""


class MutantListError(Exception):
    """A list is not one: a key is missing or unknown, or a name occurs twice."""


# --- lists ----------------------------------------------------------------------------------------


def read_mutants(root: Path) -> list[Mutant]:
    """Every list of the repository at `root`. Raises MutantListError."""
    mutants: list[Mutant] = []
    for path in sorted((root / "packages").glob("*/tests/mutants.toml")):
        entries: list[dict[str, str]] = tomllib.loads(path.read_text("utf-8"))["mutant"]
        for entry in entries:
            if entry.keys() != FIELDS:
                raise MutantListError(f"{path}: {entry.get('name')!r} has {sorted(entry)}")
            mutants.append(Mutant(package=path.parent.parent.name, **entry))
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MutantListError(f"names that occur twice: {twice}")
    first: dict[tuple[str, str, str, str], str] = {}
    for m in mutants:
        same = first.setdefault((m.package, m.file, m.old, m.new), m.name)
        if same != m.name:
            raise MutantListError(f"one fault under two names: {same!r} and {m.name!r}")
    return mutants


def select(mutants: list[Mutant], wanted: list[str]) -> list[Mutant]:
    """Those of which a wanted word is the package, the file or a part of the name; all for none.

    Raises MutantListError for a word that names none.
    """
    chosen: set[str] = set()
    for word in wanted:
        found = {m.name for m in mutants if word in (m.package, m.file) or word in m.name}
        if not found:
            raise MutantListError(f"no mutant is called {word!r}")
        chosen |= found
    return [m for m in mutants if m.name in chosen] if wanted else mutants


def fault_of(mutant: Mutant, packages: Path) -> str | None:
    """Why this entry no longer says anything, or None. Reads sources, runs nothing."""
    source = mutant.source_in(packages)
    if not source.is_file():
        return f"stale: no file {mutant.file}"
    text = source.read_text("utf-8")
    if (count := text.count(mutant.old)) != 1:
        return f"stale: its text occurs {count} times in {mutant.file}"
    try:
        changed = ast.dump(ast.parse(text.replace(mutant.old, mutant.new)))
    except SyntaxError as error:
        return f"bad: does not compile: {error.msg}"
    if changed == ast.dump(ast.parse(text)):
        return "bad: changes nothing"
    path, _, names = mutant.killed_by.partition("::")
    test_file = packages / mutant.package / "tests" / path
    if not names or not test_file.is_file() or not _defines(test_file, names):
        return f"stale: no test {mutant.killed_by}"
    return None


def _defines(test_file: Path, names: str) -> bool:
    """Whether the file binds the first name of a test id, as a function, a class or a value."""
    wanted = names.partition("::")[0].partition("[")[0]
    for node in ast.parse(test_file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted:
            return True
        if isinstance(node, ast.Assign) and wanted in [ast.unparse(t) for t in node.targets]:
            return True
    return False


# --- the process that runs a test -----------------------------------------------------------------


class _Reporter:
    """A pytest plugin: prints which tests passed and failed, and the type of each error."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            print(f"\n{TEST_MARKS[report.passed]}{report.nodeid}", flush=True)

    def pytest_exception_interact(
        self,
        call: pytest.CallInfo[Any],  # Any: the result of a call, which nobody reads
    ) -> None:
        if call.excinfo is not None:
            print(f"\n{ERROR_MARK}{call.excinfo.typename}", flush=True)


def run_tests(module_name: str, source: str, tests: list[str]) -> int:
    """In a process of its own: import the changed module, then run pytest on the tests."""
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 process boundary: whatever it is, it is reported
        print(f"{ERROR_MARK}{type(error).__name__}: {error}", flush=True)
        return NOT_IMPORTED
    if module.__file__ is None or Path(module.__file__).resolve() != Path(source).resolve():
        print(f"{ERROR_MARK}an import of {module.__file__}", flush=True)
        return NOT_THE_COPY
    options = ["-q", "--rootdir=.", "--import-mode=importlib", "-p", "no:cacheprovider", "--tb=no"]
    return int(pytest.main([*options, *tests], plugins=[_Reporter()]))


# --- running them ---------------------------------------------------------------------------------


def copy_sources(packages: Path, names: set[str], scratch: Path) -> None:
    for name in names:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(packages / name / "src", scratch / name / "src", ignore=unwanted)


def _in_child(
    mutant: Mutant, tests: list[str], root: Path, scratch: Path, limit_s: float
) -> tuple[int | None, str]:
    """(exit code, output) of the tests over the copy; None if they ran longer than the limit."""
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(str(path) for path in sorted(scratch.glob("*/src"))),
        # Two mutants of one size in one second would share a compiled file.
        PYTHONDONTWRITEBYTECODE="1",
        HYPOTHESIS_PROFILE="mutants",
    )
    source = str(mutant.source_in(scratch))
    command = [sys.executable, __file__, "--in-child", mutant.module, source, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def failing_without_mutant(mutants: list[Mutant], root: Path, scratch: Path) -> set[str]:
    """The named tests that do not pass, with every parameter, over the untouched copy."""
    failing: set[str] = set()
    for package in sorted({mutant.package for mutant in mutants}):
        ours = [mutant for mutant in mutants if mutant.package == package]
        tests = sorted({mutant.test_in(root / "packages") for mutant in ours})
        _, output = _in_child(ours[0], tests, root, scratch, LIMIT_S * len(tests))
        ran = {is_passed: _marked(output, mark) for is_passed, mark in TEST_MARKS.items()}
        for mutant in ours:
            wanted = f"packages/{package}/tests/{mutant.killed_by}"
            has_passed = any(_covers(wanted, node) for node in ran[True])
            if not has_passed or any(_covers(wanted, node) for node in ran[False]):
                failing.add(wanted)
    return failing


def _marked(output: str, mark: str) -> list[str]:
    return [line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark)]


def _covers(wanted: str, node: str) -> bool:
    """Whether a test that ran is the one wanted, or one of its parameters or methods."""
    return node == wanted or node.startswith((f"{wanted}[", f"{wanted}::"))


def try_mutant(mutant: Mutant, root: Path, scratch: Path) -> Verdict:
    """Apply the mutant to the copy, run its test, take the mutant out again."""
    source = mutant.source_in(scratch)
    text = source.read_text("utf-8")
    source.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    begun = time.perf_counter()
    try:
        tests = [mutant.test_in(root / "packages")]
        code, output = _in_child(mutant, tests, root, scratch, LIMIT_S)
    finally:
        source.write_text(text, "utf-8")
    error = next(iter(_marked(output, ERROR_MARK)), "")
    return Verdict(
        mutant=mutant,
        outcome=_outcome(code, error),
        duration_s=time.perf_counter() - begun,
        error=error,
    )


def _outcome(code: int | None, error: str) -> str:
    if code is None:
        return f"survived: no answer in {LIMIT_S:.0f} s"
    if code == NOT_IMPORTED:
        return f"bad: cannot be imported: {error}"
    if code == NOT_THE_COPY:
        return f"bad: the copy is not what is imported, but {error}"
    if code == int(pytest.ExitCode.OK):
        return "survived: its test passes"
    if code != int(pytest.ExitCode.TESTS_FAILED):
        return f"stale: pytest cannot run its test (exit {code}) {error}"
    if error in BAD_ERRORS:
        return f"bad: its test fails by {error}"
    return KILLED


def judge(mutants: list[Mutant], root: Path, scratch: Path) -> Iterator[Verdict]:
    """One verdict per mutant, as each is known."""
    packages = root / "packages"
    applicable: list[Mutant] = []
    for mutant in mutants:
        fault = fault_of(mutant, packages)
        if fault is None:
            applicable.append(mutant)
        else:
            yield Verdict(mutant=mutant, outcome=fault)
    if not applicable:
        return
    copy_sources(packages, {path.parent.name for path in packages.glob("*/src")}, scratch)
    failing = failing_without_mutant(applicable, root, scratch)
    for mutant in applicable:
        if f"packages/{mutant.package}/tests/{mutant.killed_by}" in failing:
            yield Verdict(mutant=mutant, outcome="stale: its test does not pass without it")
        else:
            yield try_mutant(mutant, root, scratch)


# --- the command ----------------------------------------------------------------------------------


def show(verdict: Verdict) -> None:
    mutant = verdict.mutant
    place = f"{mutant.package}/{mutant.file}"
    print(f"{verdict.duration_s:5.1f} s  {place:<34} {mutant.name}")
    by = f"{verdict.outcome} by {verdict.error} in {mutant.killed_by}"
    print(f"{'':9}{by if verdict.outcome == KILLED else verdict.outcome}", flush=True)


def run_all(mutants: list[Mutant], root: Path) -> int:
    """Judge and print; what was found is summed up after Ctrl-C as well."""
    verdicts: list[Verdict] = []
    is_complete = True
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        try:
            for verdict in judge(mutants, root, Path(scratch)):
                verdicts.append(verdict)
                show(verdict)
        except KeyboardInterrupt:
            is_complete = False
    wrong = [verdict for verdict in verdicts if verdict.outcome != KILLED]
    num_killed = len(verdicts) - len(wrong)
    print(f"\n{num_killed} killed, {len(wrong)} not, {len(mutants) - len(verdicts)} not tried")
    for verdict in wrong:
        print(f"  {verdict.mutant.name}: {verdict.outcome}")
    if not is_complete:
        return 130
    return 1 if wrong else 0


def check_all(mutants: list[Mutant], root: Path) -> int:
    """Say which entries no longer apply; runs nothing."""
    faults = [(mutant, fault_of(mutant, root / "packages")) for mutant in mutants]
    for mutant, fault in faults:
        if fault is not None:
            print(f"{mutant.name}: {fault}")
    return 1 if any(fault for _, fault in faults) else 0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--in-child"]:
        return run_tests(arguments[1], arguments[2], arguments[3:])
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="*", help="a package, a file, or a part of a mutant's name")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--check", action="store_true", help="do the entries still apply?")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (this one)")
    options = parser.parse_args(arguments)
    try:
        mutants = select(read_mutants(options.root), options.name)
    except MutantListError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    if options.check:
        return check_all(mutants, options.root)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.package}/{mutant.file}  {mutant.name}  [{mutant.killed_by}]")
        return 0
    return run_all(mutants, options.root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
