"""Prints the table of every family, or of those named; exits 1 if a promised share is missed."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from typing import Final

import torch
from gpu_timing import Machine, Row

FAMILIES: Final = ("elementwise",)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(prog="bench_gpu", description="Speed of the ops on a GPU.")
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY")
    parser.add_argument("--quick", action="store_true", help="the promised shapes alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU: nothing to measure")
    machine = Machine.measure()
    print(
        f"{machine.name}, torch {torch.__version__}:"
        f" copy {machine.copy_bytes_per_s / 1e12:.2f} TB/s,"
        f" bfloat16 matmul {machine.matmul_flop_per_s / 1e12:.0f} TFLOP/s\n"
    )
    print("| op | shape | backend | us | share of floor | promised | |")
    print("|---|---|---|---|---|---|---|")
    missed = 0
    for row in _rows(machine, options.families or FAMILIES, quick=options.quick):
        missed += row.target is not None and row.share < row.target
        print(_line(row), flush=True)
    print(f"\n{missed} promised shares missed")
    return 1 if missed else 0


def _rows(machine: Machine, families: tuple[str, ...], *, quick: bool) -> Iterator[Row]:
    for name in families:
        yield from importlib.import_module(f"bench_gpu.{name}").rows(machine, quick=quick)
        torch.cuda.empty_cache()


def _line(row: Row) -> str:
    promised = "" if row.target is None else f"{row.target:.0%}"
    cells = (row.op, row.shape, row.backend, f"{row.seconds * 1e6:.1f}", f"{row.share:.0%}")
    return "| " + " | ".join((*cells, promised, row.note)) + " |"


if __name__ == "__main__":
    sys.exit(main())
