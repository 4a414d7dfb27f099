"""What every package of the repository must be alike in; knows nothing of what one does."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ERROR_BASES = {
    "kv-cache": "KVCacheError",
    "scheduler-core": "SchedulerError",
    "model-ops-rocm": "OpError",
    "graph-lifecycle": "GraphError",
    "weight-sync": "WeightSyncError",
    "engine": "EngineError",
}
PACKAGES = tuple(ERROR_BASES)
every_package = pytest.mark.parametrize("package", PACKAGES)


def _module(package: str) -> str:
    return "syncline." + package.replace("-", "_")


def _project(package: str) -> dict[str, Any]:  # Any: TOML
    text = (ROOT / "packages" / package / "pyproject.toml").read_text("utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]  # Any: TOML
    return project


def test_the_folder_holds_these_packages_and_no_other() -> None:
    found = {path.name for path in (ROOT / "packages").iterdir() if path.is_dir()}
    assert found == set(PACKAGES)


def test_nobody_owns_the_namespace() -> None:
    assert list((ROOT / "packages").glob("*/src/syncline/*.py")) == []


@every_package
def test_a_package_is_named_after_its_folder_and_brings_what_it_must(package: str) -> None:
    folder = ROOT / "packages" / package
    project = _project(package)
    assert project["name"] == f"syncline-{package}"
    assert project["requires-python"] == ">=3.11"
    assert (folder / "src" / _module(package).replace(".", "/") / "py.typed").is_file()
    assert f"[{project['version']}]" in (folder / "CHANGELOG.md").read_text("utf-8")
    assert (folder / "LICENSE").read_text("utf-8") == (ROOT / "LICENSE").read_text("utf-8")
    readme = (folder / "README.md").read_text("utf-8")
    assert f"# syncline-{package}" in readme
    assert "does not do" in readme


@every_package
def test_siblings_are_declared_by_a_range_of_minor_versions(package: str) -> None:
    siblings = [line for line in _project(package)["dependencies"] if line.startswith("syncline")]
    assert all(line.endswith(">=0.1,<0.2") for line in siblings)


@every_package
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(_module(package))
    names: list[str] = module.__all__
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


@every_package
def test_a_package_has_one_base_of_errors_and_all_are_public(package: str) -> None:
    errors = importlib.import_module(f"{_module(package)}.errors")
    public = importlib.import_module(_module(package))
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__ == errors.__name__
    ]
    base = getattr(errors, ERROR_BASES[package])
    assert [found.__name__ for found in classes if not issubclass(found, base)] == []
    assert [found.__name__ for found in classes if found.__name__ not in public.__all__] == []
    assert base.__name__ in str(errors.__doc__), "the tree is drawn at the top of errors.py"


def _loaded_by_importing(*modules: str) -> set[str]:
    script = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_pure_packages_load_no_third_party() -> None:
    loaded = _loaded_by_importing("syncline.kv_cache", "syncline.scheduler_core")
    bare = _loaded_by_importing("sys")
    third_parties = loaded - bare - set(sys.stdlib_module_names) - {"syncline"}
    assert third_parties == set()


def test_importing_every_package_loads_no_device_compiler() -> None:
    # PyTorch may look for one of its own accord, so only what comes on top of it counts.
    loaded = _loaded_by_importing(*map(_module, PACKAGES)) - _loaded_by_importing("torch")
    assert loaded & {"triton", "aiter"} == set()
