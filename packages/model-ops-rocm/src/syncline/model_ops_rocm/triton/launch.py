"""The one way from an op's wrapper to a kernel; importing it imports Triton.

Unit: one launch. It picks the configuration, turns it into the options of the device at hand and
launches, compiles without launching (`compiling`), or refuses to compile (`sealed`). Knows no op.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol  # Any: what Triton passes and returns

import torch
from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from syncline.model_ops_rocm.arch import gfx_name
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.errors import NotPreparedError
from syncline.model_ops_rocm.triton.configs import CONFIGS, key_for
from syncline.model_ops_rocm.triton.configs.base import ConfigKey, Row
from syncline.model_ops_rocm.triton.targets import LaunchConfig, Target, launch_options

# As the kernels were decorated: `TRITON_INTERPRET` is read once, when they are imported.
IS_INTERPRETED: Final = bool(knobs.runtime.interpret)
# What the interpreter computes does not depend on it; the block sizes come from its tables.
INTERPRETED_ARCH: Final = "sm_90"
_RUN_BYTES: Final = 16  # where the tensor memory accelerator may begin to read

Chosen = Row  # of the tables: what was looked up, and what was found


class Kernel(Protocol):
    """What is used of a `triton.jit` function."""

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledLaunch:
    """A launch as it was compiled; `binary` is Triton's record, with `asm` and `metadata`."""

    key: ConfigKey
    config: LaunchConfig
    constants: Mapping[str, object]
    binary: Any  # triton.compiler.CompiledKernel

    def load(self) -> None:
        """Bring the code onto the device, which a first launch would do, even inside a capture."""
        self.binary.run  # noqa: B018 - a property that loads


class Launcher:
    """Launches kernels on the current device. One per process; not for use by several threads."""

    __slots__ = ("_archs", "_compiled", "_is_launching", "interpreted_arch", "is_preparing")

    def __init__(self) -> None:
        self._archs: dict[int, str] = {}
        self._compiled: list[CompiledLaunch] | None = None
        self._is_launching = False
        # Whether a call compiles what any call of no larger shapes launches, not what it would.
        self.is_preparing = False
        self.interpreted_arch = INTERPRETED_ARCH

    @property
    def is_compiling(self) -> bool:
        """Whether launches only compile, so that tensors may be on the meta device."""
        return self._compiled is not None

    def config(self, op: str, dtype: torch.dtype, width: int, kind: str = "") -> Chosen:
        """What the current device's tables hold for the shape; NoConfigurationError if nothing."""
        key = key_for(op, self.arch, dtype, width, kind)
        return key, CONFIGS[key]

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        chosen: Chosen,
        args: tuple[object, ...],
        constants: Mapping[str, object],
    ) -> None:
        """Run `kernel` over `grid`, which must not be empty, with the configuration `chosen`."""
        key, config = chosen
        constants = {**config.constants, **constants}
        if IS_INTERPRETED:
            kernel[grid](*args, **constants)
            return
        options = launch_options(Target.of_arch(key.arch), config)
        self._is_launching = True
        try:
            binary = kernel.run(
                *args, grid=grid, warmup=self._compiled is not None, **constants, **options
            )
        except TypeError as error:
            # Triton describes what it would compile to the hook of `sealed`, as JSON, and fails at
            # a constant that has none.
            if "JSON serializable" not in str(error):
                raise
            binary = None
        finally:
            self._is_launching = False
        if binary is None:
            raise NotPreparedError(op=key.op, arch=key.arch, dtype=key.dtype)
        if self._compiled is not None:
            self._compiled.append(
                CompiledLaunch(key=key, config=config, constants=constants, binary=binary)
            )

    @contextmanager
    def compiling(self, *, is_preparing: bool = True) -> Iterator[list[CompiledLaunch]]:
        """Inside, launches compile and do not run; the list grows by one entry per launch.

        Unless it `is_preparing`, a call has the launches that it would have outside, and in place
        of a product that would be the vendor's library's, Triton's.
        """
        if self._compiled is not None:
            raise RuntimeError("compiling() is not reentrant")
        self._compiled, self.is_preparing = [], is_preparing
        try:
            yield self._compiled
        finally:
            self._compiled, self.is_preparing = None, False

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Inside, a launch that would compile raises NotPreparedError before anything ran."""
        earlier = knobs.runtime.jit_cache_hook
        # Another library's kernels share the hook: only our own launches are refused.
        knobs.runtime.jit_cache_hook = lambda **facts: (
            self._is_launching or bool(earlier is not None and earlier(**facts))
        )
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = earlier

    @property
    def arch(self) -> str:
        """The current device's, by which tables are read."""
        if IS_INTERPRETED:
            return self.interpreted_arch
        device = driver.active.get_current_device()
        if device not in self._archs:
            target = driver.active.get_current_target()
            is_hip = target.backend == "hip"
            self._archs[device] = gfx_name(target.arch) if is_hip else f"sm_{target.arch}"
        return self._archs[device]


LAUNCHER: Final = Launcher()


def overlaps(config: LaunchConfig) -> bool:
    """Whether a launch starts while the kernel before it ends: its kernel must wait by itself."""
    return bool(config.launch_pdl) and not IS_INTERPRETED


def can_be_tiled(tensor: torch.Tensor, stride: int) -> bool:
    """Whether `tiled` takes rows so far apart; what is prepared stands for any that it takes."""
    is_even = stride * tensor.itemsize % _RUN_BYTES == 0 and tensor.data_ptr() % _RUN_BYTES == 0
    return LAUNCHER.is_preparing or is_even


def tiled(
    tensor: torch.Tensor,
    shape: tuple[int, int],
    stride: int,
    tile: tuple[int, int],
    *,
    num_ctas: int = 1,
) -> TensorDescriptor:
    """The rows at `tensor` as sm_90's tensor memory accelerator reads them, in tiles.

    They are `stride` apart and `can_be_tiled`; a tile's rows are multiples of 128 bytes, and lie in
    shared memory as matrix instructions read them fastest. Each of the `num_ctas` programs of a
    cluster has tiles of its own.
    """
    if LAUNCHER.is_preparing:
        # What is compiled depends on the type and the tile alone.
        tensor = tensor.new_empty(0, device="meta")
        stride = -(-shape[1] // _RUN_BYTES) * _RUN_BYTES
    layout = NVMMASharedLayout(
        swizzle_byte_width=128,
        element_bitwidth=8 * tensor.itemsize,
        cga_layout=[[0, 0]] * (num_ctas.bit_length() - 1),
    )
    return TensorDescriptor(tensor, list(shape), [stride, 1], list(tile), layout)


def require_reachable(op: str, **tensors: torch.Tensor | None) -> None:
    """Every tensor is on the device that kernels run on: the current one.

    A kernel started on another device than its tensors' reads what it may not, or fails in a way
    that ends the process. In the interpreter tensors are on the CPU.
    """
    if IS_INTERPRETED:
        expected = torch.device("cpu")
    elif LAUNCHER.is_compiling:
        return
    else:
        expected = torch.device("cuda", torch.cuda.current_device())
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != expected:
            refuse(op, name, f"be on the current device, {expected}", tensor.device)
