"""What the repository's checks know of its tree: packages, manifests, source files, imports.

Knows no rule: the checks beside it do. Every function takes the root, so that a check can be
pointed at a copy. Standard library only.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.resolve()
# From the bottom layer to the top.
PACKAGES = (
    "kv-cache",
    "scheduler-core",
    "model-ops-rocm",
    "graph-lifecycle",
    "weight-sync",
    "engine",
)
PURE_PACKAGES = ("kv-cache", "scheduler-core")
LOADERS = frozenset({"import_module", "importorskip", "__import__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module: dotted name, where, and whether only a call brings it in."""

    module: str
    path: Path
    line: int
    is_lazy: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The distribution names a package declares, normalised: required, by extra, for tests."""

    name: str
    required: frozenset[str]
    extras: frozenset[str]
    for_tests: frozenset[str]


def import_name(package: str) -> str:
    """The portion of the namespace that a package folder holds."""
    return "syncline." + package.replace("-", "_")


def source_files(root: Path, package: str) -> list[Path]:
    """Every Python file that the package ships, in order of path."""
    return sorted((root / "packages" / package / "src").rglob("*.py"))


def test_files(root: Path, package: str) -> list[Path]:
    """Every Python file of the package's tests, in order of path."""
    return sorted((root / "packages" / package / "tests").rglob("*.py"))


def read_manifest(root: Path, package: str) -> Manifest:
    """Read what the package's pyproject.toml declares; KeyError if a table is missing."""
    text = (root / "packages" / package / "pyproject.toml").read_text("utf-8")
    content = tomllib.loads(text)
    project = content["project"]
    extras = project.get("optional-dependencies", {})
    return Manifest(
        name=project["name"],
        required=frozenset(map(_distribution, project["dependencies"])),
        extras=frozenset(_distribution(line) for lines in extras.values() for line in lines),
        for_tests=frozenset(map(_distribution, content["dependency-groups"]["test"])),
    )


def _distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def imports_of(path: Path) -> list[Import]:
    """Every import of one file, those inside functions and by literal name included."""
    tree = ast.parse(path.read_text("utf-8"), filename=str(path))
    return [
        Import(module=module, path=path, line=line, is_lazy=is_lazy)
        for node, is_lazy in _walk(tree, is_lazy=False)
        for module, line in _modules_named(node)
    ]


def _walk(node: ast.AST, *, is_lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, is_lazy
    inside_call = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, is_lazy=inside_call)


def _modules_named(node: ast.AST) -> Iterator[tuple[str, int]]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield alias.name, node.lineno
        case ast.ImportFrom(module="syncline", names=names, level=0):
            for alias in names:
                yield f"syncline.{alias.name}", node.lineno
        case ast.ImportFrom(module=str(module), level=0):
            yield module, node.lineno
        case ast.Call(
            func=ast.Attribute(attr=called) | ast.Name(id=called),
            args=[ast.Constant(value=str(module)), *_],
        ) if called in LOADERS:
            yield module, node.lineno
        case _:
            return
