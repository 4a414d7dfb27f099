"""What is imported is what a wheel installed, and importing it needs no accelerator.

Run by the Python of the environment under trial, with -I and from outside the source tree:
    check_installed.py [--bare] MODULE --from-files MODULE...
With --bare, the environment holds nothing beside our own portions.
"""

import argparse
import importlib
import json
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution, distributions
from pathlib import Path

DEVICE_COMPILERS = frozenset({"triton", "aiter"})
INSTALLERS = frozenset({"pip", "setuptools", "wheel"})


class _Absent(MetaPathFinder):
    """Makes the device compilers absent, whatever PyTorch brought along."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in DEVICE_COMPILERS:
            raise ModuleNotFoundError(f"{fullname} is made absent here", name=fullname)
        return None


def _require(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"check_installed: {what}")


def _require_installed(module: str) -> None:
    """The distribution came from a file, and its portion is read from site-packages."""
    name = module.replace(".", "-").replace("_", "-")
    origin = distribution(name).read_text("direct_url.json")
    _require(origin is not None, f"{name} came from an index, not from a wheel given by path")
    url = json.loads(str(origin))["url"]
    _require(url.startswith("file://") and url.endswith(".whl"), f"{name} came from {url}")
    imported = importlib.import_module(module)
    place = Path(str(imported.__file__)).resolve()
    purelib = Path(sysconfig.get_path("purelib")).resolve()
    _require(place.is_relative_to(purelib), f"{module} is imported from {place}")
    _require((place.parent / "py.typed").is_file(), f"{module} ships no py.typed")


def main() -> None:
    """Exit with a message at the first thing that is not as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--from-files", nargs="+", required=True)
    chosen = parser.parse_args()
    sys.meta_path.insert(0, _Absent())
    ours = {name.replace(".", "-").replace("_", "-") for name in chosen.from_files}
    if chosen.bare:
        names = {found.metadata["Name"].lower() for found in distributions()}
        _require(names - INSTALLERS == ours, f"not a bare environment: {sorted(names)}")
    for module in [chosen.module, *chosen.from_files]:
        _require_installed(module)
    loaded = sorted(DEVICE_COMPILERS & set(sys.modules))
    _require(not loaded, f"importing {chosen.module} loaded {loaded}")
    print(f"{chosen.module}: imported from its wheel, no Triton, no AITER, bare={chosen.bare}")


if __name__ == "__main__":
    main()
