"""The commands of the repository: what CI runs, and what a newcomer runs.

`nox` alone runs lint, types, layers, tests, kernels and isolated; `nox -l` lists the rest. Knows no
package from the inside: it prepares environments and calls tools. Packages are installed by pip
under constraints.txt. PyTorch is installed once, into .nox/environments/torch-base; the
environments that need it are laid over that one by a .pth file, so each holds only what it adds.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nox

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools"))
from manifests import project, requirements_of_tests, siblings, third_parties  # noqa: E402 - its folder
from tree import PACKAGES, PURE_PACKAGES, import_name  # noqa: E402 - comes from the line above

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "layers", "tests", "kernels", "isolated"]

CONSTRAINTS = str(ROOT / "constraints.txt")
ENVIRONMENTS = ROOT / ".nox" / "environments"
NOT_ON_CPU = "not gpu and not rocm"
# The tensors of tests are small: more threads than one only wait for each other.
TEST_ENV = {"OMP_NUM_THREADS": "1"}
SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")
# Raised when the way environments are made changes, so that old ones are made again.
RECIPE = 1
# Compiling each installed module in advance takes longer than every session's imports.
INSTALL = ("--quiet", "--no-compile", "--constraint", CONSTRAINTS)
PIP_INSTALL = ("install", *INSTALL)

# A developer's PYTHONPATH would let a session import what it did not install.
os.environ.pop("PYTHONPATH", None)
# What was not compiled at installation is compiled at first import, and kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    PIP_DISABLE_PIP_VERSION_CHECK="1",
    TOKENIZERS_PARALLELISM="false",
)
# Threads that spin while they wait take the cores from whoever else is at work on the machine:
# with two busy cores the demo was measured six times slower. A value already set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# --- environments ---------------------------------------------------------------------------------


def _python(environment: Path) -> str:
    folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return str(environment / folder / name)


def _site_packages(environment: Path) -> Path:
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run(
        [_python(environment), "-c", query], check=True, capture_output=True, text=True
    )
    return Path(done.stdout.strip())


def _create(session: nox.Session, environment: Path, *, over: Path | None = None) -> str:
    """Make an empty environment, laid over another one's packages if asked; return its Python."""
    shutil.rmtree(environment, ignore_errors=True)
    session.run(
        *(sys.executable, "-m", "virtualenv", "--quiet", "--python", sys.executable),
        str(environment),
        external=True,
    )
    if over is not None:
        pth = _site_packages(environment) / "_torch_base.pth"
        pth.write_text(f"{_site_packages(over)}\n", "utf-8")
    return _python(environment)


def _pip(session: nox.Session, python: str, *args: str) -> None:
    session.run(python, "-m", "pip", *args, external=True)


def _pip_offline(session: nox.Session, python: str, *args: str) -> None:
    """Install from the wheels of `wheelhouse` and from paths: no name of ours meets an index."""
    offline = ("--no-index", "--find-links", str(ENVIRONMENTS / "wheelhouse"))
    _pip(session, python, *PIP_INSTALL, *offline, *args)


@contextlib.contextmanager
def _built_once(environment: Path, *inputs: Path) -> Iterator[bool]:
    """Yield whether `environment` must be built; stamp it once the body has succeeded."""
    digest = hashlib.sha256(f"{RECIPE} {sys.version}".encode())
    for path in inputs:
        digest.update(path.read_bytes())
    stamp = environment / "built-from.txt"
    if stamp.is_file() and stamp.read_text("utf-8") == digest.hexdigest():
        yield False
        return
    yield True
    stamp.write_text(digest.hexdigest(), "utf-8")


def torch_base(session: nox.Session) -> Path:
    """PyTorch and nothing else: the base of every environment that needs it."""
    environment = ENVIRONMENTS / "torch-base"
    with _built_once(environment, Path(CONSTRAINTS)) as is_stale:
        if is_stale:
            session.log("installing PyTorch, once for this clone: the longest part of the set-up")
            _pip(session, _create(session, environment), *PIP_INSTALL, "torch")
    return environment


def wheelhouse(session: nox.Session, base: Path) -> None:
    """Fetch every other wheel once; the environments are then made without an index."""
    folder = ENVIRONMENTS / "wheelhouse"
    manifests = [project(package) / "pyproject.toml" for package in PACKAGES]
    with _built_once(folder, Path(CONSTRAINTS), *manifests) as is_stale:
        if is_stale:
            shutil.rmtree(folder, ignore_errors=True)
            fetch = ("download", "--quiet", "--dest", str(folder), "--constraint", CONSTRAINTS)
            _pip(session, _python(base), *fetch, "hatchling", "editables", *third_parties())


def shared_environment(session: nox.Session) -> Path:
    """The six packages, editable, with what their tests need: demo, tests, types and bench."""
    base = torch_base(session)
    wheelhouse(session, base)
    environment = ENVIRONMENTS / "torch"
    manifests = [project(package) / "pyproject.toml" for package in PACKAGES]
    with _built_once(environment, Path(CONSTRAINTS), *manifests) as is_stale:
        if is_stale:
            python = _create(session, environment, over=base)
            _pip_offline(session, python, "hatchling", "editables", *third_parties())
            # Without build isolation: one pip call, no build environment per package.
            editable = [part for package in PACKAGES for part in ("-e", str(project(package)))]
            _pip_offline(session, python, "--no-build-isolation", *editable)
            _pip(session, python, "check")
    return environment


# --- the newcomer's two commands ------------------------------------------------------------------


@nox.session(venv_backend="none", default=False)
def demo(session: nox.Session) -> None:
    """The main job: a colocated RL run on the CPU; arguments after -- go to `syncline demo`."""
    python = _python(shared_environment(session))
    session.run(python, "-m", "syncline.engine", "demo", *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every package's tests and those across packages; arguments after -- go to pytest."""
    python = _python(shared_environment(session))
    session.log(f"deselected here, run by the gpu session: every test but `{NOT_ON_CPU}`")
    pytest = (python, "-m", "pytest", "-m", NOT_ON_CPU, *SIDE_BY_SIDE, *session.posargs)
    session.run(*pytest, env=TEST_ENV, external=True)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Faults put into a copy of the pure packages, one by one; -- NAME... selects, -- --list."""
    session.install(*INSTALL, "pytest", "hypothesis")
    session.run("python", "tools/mutants.py", *session.posargs)


@nox.session(venv_backend="none")
def kernels(session: nox.Session) -> None:
    """Triton's kernels: compiled for each GPU without one, then interpreted; -- --update."""
    if sys.platform != "linux":
        session.skip("Triton is published for Linux alone")
    base = torch_base(session)
    wheelhouse(session, base)
    environment = ENVIRONMENTS / "kernels"
    package = project("model-ops-rocm")
    with _built_once(environment, Path(CONSTRAINTS), package / "pyproject.toml") as is_stale:
        if is_stale:
            python = _create(session, environment, over=base)
            needed = ("hatchling", "editables", *requirements_of_tests("model-ops-rocm"))
            _pip_offline(session, python, *needed)
            _pip_offline(session, python, "--no-build-isolation", "-e", str(package))
            _pip(session, python, *PIP_INSTALL, "triton")
    python = _python(environment)
    session.run(python, "tools/compile_kernels.py", *session.posargs, external=True)
    for kind, flag in (("refusals", "0"), ("choices", "0"), ("interpreter", "1")):
        found = map(str, sorted((package / "tests").glob(f"test_triton_{kind}*.py")))
        environ = TEST_ENV | {"TRITON_INTERPRET": flag}
        session.run(python, "-m", "pytest", "-q", *SIDE_BY_SIDE, *found, env=environ, external=True)


# --- checks ---------------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and format, and the rules of the source that ruff has no name for."""
    session.install(*INSTALL, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/check_source.py")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy strict, once per package; pyright strict on the pure packages."""
    environment = shared_environment(session)
    session.install(*INSTALL, "mypy", "pyright[nodejs]")
    python = _python(environment)
    for package in PACKAGES:
        _mypy(session, python, [project(package) / "src", project(package) / "tests"])
    _mypy(session, python, [ROOT / "conftest.py", ROOT / "tools", ROOT / "tests"])
    _mypy(session, sys.executable, [ROOT / "noxfile.py"])
    _pyright(session, environment)


def _mypy(session: nox.Session, python: str, paths: list[Path]) -> None:
    # One call per package: test modules of two packages may bear the same name. The folders of
    # loose modules are search paths, so that those modules import one another as they do when run.
    loose = [str(path) for path in (*paths, ROOT / "tools") if path.name in {"tests", "tools"}]
    output = session.run(
        *("mypy", "--python-executable", python, *map(str, paths)),
        env={"MYPYPATH": os.pathsep.join(loose)},
        silent=True,
    )
    session.log(str(output).strip())
    if f" in {_count_sources(paths)} source file" not in str(output):
        session.error(f"mypy did not analyse all {_count_sources(paths)} files of {paths}")


def _pyright(session: nox.Session, environment: Path) -> None:
    output = session.run(
        *("pyright", "--pythonpath", _python(environment), "--outputjson"),
        silent=True,
        success_codes=[0, 1],
        stderr=subprocess.DEVNULL,
    )
    report = json.loads(str(output))
    for found in report["generalDiagnostics"]:
        line = found["range"]["start"]["line"] + 1
        session.warn(f"{found['file']}:{line}: {found['severity']}: {found['message']}")
    paths = [project(name) / part for name in PURE_PACKAGES for part in ("src", "tests")]
    summary = report["summary"]
    session.log(f"pyright: {summary['filesAnalyzed']} files, {summary['errorCount']} errors")
    if summary["errorCount"] or summary["warningCount"]:
        session.error("pyright found errors in the pure packages")
    # A pattern that matches no file makes pyright exit 0: a green gate that checks nothing.
    if summary["filesAnalyzed"] != _count_sources(paths):
        session.error(f"pyright did not analyse all {_count_sources(paths)} files of {paths}")


def _count_sources(paths: list[Path]) -> int:
    return sum(1 if path.is_file() else len(list(path.rglob("*.py"))) for path in paths)


@nox.session
def layers(session: nox.Session) -> None:
    """Imports point downwards and match what is declared; the check proves itself by seeds."""
    session.install(*INSTALL, "import-linter")
    session.run("python", "tools/check_imports.py")
    session.run("python", "tools/check_layers.py")
    session.run("python", "tools/check_seeds.py")


# --- wheels ---------------------------------------------------------------------------------------


def _build(session: nox.Session, package: str, folder: Path, *targets: str) -> list[Path]:
    options = [part for target in targets for part in ("-t", target)]
    with session.chdir(project(package)):
        session.run(
            *("python", "-m", "hatchling", "build", *options, "-d", str(folder)), silent=True
        )
    distribution = f"syncline_{package.replace('-', '_')}-"
    return sorted(path for path in folder.iterdir() if path.name.startswith(distribution))


@nox.session
def isolated(session: nox.Session) -> None:
    """Each package's wheel, in an environment of its own, passes its own tests."""
    base = torch_base(session)
    wheelhouse(session, base)
    session.install(*INSTALL, "hatchling")
    chosen = session.posargs or list(PACKAGES)
    with tempfile.TemporaryDirectory(prefix="isolated-") as name:
        scratch = Path(name)
        wheels = {package: _build_wheel(session, package, scratch) for package in PACKAGES}
        for package in chosen:
            session.log(f"--- {package}: its wheel alone")
            _try_wheel(session, package, wheels, scratch, base)


def _build_wheel(session: nox.Session, package: str, scratch: Path) -> Path:
    folder = scratch / "wheels" / package
    folder.mkdir(parents=True)
    (wheel,) = _build(session, package, folder, "wheel")
    return wheel


def _try_wheel(
    session: nox.Session, package: str, wheels: dict[str, Path], scratch: Path, base: Path
) -> None:
    is_pure = package in PURE_PACKAGES
    python = _create(session, scratch / f"env-{package}", over=None if is_pure else base)
    ours = [package, *siblings(package)]
    _pip_offline(session, python, *(str(wheels[name]) for name in ours))
    _pip(session, python, "check")
    room = _lay_tests(package, scratch)
    with session.chdir(room):
        probe = [python, "-I", str(ROOT / "tools" / "check_installed.py"), import_name(package)]
        bare = ["--bare"] if is_pure else []
        session.run(*probe, *bare, "--from-files", *map(import_name, ours), external=True)
        _pip_offline(session, python, *requirements_of_tests(package))
        pytest = (python, "-m", "pytest", "-q", "-m", NOT_ON_CPU, *SIDE_BY_SIDE, "packages")
        session.run(*pytest, env=TEST_ENV, external=True)
    shutil.rmtree(scratch / f"env-{package}")


def _lay_tests(package: str, scratch: Path) -> Path:
    """Copy a package to where no source tree is in reach, all but its sources; its configuration.

    The folders are those of the repository, so a test finds its README where it always does.
    """
    room = scratch / f"room-{package}"
    unwanted = shutil.ignore_patterns("src", "__pycache__")
    shutil.copytree(project(package), room / "packages" / package, ignore=unwanted)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, room / name)
    return room


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Sdist and wheel of every package, checked by twine; one package by `hatch build` too."""
    session.install(*INSTALL, "hatchling", "twine", "hatch")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    found: list[Path] = []
    for package in PACKAGES:
        (ROOT / "dist").mkdir(exist_ok=True)
        built = _build(session, package, ROOT / "dist", "sdist", "wheel")
        if sorted(path.suffix for path in built) != [".gz", ".whl"]:
            session.error(f"{package}: expected an sdist and a wheel, got {built}")
        found += built
    session.run("twine", "check", "--strict", *map(str, found))
    session.run("python", "tools/check_wheels.py", *(str(p) for p in found if p.suffix == ".whl"))
    with session.chdir(project(PACKAGES[0])), tempfile.TemporaryDirectory() as folder:
        session.run("hatch", "build", folder)


# --- measurements and accelerators ----------------------------------------------------------------


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Scheduler and rollout speed on this CPU; after --, one of their names or gpu, and options."""
    chosen = [name for name in ("scheduler", "rollout", "gpu") if name in session.posargs]
    options = [part for part in session.posargs if part not in chosen]
    if "gpu" in chosen:
        python = str(ROOT / ".nox" / "gpu" / "bin" / "python")  # made by the session gpu
        tools = {"PYTHONPATH": str(ROOT / "tools")}
        session.run(python, "-m", "bench_gpu", *options, env=tools, external=True)
        return
    python = _python(shared_environment(session))
    # A measurement has the machine to itself: threads may spin, as they do by default.
    quiet = {"OMP_WAIT_POLICY": None}
    for name in chosen or ("scheduler", "rollout"):
        session.run(python, f"tools/bench_{name}.py", *options, env=quiet, external=True)


@nox.session(default=False, venv_params=["--system-site-packages"])
def gpu(session: nox.Session) -> None:
    """The tests marked gpu or rocm, on a machine that has one; takes the PyTorch found there."""
    pins = _pins_beside_the_torch_found(session)
    session.install("--quiet", "-c", pins, "hatchling", "editables", *third_parties())
    editable = [part for package in PACKAGES for part in ("-e", str(project(package)))]
    session.install("--quiet", "-c", pins, "--no-build-isolation", *editable)
    session.run("python", "tools/check_gpu.py")
    session.run("pytest", "-m", "gpu or rocm", *session.posargs)


def _pins_beside_the_torch_found(session: nox.Session) -> str:
    # A ROCm machine brings its own PyTorch, which no index replaces: only its range is asked for.
    query = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    if "True" not in str(session.run("python", "-c", query, silent=True)):
        return CONSTRAINTS
    pins = Path(session.create_tmp()) / "constraints-without-torch.txt"
    lines = Path(CONSTRAINTS).read_text("utf-8").splitlines()
    pins.write_text(
        "\n".join(line for line in lines if not line.startswith(("torch==", "triton=="))), "utf-8"
    )
    return str(pins)
