"""Declared dependencies match imports, file by file; pure packages stay pure.

Reads syntax trees only, so it sees imports inside functions and behind TYPE_CHECKING. Does not
know the order of the layers: import-linter does (check_layers.py). Exits 1 listing every offender.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tree import (
    PACKAGES,
    PURE_PACKAGES,
    ROOT,
    Import,
    Manifest,
    imports_of,
    read_manifest,
    source_files,
    test_files,
)

# Import names that differ from the distribution that brings them.
DISTRIBUTIONS = {"aiter": "amd-aiter", "_pytest": "pytest"}
# Kernels that a machine brings or lacks. Nobody may declare them (an index has an unrelated project
# that is imported as `aiter`), and nobody may need them to be loaded.
FOUND_ON_MACHINE = {"model-ops-rocm": frozenset({"amd-aiter"})}
# Modules of kernels import their language when they are loaded; a test of the package shows that
# importing the package loads none of them.
KERNEL_MODULES = {
    "triton": frozenset(
        f"packages/model-ops-rocm/src/syncline/model_ops_rocm/triton/{name}"
        for name in ("kernels", "launch.py")
    )
}
ARRAY_LIBRARIES = frozenset({"torch", "numpy", "triton", "aiter"})
# Time, randomness and I/O are arguments of the pure packages, not imports.
CLOCKS_AND_IO = frozenset(
    {"asyncio", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets"}
    | {"shutil", "socket", "subprocess", "tempfile", "threading", "time", "uuid"}
)


def _distribution_of(found: Import) -> str:
    if found.top == "syncline":
        parts = found.module.split(".")
        return "-".join(parts[:2]).replace("_", "-")
    return DISTRIBUTIONS.get(found.top, found.top.replace("_", "-").lower())


def _is_standard(found: Import) -> bool:
    return found.top in sys.stdlib_module_names


def _where(found: Import) -> str:
    return f"{found.path}:{found.line}: imports {found.module}"


def _source_faults(root: Path, package: str, manifest: Manifest, found: Import) -> Iterator[str]:
    distribution = _distribution_of(found)
    if _is_standard(found) or distribution in manifest.required | {manifest.name}:
        return
    if distribution not in manifest.extras | FOUND_ON_MACHINE.get(package, frozenset()):
        yield f"{_where(found)}, but {manifest.name} does not declare {distribution}"
    elif not (found.is_lazy or _is_kernel_module(root, found)):
        yield f"{_where(found)} when loaded, but {distribution} may be absent: import it late"


def _is_kernel_module(root: Path, found: Import) -> bool:
    place = found.path.relative_to(root)
    allowed = KERNEL_MODULES.get(_distribution_of(found), frozenset())
    return any(part.as_posix() in allowed for part in (place, place.parent))


def _purity_faults(root: Path, package: str, found: Import) -> Iterator[str]:
    if package not in PURE_PACKAGES:
        return
    if found.top in ARRAY_LIBRARIES:
        yield f"{_where(found)}: {package} is pure Python"
    # A test helper may draw random numbers; what the engine runs may not.
    if (
        found.top in CLOCKS_AND_IO
        and "testing" not in found.path.relative_to(root).with_suffix("").parts
    ):
        yield f"{_where(found)}: time, randomness and I/O are arguments in {package}"


def _unused_faults(manifest: Manifest, imports: list[Import]) -> Iterator[str]:
    used = {_distribution_of(found) for found in imports}
    for name in sorted((manifest.required | manifest.extras) - used):
        yield f"{manifest.name} declares {name}, but no file of it imports that"


def _test_faults(manifest: Manifest, found: Import) -> Iterator[str]:
    if found.module == "syncline":
        return  # The bare namespace: nobody's.
    allowed = manifest.required | manifest.extras | manifest.for_tests | {manifest.name}
    if not _is_standard(found) and _distribution_of(found) not in allowed:
        yield f"{_where(found)}, but {manifest.name} declares it neither for itself nor for tests"


def check_package(root: Path, package: str) -> tuple[int, list[str]]:
    """The number of shipped files read, and what is wrong with their imports."""
    manifest = read_manifest(root, package)
    files = source_files(root, package)
    faults = [] if files else [f"packages/{package}/src holds no Python file"]
    if (root / "packages" / package / "src" / "syncline" / "__init__.py").exists():
        faults.append(f"{package} would own the namespace: remove src/syncline/__init__.py")
    imports = [found for path in files for found in imports_of(path)]
    for found in imports:
        faults += _source_faults(root, package, manifest, found)
        faults += _purity_faults(root, package, found)
    faults += _unused_faults(manifest, imports)
    for path in test_files(root, package):
        for found in imports_of(path):
            faults += _test_faults(manifest, found)
    return len(files), faults


def main(root: Path) -> int:
    """Check every package below `root`; 1 if anything is wrong."""
    folders = {path.name for path in (root / "packages").iterdir() if path.is_dir()}
    faults = [f"unknown or missing package: {name}" for name in folders ^ set(PACKAGES)]
    num_files = 0
    for package in PACKAGES:
        num_read, found = check_package(root, package)
        num_files += num_read
        faults += found
    for fault in faults:
        print(fault)
    print(f"imports: {num_files} source files read, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT))
