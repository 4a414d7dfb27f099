"""Compiles every Triton kernel for every architecture without a GPU, and judges the code.

    python tools/compile_kernels.py              compare with the table and with the document
    python tools/compile_kernels.py --update     write both anew, when what changed is meant
    python tools/compile_kernels.py --only kv    one family of ops, and nothing of the document

Each launch goes through its op's own wrapper. A spill, open or into accumulators; a narrow load
where a wide one is meant; too much shared memory; a lower occupancy or another instruction than the
table expects; matrix instructions of other operands than the op's rules name; a row of the
configuration tables that nothing compiles, or a call with another number of tokens that would
compile once more: each is a fault. Nothing runs, so nothing here says anything about speed.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final, cast

from tree import ROOT

ARCHS: Final = ("gfx942", "gfx950", "sm_90")
EXPECTED: Final = ROOT / "tools" / "expected_kernels"  # a file for each op
DOCUMENT: Final = ROOT / "docs" / "kernels-static.md"
# Other numbers of tokens than the ones compiled for: none of them may compile anything.
OTHER_TOKENS: Final = (1, 2, 17, 40, 257)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One compiled kernel, in plain values: it crosses from the process that compiled it."""

    name: str  # arch/op/dtype/bucket/variant, and which of the call's kernels if it has several
    config: str
    facts: dict[str, object]
    expected: dict[str, object]  # the exact instructions, and the occupancy as a floor
    faults: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One family of ops for one architecture: what one process compiles at a time."""

    arch: str
    family: str


def compile_part(part: Part) -> tuple[list[Row], list[str], set[object]]:
    """Every row of the part, what is wrong beyond a row, and the configurations that it used."""
    from kernel_families import launches_for

    from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
    from syncline.model_ops_rocm.triton import BACKEND
    from syncline.model_ops_rocm.triton.launch import LAUNCHER

    ops = cast(dict[str, Callable[..., object]], BACKEND.load())
    rows: list[Row] = []
    used: set[object] = set()
    with stand_in_driver(part.arch):
        for launch in launches_for(part.arch, part.family):
            with LAUNCHER.compiling() as compiled:
                ops[launch.key.op](**launch.arguments)
            used |= {one.key for one in compiled}
            for index, one in enumerate(compiled):
                suffix = f"/{index}" if len(compiled) > 1 else ""
                rows.append(_row(f"{part.arch}/{launch.name}{suffix}", one))
        faults = list(_recompiled(part.arch, part.family, ops))
    return rows, faults, used


def _unused(used: set[object]) -> Iterator[str]:
    """Rows of the configuration tables that no launch of any family compiles."""
    from syncline.model_ops_rocm.triton.configs import CONFIGS

    for key in CONFIGS:
        if key not in used:
            yield f"{key.arch}: nothing compiles the configuration {key}"


def _recompiled(arch: str, family: str, ops: dict[str, Callable[..., object]]) -> Iterator[str]:
    import torch
    from kernel_families import launches_for

    from syncline.model_ops_rocm import NotPreparedError
    from syncline.model_ops_rocm.triton.launch import LAUNCHER

    for num_tokens in OTHER_TOKENS:
        for launch in launches_for(arch, family, num_tokens):
            try:
                with LAUNCHER.sealed(), LAUNCHER.compiling(is_preparing=False):
                    ops[launch.key.op](**launch.arguments)
            except NotPreparedError:
                yield f"{arch}/{launch.name}: {num_tokens} tokens compile it once more"
    unknown = torch.empty(1, 2 * 96, device="meta")
    try:
        with LAUNCHER.sealed(), LAUNCHER.compiling():
            ops["silu_and_mul"](unknown)
    except NotPreparedError:
        return
    yield f"{arch}: a width that nothing was compiled for was not refused: the check is blind"


def _row(name: str, one: object) -> Row:
    from kernel_code import read_code
    from kernel_families import rules_of
    from kernel_families.judge import faults_of

    from syncline.model_ops_rocm.triton.launch import CompiledLaunch

    assert isinstance(one, CompiledLaunch)
    facts = read_code(one.binary)
    faults = faults_of(facts, rules_of(one.key.op), one.key, str(one.binary.metadata.name))
    constants = " ".join(f"{key} {value}" for key, value in one.config.constants.items())
    programs = f"clusters of {one.config.num_ctas}, " if one.config.num_ctas > 1 else ""
    return Row(
        name=name,
        config=f"{one.config.num_warps} warps, {programs}{constants}",
        facts=asdict(facts),
        expected={
            "loads": sorted(facts.loads),
            "stores": sorted(facts.stores),
            "matrix": sorted(facts.matrix),
            "occupancy": facts.occupancy,
        },
        faults=[f"{name}: {fault}" for fault in faults],
    )


def _op_of(name: str) -> str:
    return name.split("/")[1]


def _write_expected(rows: list[Row], only: str | None) -> None:
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(_op_of(row.name), []).append(row)
    if only is None:
        for path in EXPECTED.glob("*.json"):
            path.unlink()
    for op, found in by_op.items():
        lines = [f"  {json.dumps(row.name)}: {json.dumps(row.expected)}" for row in found]
        (EXPECTED / f"{op}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _unexpected(rows: list[Row], only: str | None) -> Iterator[str]:
    found = {row.name: row.expected for row in rows}
    ops = {_op_of(name) for name in found}
    expected: dict[str, dict[str, object]] = {}
    for path in sorted(EXPECTED.glob("*.json")):
        if only is None or path.stem in ops:
            expected |= json.loads(path.read_text("utf-8"))
    for name in sorted(expected.keys() | found.keys()):
        wanted, got = expected.get(name), found.get(name)
        if wanted is None or got is None or not _is_met(wanted, got):
            yield f"{name}: expected {wanted}, found {got}"


def _is_met(wanted: dict[str, object], got: dict[str, object]) -> bool:
    """The same instructions, and at least the occupancy."""
    floor, occupancy = wanted.get("occupancy", 1), got["occupancy"]
    assert isinstance(floor, int)
    assert isinstance(occupancy, int)
    return occupancy >= floor and wanted | {"occupancy": occupancy} == got


def _counted(instructions: object) -> str:
    assert isinstance(instructions, dict)
    return ", ".join(f"{number} {name}" for name, number in instructions.items()) or "none"


def _registers(facts: dict[str, object]) -> str:
    among = f" ({facts['accumulators']} AGPRs)" if facts["accumulators"] else ""
    return f"{facts['registers']}{among}"


def document(rows: list[Row], version: str) -> str:
    """docs/kernels-static.md."""
    lines = [
        "# Triton kernels: what the compiled code shows",
        "",
        f"Written by `nox -s kernels -- --update` from the code that Triton {version} makes;",
        "`nox -s kernels` compiles all of it again and fails if a line below is no longer true.",
        "Every launch went through its op's own wrapper, in each configuration of the tables,",
        "without a GPU.",
        "",
        "**Nothing here says anything about speed**, bank conflicts, waits or races.",
        "None of these kernels has run on an AMD GPU.",
        "",
        "- A launch is op / dtype / bucket of the configuration table / variant,",
        "  and which of the call's kernels.",
        "- Registers are per thread; on AMD accumulators (AGPRs) are among them.",
        "- No kernel here spills, and none moves registers to accumulators to save them.",
        "  Matrix: the matrix instructions, with their operands' types.",
        "- Shared: bytes of LDS or shared memory of a workgroup.",
        "- Occupancy: waves of a SIMD, or warps of an SM, that registers and shared memory allow.",
        "- Loads and stores are counted as written in the code, not as executed;",
        "  AMD's scalar loads, which read ids and slots there, are not among them.",
    ]
    for arch in ARCHS:
        lines += ["", f"## {arch}", ""]
        lines.append(
            "| launch | configuration | registers | shared | occupancy | loads | stores | matrix |"
        )
        lines.append("|---|---|---|---|---|---|---|---|")
        for row in rows:
            if row.name.startswith(f"{arch}/"):
                facts = row.facts
                cells = (
                    *(row.name.partition("/")[2], row.config, _registers(facts)),
                    *(facts["shared_bytes"], facts["occupancy"]),
                    *(_counted(facts[kind]) for kind in ("loads", "stores", "matrix")),
                )
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def known_families() -> tuple[str, ...]:
    """The modules of `kernel_families`; to ask imports PyTorch."""
    from kernel_families import FAMILIES

    return tuple(FAMILIES)


def _document_differs(text: str, is_update: bool) -> Iterator[str]:
    if is_update:
        DOCUMENT.write_text(text, "utf-8")
    elif not DOCUMENT.is_file() or DOCUMENT.read_text("utf-8") != text:
        name = Path(DOCUMENT).relative_to(ROOT)
        yield f"{name} differs from what was found: run with --update, and read it"


def main() -> int:
    """Compile everything; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--update", action="store_true", help="write table and document anew")
    parser.add_argument("--only", metavar="FAMILY", help="one module of tools/kernel_families")
    arguments = parser.parse_args()
    only = arguments.only
    families = known_families() if only is None else (only,)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("TRITON_INTERPRET is set: an interpreted kernel has no code to look at")
    import triton

    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        # What an earlier run left behind would be read instead of compiled.
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            parts = [Part(arch=arch, family=family) for arch in ARCHS for family in families]
            done = list(pool.map(compile_part, parts))
    rows = [row for found, _, _ in done for row in found]
    faults = [fault for row in rows for fault in row.faults]
    faults += [fault for _, found, _ in done for fault in found]
    if only is None:
        faults += _unused({key for _, _, used in done for key in used})
    if arguments.update:
        _write_expected(rows, only)
    else:
        faults += _unexpected(rows, only)
    if only is None:
        faults += _document_differs(document(rows, triton.__version__), arguments.update)
    for fault in faults:
        print(fault)
    print(f"kernels: {len(rows)} compiled for {', '.join(ARCHS)}, {len(faults)} faults, not run")
    return 1 if faults or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
