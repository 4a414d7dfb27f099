"""Import-linter's contracts hold, and its graph held every source file while it found so.

The contracts are in the root pyproject.toml. Knows only how to run the linter on a tree and how to
compare: a linter that finds no file is content with everything.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import grimp
from tree import PACKAGES, ROOT, source_files


def _source_folders(root: Path) -> list[str]:
    return [str(root / "packages" / package / "src") for package in PACKAGES]


def _modules_on_disk(root: Path) -> set[str]:
    names = set()
    for package in PACKAGES:
        source = root / "packages" / package / "src"
        for path in source_files(root, package):
            parts = path.relative_to(source).with_suffix("").parts
            names.add(".".join(parts).removesuffix(".__init__"))
    return names


def _lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["lint-imports", "--no-cache", str(root / "pyproject.toml")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_source_folders(root)), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def _faults_of_graph(root: Path, linted: str) -> list[str]:
    """How the linter's own graph differs from what lies on the disk."""
    sys.path[:0] = _source_folders(root)
    graph = grimp.build_graph("syncline", include_external_packages=True, cache_dir=None)
    seen = {name for name in graph.modules if name.startswith("syncline.")}
    faults = [f"not analysed, or not a file: {n}" for n in sorted(seen ^ _modules_on_disk(root))]
    counted = re.search(r"Analyzed (\d+) files", linted)
    if counted is None or int(counted[1]) != len(graph.modules):
        faults.append(f"the linter's graph is not the one of {len(graph.modules)} modules")
    print(f"layers: {len(seen)} modules in the linter's graph, {len(faults)} faults")
    return faults


def main(root: Path) -> int:
    """Lint the tree below `root`; 1 for a broken contract, 2 if a file was not read."""
    done = _lint(root)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n")
        return 1
    print(*re.findall(r"^.* KEPT$", done.stdout, re.MULTILINE), sep="\n")
    faults = _faults_of_graph(root, done.stdout)
    for fault in faults:
        print(fault)
    return 2 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT))
