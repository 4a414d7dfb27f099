"""Whether AITER is installed, by the name of its distribution; imports nothing of it.

Unit: one environment. Two distributions are imported as `aiter`: AMD's is `amd-aiter`, and `aiter`
on the registry is an asyncio library that has nothing to do with it.
"""

import importlib.metadata
import re
from typing import Final

PACKAGE: Final = "amd-aiter"
UNRELATED: Final = "aiter"
MINIMUM: Final = (0, 1, 21)
VERSION: Final = ">=0.1.21 (ROCm/aiter e4048607a)"
# What a build says that found no tag to count from; the signatures alone tell what it is.
UNKNOWN_VERSION: Final = "0.1.0"


def installed_version(package: str = PACKAGE) -> str | None:
    """The version of a distribution, None if there is none of that name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_installed() -> str | None:
    """None if a usable `amd-aiter` is installed, else the reason in one line."""
    version, unrelated = installed_version(), installed_version(UNRELATED)
    if unrelated is not None:
        other = f"distribution {UNRELATED} {unrelated} is an unrelated library"
        if version is None:
            return f"distribution {PACKAGE} is not installed; {other} of the same import name"
        return f"{other} that shares the import name of {PACKAGE} {version}: uninstall it"
    if version is None:
        return f"distribution {PACKAGE} is not installed"
    if version != UNKNOWN_VERSION and release_of(version) < MINIMUM:
        oldest = ".".join(map(str, MINIMUM))
        return f"{PACKAGE} {version} is installed, older than {oldest}"
    return None


def release_of(version: str) -> tuple[int, ...]:
    """(0, 1, 22) of `0.1.22.dev3+rocm7.2`: a development version counts as what it becomes."""
    match = re.match(r"\d+(\.\d+)*", version)
    return () if match is None else tuple(int(part) for part in match[0].split("."))
