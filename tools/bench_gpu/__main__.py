"""Prints the table of every family, or of those named; exits 1 if a promised share is missed.

`--document FILE` also writes the table as docs/kernels.md has it.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from gpu_timing import Machine, Row

FAMILIES: Final = (
    "attention",
    "decoding",
    "elementwise",
    "fused",
    "kv",
    "layer",
    "moe",
    "storing",
    "logits",
    "linear",
)
_COLUMNS: Final = ("op", "shape", "backend", "us", "share of floor", "promised", "")
_HEAD: Final = """\
# Speed of the ops on a GPU

Written by `nox -s bench -- gpu --document docs/kernels.md`. **None of these kernels has run on an
AMD GPU**: what is known of their code there is in [kernels-static.md](kernels-static.md).

Each time is that of one node of a CUDA graph that cycles over at least 1 GB of distinct operands,
random data in random order: the median of 15 replays. The floor is what the bytes that must move
would take at the copy rate below, bytes read and written counted together, or what the operations
would take at the matmul rate, whichever is said in the last column or, without a word, the bytes.
A read stream alone can be a little faster than a copy, so a share may exceed 100 %.
"""


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(prog="bench_gpu", description="Speed of the ops on a GPU.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--quick", action="store_true", help="the promised shapes alone")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"FAMILY must be among {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU: nothing to measure")
    machine = Machine.measure()
    lines = [_describe(machine), "", *_table_head()]
    print("\n".join(lines))
    missed: list[Row] = []
    for row in _rows(machine, options.families or FAMILIES, quick=options.quick):
        if row.target is not None and row.share < row.target:
            missed.append(row)
        lines.append(_line(row))
        print(lines[-1], flush=True)
    lines += ["", f"Promised shares missed: {len(missed)}."]
    print("\n".join(lines[-2:]))
    if options.document is not None:
        options.document.write_text(_HEAD + "\n" + "\n".join(lines) + "\n", "utf-8")
    return 1 if missed else 0


def _describe(machine: Machine) -> str:
    import triton

    return (
        f"{machine.name}, torch {torch.__version__}, Triton {triton.__version__}:"
        f" copy {machine.copy_bytes_per_s / 1e12:.2f} TB/s,"
        f" bfloat16 matmul {machine.matmul_flop_per_s / 1e12:.0f} TFLOP/s."
    )


def _rows(machine: Machine, families: Iterable[str], *, quick: bool) -> Iterator[Row]:
    for name in families:
        yield from importlib.import_module(f"bench_gpu.{name}").rows(machine, quick=quick)
        torch.cuda.empty_cache()


def _table_head() -> list[str]:
    return ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]


def _line(row: Row) -> str:
    promised = "" if row.target is None else f"{row.target:.0%}"
    mark = " **missed**" if row.target is not None and row.share < row.target else ""
    cells = (row.op, row.shape, row.backend, f"{row.seconds * 1e6:.1f}", f"{row.share:.0%}{mark}")
    return "| " + " | ".join((*cells, promised, row.note)) + " |"


if __name__ == "__main__":
    sys.exit(main())
