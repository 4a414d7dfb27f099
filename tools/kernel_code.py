"""What a compiled kernel's code says of itself: registers, spills, memory, instructions.

Reads AMD's assembly and metadata, and NVIDIA's PTX and the resource usage of its cubin. Runs
nothing, and says nothing about speed, bank conflicts, waits or races.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final  # Any: Triton's record of a compiled kernel

_AMD_MEMORY: Final = re.compile(r"^\s+((?:global|buffer|flat)_(load|store)_(\w+))", re.MULTILINE)
_AMD_MATRIX: Final = re.compile(r"^\s+(v_s?mfmac?_\w+)", re.MULTILINE)
_AMD_SCRATCH: Final = re.compile(r"^\s+scratch_(?:load|store)", re.MULTILINE)
_AMD_ACCUMULATOR: Final = re.compile(r"^\s+v_accvgpr_", re.MULTILINE)
_AMD_BITS: Final = (("x4", 128), ("x3", 96), ("x2", 64), ("dword", 32), ("short", 16), ("byte", 8))
_PTX_MEMORY: Final = re.compile(r"\b((ld|st)\.global[\w.:]*)")
_PTX_MATRIX: Final = re.compile(r"\b((?:wgmma\.mma_async|mma\.sync)[\w.]*)")
_PTX_TYPE: Final = re.compile(r"(?:\.v(\d))?\.[bfsu](\d+)$")
_SM_REGISTERS: Final = 65_536
_SM_WARPS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFacts:
    """One kernel for one architecture."""

    registers: int  # per thread; on AMD vector registers and accumulators together
    accumulators: int  # AMD: of those, and a sign of a hidden spill without matrix instructions
    scalar_registers: int  # AMD
    num_spills: int  # registers on AMD, bytes on NVIDIA
    num_scalar_spills: int  # AMD
    shared_bytes: int
    occupancy: int  # waves of a SIMD, warps of an SM, as registers allow; LDS not looked at
    loads: dict[str, int]  # instruction -> how often it is written
    stores: dict[str, int]
    matrix: dict[str, int]

    def load_bits(self) -> list[int]:
        """The width of each vector load, narrowest first; scalar loads are not among them."""
        return _widths(self.loads)

    def store_bits(self) -> list[int]:
        return _widths(self.stores)


def read_code(binary: Any) -> CodeFacts:
    """The facts of one of Triton's compiled kernels."""
    if "amdgcn" in binary.asm:
        return _read_amd(binary.asm["amdgcn"], int(binary.metadata.shared))
    return _read_nvidia(
        *(binary.asm["ptx"], binary.asm["cubin"]),
        *(int(binary.metadata.shared), int(binary.metadata.num_warps)),
    )


def _read_amd(text: str, shared_bytes: int) -> CodeFacts:
    memory = [match.groups() for match in _AMD_MEMORY.finditer(text)]
    in_scratch = len(_AMD_SCRATCH.findall(text)) + _amd_number(text, ".private_segment_fixed_size")
    hidden = len(_AMD_ACCUMULATOR.findall(text))
    matrix = Counter(_AMD_MATRIX.findall(text))
    return CodeFacts(
        registers=_amd_number(text, ".vgpr_count"),
        accumulators=_amd_number(text, ".agpr_count"),
        scalar_registers=_amd_number(text, ".sgpr_count"),
        num_spills=_amd_number(text, ".vgpr_spill_count") + in_scratch + (0 if matrix else hidden),
        num_scalar_spills=_amd_number(text, ".sgpr_spill_count"),
        shared_bytes=shared_bytes,
        occupancy=int(re.findall(r"; Occupancy: (\d+)", text)[0]),
        loads=dict(Counter(name for name, kind, _ in memory if kind == "load")),
        stores=dict(Counter(name for name, kind, _ in memory if kind == "store")),
        matrix=dict(matrix),
    )


def _amd_number(text: str, key: str) -> int:
    # Keys stand anywhere in their line: the first of a kernel is `- .agpr_count:`.
    metadata = text.partition(".amdgpu_metadata")[2]
    (found,) = re.findall(rf"(?<!\w){re.escape(key)}:\s+(\d+)", metadata)
    return int(found)


def _read_nvidia(ptx: str, cubin: bytes, shared_bytes: int, num_warps: int) -> CodeFacts:
    used = _resource_usage(cubin)
    memory = [match.groups() for match in _PTX_MEMORY.finditer(ptx)]
    registers = used["REG"]
    per_block = -(-registers // 8) * 8 * 32 * num_warps
    return CodeFacts(
        registers=registers,
        accumulators=0,
        scalar_registers=0,
        num_spills=used["STACK"] + used["LOCAL"],
        num_scalar_spills=0,
        shared_bytes=shared_bytes,
        occupancy=min(_SM_REGISTERS // per_block * num_warps, _SM_WARPS),
        loads=dict(Counter(name for name, kind in memory if kind == "ld")),
        stores=dict(Counter(name for name, kind in memory if kind == "st")),
        matrix=dict(Counter(_PTX_MATRIX.findall(ptx))),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)
    return {name: int(number) for name, number in found}


def _widths(instructions: dict[str, int]) -> list[int]:
    return sorted(bits for name, number in instructions.items() for bits in [_bits(name)] * number)


def _bits(instruction: str) -> int:
    match = _PTX_TYPE.search(instruction)
    if match is not None:
        return int(match[1] or 1) * int(match[2])
    return next(bits for part, bits in _AMD_BITS if part in instruction)
