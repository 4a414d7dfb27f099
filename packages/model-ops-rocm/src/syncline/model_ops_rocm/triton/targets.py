"""What a launch is told besides its arguments, per vendor; knows no kernel and imports no Triton.

Unit: one launch. A configuration is data: which one a launch gets depends on the op, the
architecture, the dtype and the shape, never on a measurement made while running, so that all ranks
agree and nothing compiles inside a recorded step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from syncline.model_ops_rocm.quant.scheme import CodeType

Vendor = Literal["hip", "cuda"]
SUPPORTED_ARCHS: Final = ("gfx942", "gfx950", "sm_90")
# What a workgroup may have of LDS, or a block of shared memory, in bytes. The compiler does not
# enforce it.
MAX_SHARED_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"gfx942": 65_536, "gfx950": 163_840, "sm_90": 232_448}
)
# The fp8 type that a target converts float32 to by an instruction, and multiplies.
_NATIVE_FP8: Final[Mapping[str, CodeType]] = MappingProxyType(
    {"gfx942": CodeType.E4M3FNUZ, "gfx950": CodeType.E4M3FN, "sm_90": CodeType.E4M3FN}
)


def casts_natively(arch: str, code: CodeType) -> bool:
    """Whether kernels for `arch` convert to `code` by an instruction; others use integers."""
    return _NATIVE_FP8.get(arch) is code


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One architecture, by the registry's name, and whose it is."""

    vendor: Vendor
    arch: str

    @classmethod
    def of_arch(cls, arch: str) -> "Target":
        return cls(vendor="hip" if arch.startswith("gfx") else "cuda", arch=arch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How one kernel is compiled and launched for one (op, arch, dtype, shape bucket).

    `constants` are the kernel's own compile-time numbers (`BLOCK_...`). None leaves an option of
    one vendor to its compiler. `fuses_multiply_add=False` keeps a product's own rounding, which the
    contracts promise in float32 too.
    """

    num_warps: int
    num_stages: int = 1
    constants: Mapping[str, int] = field(default_factory=dict)
    fuses_multiply_add: bool = False
    waves_per_eu: int | None = None  # HIP: minimum and maximum, so a cap on registers
    matrix_instr_nonkdim: int | None = None  # HIP
    kpack: int | None = None  # HIP, gfx942 alone
    maxnreg: int | None = None  # CUDA
    launch_pdl: bool | None = None  # CUDA
    num_ctas: int = 1  # CUDA: programs of a cluster

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(
                f"LaunchConfig: num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}"
            )
        if self.num_stages < 1:
            raise ValueError(f"LaunchConfig: num_stages must be positive, got {self.num_stages}")
        if self.num_ctas not in (1, 2, 4, 8):
            raise ValueError(f"LaunchConfig: num_ctas must be 1, 2, 4 or 8, got {self.num_ctas}")


def launch_options(target: Target, config: LaunchConfig) -> dict[str, int | bool]:
    """The keywords of a launch on `target`.

    An option of the other vendor, which that vendor's launch would refuse by KeyError or silently
    ignore, is a ValueError naming it; so is `kpack` anywhere but on gfx942.
    """
    hip = {
        "waves_per_eu": config.waves_per_eu,
        "matrix_instr_nonkdim": config.matrix_instr_nonkdim,
        "kpack": config.kpack,
    }
    cuda = {
        "maxnreg": config.maxnreg,
        "launch_pdl": config.launch_pdl,
        "num_ctas": config.num_ctas if config.num_ctas > 1 else None,
    }
    own, foreign = (hip, cuda) if target.vendor == "hip" else (cuda, hip)
    refused = [name for name, value in foreign.items() if value is not None]
    if config.kpack is not None and target.arch != "gfx942" and "kpack" not in refused:
        refused.append("kpack")
    if refused:
        raise ValueError(f"launch_options: {target.arch} has no option {', '.join(refused)}")
    common: dict[str, int | bool] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": config.fuses_multiply_add,
    }
    return common | {name: value for name, value in own.items() if value is not None}
