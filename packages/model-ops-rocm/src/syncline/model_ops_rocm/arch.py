"""Which GPU architecture a device is, as the name that the registry uses.

Unit: one name per device, `cpu`, `gfx942`, `gfx950`, `sm_90` or whatever the driver reports.
Asks PyTorch alone: Triton and AITER are never imported, and with no GPU no driver is touched.
Does not know which architectures have kernels; that is the registry's job.
"""

import torch

KNOWN_ARCHS: tuple[str, ...] = ("cpu", "gfx942", "gfx950", "sm_90")


def detect_arch(device: torch.device | str | None = None) -> str:
    """Name the architecture of `device`; None means the current GPU, or `cpu` if there is none.

    A GPU outside `KNOWN_ARCHS` keeps the name its driver gives (`sm_80`, `gfx90a`): `select` then
    says what exists for it. Raises ValueError for a device that is neither a CPU nor a GPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cpu":
        return "cpu"
    if resolved.type != "cuda":
        raise ValueError(f"detect_arch: device must be cpu or cuda, got {resolved}")
    if torch.version.hip is not None:
        # Only ROCm builds give this property to the driver's record.
        return gfx_name(str(torch.cuda.get_device_properties(resolved).gcnArchName))
    return sm_name(torch.cuda.get_device_capability(resolved))


def gfx_name(gcn_arch_name: str) -> str:
    """`gfx942` from the driver's `gfx942:sramecc+:xnack-`."""
    name = gcn_arch_name.partition(":")[0]
    if not name.startswith("gfx"):
        raise ValueError(f"gfx_name: expected a name like gfx942:xnack-, got {gcn_arch_name!r}")
    return name


def sm_name(capability: tuple[int, int]) -> str:
    """`sm_90` from CUDA's compute capability (9, 0)."""
    major, minor = capability
    return f"sm_{major}{minor}"
