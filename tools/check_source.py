"""Rules of the source for which ruff has no name.

ASCII only; files up to 400 lines; a `noqa` or a `type: ignore` gives its codes and its reason on
its line. Comments are read as tokens, so that rule never fires inside a string. Exits 1 listing
every offender.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tree import ROOT

MAX_LINES = 400
FOLDERS = ("packages", "tests", "tools", "examples")
SUPPRESSION = re.compile(r"#\s*(noqa|type:\s*ignore|pyright:\s*ignore)(?P<rest>.*)", re.IGNORECASE)
CODES = re.compile(r"^(:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*|\[[a-z0-9-]+(,\s*[a-z0-9-]+)*\])")
MIN_REASON = 6


def python_files(root: Path) -> list[Path]:
    """Every Python file that people write here."""
    found = [path for name in FOLDERS for path in (root / name).rglob("*.py")]
    return sorted([*found, *root.glob("*.py")])


def _suppressions(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = SUPPRESSION.search(token.string) if token.type == tokenize.COMMENT else None
        if match is None:
            continue
        rest = match["rest"].strip()
        reason = CODES.sub("", rest)
        if len(reason.strip(" #-:.")) < MIN_REASON:
            yield token.start[0], f"`{match[1]}` needs its codes and a reason on its line"


def faults_of(path: Path) -> Iterator[str]:
    """What is wrong with one file, each as `path:line: what`."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{path}:{MAX_LINES + 1}: {len(lines)} lines, the limit is {MAX_LINES}"
    for number, line in enumerate(lines, start=1):
        if not line.isascii():
            yield f"{path}:{number}: not ASCII: {line.strip()!a}"
    for number, what in _suppressions(text):
        yield f"{path}:{number}: {what}"


def main() -> int:
    """Check every file; 1 if anything is wrong, or if there was nothing to check."""
    files = python_files(ROOT)
    faults = [fault for path in files for fault in faults_of(path)]
    for fault in faults:
        print(fault)
    print(f"source: {len(files)} files read, {len(faults)} faults")
    return 1 if faults or not files else 0


if __name__ == "__main__":
    sys.exit(main())
