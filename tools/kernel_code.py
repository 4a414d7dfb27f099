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
_AMD_MATRIX: Final = re.compile(r"^\s+(v_s?mfmac?_\w+)(.*)$", re.MULTILINE)
_AMD_FORMAT: Final = re.compile(r"(cbsz|blgp):(\d)")
# What cbsz and blgp mean of an instruction whose name leaves the types open.
_AMD_FORMATS: Final = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_AMD_OPERANDS: Final = {"fp8": "e4m3", "bf8": "e5m2"}
_AMD_SCRATCH: Final = re.compile(r"^\s+scratch_(?:load|store)", re.MULTILINE)
_AMD_ACCUMULATOR: Final = re.compile(r"^\s+v_accvgpr_", re.MULTILINE)
_AMD_BITS: Final = (("x4", 128), ("x3", 96), ("x2", 64), ("dword", 32), ("short", 16), ("byte", 8))
_PTX_MEMORY: Final = re.compile(r"\b((ld|st)\.global[\w.:]*)")
_PTX_ASYNC: Final = re.compile(r"\b(cp\.async\.c[ag]\.shared\.global)[\w.:]*.*?\], (\w+)")
_PTX_BULK: Final = re.compile(r"\b(cp\.async\.bulk\.tensor\.\dd\.shared\w*\S*\.global)\b")
_PTX_MATRIX: Final = re.compile(r"\b((?:wgmma\.mma_async|mma\.sync)[\w.]*)")
_PTX_TYPE: Final = re.compile(r"(?:\.v(\d))?\.[bfsu](\d+)$")
_SM_REGISTERS: Final = 65_536
_SM_WARPS: Final = 64
_SM_SHARED: Final = 233_472
_SM_SHARED_OF_BLOCK: Final = 1_024  # that every block has besides its own
_CU_SIMDS: Final = 4
_CU_SHARED: Final = {"gfx942": 65_536, "gfx950": 163_840}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFacts:
    """One kernel for one architecture."""

    registers: int  # per thread; on AMD vector registers and accumulators together
    accumulators: int  # AMD: of those
    num_accumulator_moves: int  # AMD: between the two kinds; each hides a spill, or costs as much
    scalar_registers: int  # AMD
    num_spills: int  # registers on AMD, bytes on NVIDIA
    num_scalar_spills: int  # AMD
    shared_bytes: int
    occupancy: int  # waves of a SIMD, warps of an SM, as registers and shared memory allow
    loads: dict[str, int]  # instruction -> how often it is written
    stores: dict[str, int]
    matrix: dict[str, int]

    def operands(self) -> list[str]:
        """The types that matrix instructions multiply, such as `bf16 bf16`, each once."""
        return sorted({_operands(name) for name in self.matrix})

    def load_bits(self) -> list[int]:
        """The width of each vector load, narrowest first; scalar loads are not among them."""
        return _widths(self.loads)

    def store_bits(self) -> list[int]:
        return _widths(self.stores)


def read_code(binary: Any) -> CodeFacts:
    """The facts of one of Triton's compiled kernels."""
    shared_bytes, num_warps = int(binary.metadata.shared), int(binary.metadata.num_warps)
    if "amdgcn" in binary.asm:
        arch = str(binary.metadata.target.arch).partition(":")[0]
        return _read_amd(binary.asm["amdgcn"], shared_bytes, num_warps, _CU_SHARED[arch])
    return _read_nvidia(binary.asm["ptx"], binary.asm["cubin"], shared_bytes, num_warps)


def _read_amd(text: str, shared_bytes: int, num_warps: int, cu_shared: int) -> CodeFacts:
    memory = [match.groups() for match in _AMD_MEMORY.finditer(text)]
    in_scratch = len(_AMD_SCRATCH.findall(text)) + _amd_number(text, ".private_segment_fixed_size")
    occupancy = int(re.findall(r"; Occupancy: (\d+)", text)[0])
    if shared_bytes:
        # The assembler's own number does not know of LDS that is given at the launch.
        occupancy = min(occupancy, cu_shared // shared_bytes * num_warps // _CU_SIMDS)
    return CodeFacts(
        registers=_amd_number(text, ".vgpr_count"),
        accumulators=_amd_number(text, ".agpr_count"),
        num_accumulator_moves=len(_AMD_ACCUMULATOR.findall(text)),
        scalar_registers=_amd_number(text, ".sgpr_count"),
        num_spills=_amd_number(text, ".vgpr_spill_count") + in_scratch,
        num_scalar_spills=_amd_number(text, ".sgpr_spill_count"),
        shared_bytes=shared_bytes,
        occupancy=occupancy,
        loads=dict(Counter(name for name, kind, _ in memory if kind == "load")),
        stores=dict(Counter(name for name, kind, _ in memory if kind == "store")),
        matrix=dict(Counter(_amd_matrix(*match.groups()) for match in _AMD_MATRIX.finditer(text))),
    )


def _amd_matrix(name: str, operands: str) -> str:
    """The instruction; where its name leaves the types of its operands open, with them."""
    if not name.endswith("_f8f6f4"):
        return name
    formats = dict(_AMD_FORMAT.findall(operands))
    pair = (_AMD_FORMATS[int(formats.get(field, 0))] for field in ("cbsz", "blgp"))
    return f"{name} {' '.join(pair)}"


def _operands(instruction: str) -> str:
    if " " in instruction:
        return instruction.partition(" ")[2]
    if instruction.startswith("v_"):
        # v_mfma_f32_32x32x16_fp8_fp8, v_mfma_f32_32x32x8_bf16, v_mfma_f32_16x16x16_bf16_1k
        kinds = re.findall(r"(?<=_)(?:xf32|bf16|f16|fp8|bf8|f32|f64|i8)(?=_|$)", instruction)[1:]
        kinds = [_AMD_OPERANDS.get(kind, kind) for kind in kinds]
        return " ".join(kinds if len(kinds) == 2 else kinds * 2)
    types = instruction.split(".")
    # wgmma ... m64n16k16.f32.bf16.bf16 and mma ... row.col.f32.bf16.bf16.f32: result, A, B, and C.
    return " ".join(types[-2:] if instruction.startswith("wgmma") else types[-3:-1])


def _amd_number(text: str, key: str) -> int:
    # Keys stand anywhere in their line: the first of a kernel is `- .agpr_count:`.
    metadata = text.partition(".amdgpu_metadata")[2]
    (found,) = re.findall(rf"(?<!\w){re.escape(key)}:\s+(\d+)", metadata)
    return int(found)


def _read_nvidia(ptx: str, cubin: bytes, shared_bytes: int, num_warps: int) -> CodeFacts:
    used = _resource_usage(cubin)
    memory = [match.groups() for match in _PTX_MEMORY.finditer(ptx)]
    loads = Counter(name for name, kind in memory if kind == "ld")
    loads.update(f"{name} {int(size, 0)}B" for name, size in _PTX_ASYNC.findall(ptx))
    loads.update(_PTX_BULK.findall(ptx))
    # What PTX declares besides what Triton lays out; NVIDIA's own of each block is among it.
    shared_bytes += max(used["SHARED"] - _SM_SHARED_OF_BLOCK, 0)
    registers = used["REG"]
    blocks = _SM_REGISTERS // (-(-registers // 8) * 8 * 32 * num_warps)
    if shared_bytes:
        blocks = min(blocks, _SM_SHARED // (shared_bytes + _SM_SHARED_OF_BLOCK))
    return CodeFacts(
        registers=registers,
        accumulators=0,
        num_accumulator_moves=0,
        scalar_registers=0,
        num_spills=used["LOCAL"] + (used["STACK"] if _uses_stack(cubin, used["STACK"]) else 0),
        num_scalar_spills=0,
        shared_bytes=shared_bytes,
        occupancy=min(blocks * num_warps, _SM_WARPS),
        loads=dict(loads),
        stores=dict(Counter(name for name, kind in memory if kind == "st")),
        matrix=dict(Counter(_PTX_MATRIX.findall(ptx))),
    )


def _uses_stack(cubin: bytes, num_bytes: int) -> bool:
    """Whether a frame of so many bytes is read or written; the assembler may leave one unused."""
    return num_bytes > 0 and re.search(r"\b(STL|LDL)\b", _tool("nvdisasm", "-c", cubin)) is not None


def _resource_usage(cubin: bytes) -> dict[str, int]:
    found = re.findall(
        r"\b(REG|STACK|SHARED|LOCAL):(\d+)", _tool("cuobjdump", "--dump-resource-usage", cubin)
    )
    return {name: int(number) for name, number in found}


def _tool(name: str, option: str, cubin: bytes) -> str:
    """What one of the tools in Triton's wheel says about a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _widths(instructions: dict[str, int]) -> list[int]:
    return sorted(bits for name, number in instructions.items() for bits in [_bits(name)] * number)


def _bits(instruction: str) -> int:
    if instruction.startswith("cp.async.bulk"):
        return 128  # or more: a whole tile
    if instruction.startswith("cp.async"):
        return 8 * int(instruction.partition(" ")[2].removesuffix("B"))
    match = _PTX_TYPE.search(instruction)
    if match is not None:
        return int(match[1] or 1) * int(match[2])
    return next(bits for part, bits in _AMD_BITS if part in instruction)
