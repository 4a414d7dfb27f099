"""`syncline ops`: which ops there are, on which backend, for what, and why not here."""

import json
from collections.abc import Iterable

import torch

from syncline.model_ops_rocm import Availability, available

_HEAD = ("op", "backend", "there is", "runs here on", "not on, and why")


def run_ops(op: str | None, backend: str | None, *, as_json: bool) -> None:
    """One line per op and backend; reasons are numbered, and said once below the table."""
    lines = available(op=op, backend=backend)
    if as_json:
        print(json.dumps([_facts(line) for line in lines]))
        return
    reasons: dict[str, int] = {}
    rows = [_HEAD]
    for (one_op, one_backend), own in _by_op_and_backend(lines).items():
        rows.append((one_op, one_backend, _offered(own), _usable(own), _absent(own, reasons)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()
    for reason, number in reasons.items():
        print(f"[{number}] {reason}")


def _facts(line: Availability) -> dict[str, object]:
    return {
        "op": line.op,
        "backend": line.backend,
        "arch": line.arch,
        "dtype": _name(line.dtype),
        "is_offered": line.is_offered,
        "why_not": line.why_not,
    }


def _by_op_and_backend(
    lines: Iterable[Availability],
) -> dict[tuple[str, str], list[Availability]]:
    grouped: dict[tuple[str, str], list[Availability]] = {}
    for line in lines:
        grouped.setdefault((line.op, line.backend), []).append(line)
    return grouped


def _offered(lines: list[Availability]) -> str:
    """`gfx942 gfx950 (float16 bfloat16)`: architectures with the same dtypes go together."""
    dtypes_of: dict[str, list[str]] = {}
    for line in lines:
        if line.is_offered:
            dtypes_of.setdefault(line.arch, []).append(_name(line.dtype))
    archs_of: dict[str, list[str]] = {}
    for arch, dtypes in dtypes_of.items():
        archs_of.setdefault(" ".join(dtypes), []).append(arch)
    parts = [f"{' '.join(archs)} ({dtypes})" for dtypes, archs in archs_of.items()]
    return ", ".join(parts) or "nothing"


def _usable(lines: list[Availability]) -> str:
    archs = dict.fromkeys(line.arch for line in lines if line.why_not is None)
    return " ".join(archs) or "nothing"


def _absent(lines: list[Availability], reasons: dict[str, int]) -> str:
    """Each architecture without any dtype that could be selected, by the number of its reason."""
    usable = {line.arch for line in lines if line.why_not is None}
    archs_of: dict[str, dict[str, None]] = {}
    for line in lines:
        if line.why_not is not None and line.arch not in usable:
            archs_of.setdefault(line.why_not, {})[line.arch] = None
    parts = []
    for reason, archs in archs_of.items():
        number = reasons.setdefault(reason, len(reasons) + 1)
        parts.append(f"{' '.join(archs)} [{number}]")
    return ", ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
