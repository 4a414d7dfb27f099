"""What the packages of this repository ask of an index and of one another, for the sessions of nox.

Knows no session and installs nothing.
"""

import tomllib
from pathlib import Path
from typing import Any  # TOML, read where it is used

from tree import PACKAGES, ROOT


def project(package: str) -> Path:
    return ROOT / "packages" / package


def manifest(package: str) -> dict[str, Any]:  # Any: TOML, read where it is used
    return tomllib.loads((project(package) / "pyproject.toml").read_text("utf-8"))


def requirements_of_tests(package: str) -> list[str]:
    return list(manifest(package)["dependency-groups"]["test"])


def siblings(package: str) -> list[str]:
    """The packages of this repository that `package` declares, itself left out."""
    declared = " ".join(manifest(package)["project"]["dependencies"])
    return [name for name in PACKAGES if f"syncline-{name}>" in declared]


def third_parties() -> list[str]:
    """What the packages and their tests ask of an index, PyTorch left out."""
    lines = {line for name in PACKAGES for line in manifest(name)["project"]["dependencies"]}
    lines |= {line for name in PACKAGES for line in requirements_of_tests(name)}
    return sorted(line for line in lines if not line.startswith(("syncline-", "torch")))
