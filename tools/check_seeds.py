"""The checks of imports and layers can see: each must fail on a copy with a fault planted in it.

Every seed is a line added to one module of a temporary copy. A seed that leaves the imports of
that module as they were (inside a docstring, say) is itself an error.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tree import PACKAGES, ROOT, imports_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A fault: the line planted at the end of a module, and the checks that must object."""

    what: str
    module: str
    line: str
    checks: tuple[str, ...]


LAYERS, IMPORTS = "check_layers.py", "check_imports.py"
SEEDS = (
    Seed(
        what="an upward import",
        module="kv-cache/src/syncline/kv_cache/block_pool.py",
        line="import syncline.scheduler_core",
        checks=(LAYERS, IMPORTS),
    ),
    Seed(
        what="an upward import inside a function",
        module="scheduler-core/src/syncline/scheduler_core/sequence.py",
        line="def _seed() -> None:\n    from syncline.engine import LLM",
        checks=(LAYERS, IMPORTS),
    ),
    Seed(
        what="a sibling's import",
        module="weight-sync/src/syncline/weight_sync/__init__.py",
        line="import syncline.model_ops_rocm",
        checks=(LAYERS, IMPORTS),
    ),
    Seed(
        what="torch in a pure package",
        module="kv-cache/src/syncline/kv_cache/errors.py",
        line="import torch",
        checks=(LAYERS, IMPORTS),
    ),
    Seed(
        what="numpy by its name in a pure package",
        module="scheduler-core/src/syncline/scheduler_core/errors.py",
        line='import importlib\nimportlib.import_module("numpy")',
        checks=(IMPORTS,),
    ),
    Seed(
        what="a clock in a pure package",
        module="scheduler-core/src/syncline/scheduler_core/sequence.py",
        line="from time import monotonic",
        checks=(IMPORTS,),
    ),
    Seed(
        what="an undeclared dependency",
        module="graph-lifecycle/src/syncline/graph_lifecycle/__init__.py",
        line="import safetensors",
        checks=(IMPORTS,),
    ),
)


def _copy(root: Path, copy: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "checkpoints")
    for package in PACKAGES:
        shutil.copytree(root / "packages" / package, copy / "packages" / package, ignore=ignored)
    shutil.copy(root / "pyproject.toml", copy / "pyproject.toml")


def _run(check: str, copy: Path) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parent / check
    return subprocess.run(
        [sys.executable, str(script), str(copy)], capture_output=True, text=True, check=False
    )


def _faults(seed: Seed, copy: Path) -> list[str]:
    path = copy / "packages" / seed.module
    original = path.read_text("utf-8")
    before = [found.module for found in imports_of(path)]
    path.write_text(f"{original}\n{seed.line}\n", "utf-8")
    if [found.module for found in imports_of(path)] == before:
        return [f"{seed.what}: the seed did not change the imports of {seed.module}"]
    done = {check: _run(check, copy) for check in seed.checks}
    path.write_text(original, "utf-8")
    # A crash also exits 1; the linter's verdict or the offending path must be in what it printed.
    return [
        f"{seed.what}: {check} did not object\n{run.stdout}{run.stderr}"
        for check, run in done.items()
        if run.returncode != 1 or ("BROKEN" not in run.stdout and path.name not in run.stdout)
    ]


def main() -> int:
    """Plant each seed in turn; 1 if a clean copy fails or a planted one passes."""
    with tempfile.TemporaryDirectory(prefix="seeds-") as name:
        copy = Path(name).resolve()
        _copy(ROOT, copy)
        faults = [
            f"{check} fails on the clean copy:\n{done.stdout}{done.stderr}"
            for check in (LAYERS, IMPORTS)
            if (done := _run(check, copy)).returncode != 0
        ]
        for seed in SEEDS:
            faults += _faults(seed, copy)
    for fault in faults:
        print(fault)
    print(f"seeds: {len(SEEDS)} planted, {len(faults)} faults of the checks")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
