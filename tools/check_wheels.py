"""Each wheel given by path holds its portion of the namespace, its types, its licence, its data.

Knows what a wheel must and must not contain; says nothing of what the code does.
"""

import sys
import zipfile
from pathlib import Path, PurePosixPath

CHECKPOINT_SUFFIXES = frozenset({".json", ".safetensors"})


def faults_of(wheel: Path) -> list[str]:
    """What is missing in one wheel, or must not be there."""
    portion = wheel.name.split("-")[0].removeprefix("syncline_")
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist()]
    faults = []
    package = PurePosixPath("syncline", portion)
    for needed in ("__init__.py", "py.typed", "errors.py"):
        if package / needed not in names:
            faults.append(f"{wheel.name}: {package / needed} is missing")
    for name in names:
        if not name.is_relative_to(package) and not name.parts[0].endswith(".dist-info"):
            faults.append(f"{wheel.name}: {name} is outside {package}")
    if not any(name.name == "LICENSE" for name in names):
        faults.append(f"{wheel.name}: no LICENSE")
    if portion == "engine":
        shipped = {n.suffix for n in names if n.is_relative_to(package / "checkpoints")}
        if not shipped >= CHECKPOINT_SUFFIXES:
            faults.append(f"{wheel.name}: its checkpoints hold only {sorted(shipped)}")
    return faults


def main(wheels: list[Path]) -> int:
    """1 if a wheel is wrong, or if none was given."""
    faults = [fault for wheel in wheels for fault in faults_of(wheel)]
    for fault in faults:
        print(fault)
    print(f"wheels: {len(wheels)} read, {len(faults)} faults")
    return 1 if faults or not wheels else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
