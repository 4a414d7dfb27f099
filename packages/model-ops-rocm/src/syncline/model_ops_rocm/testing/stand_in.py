"""A driver that says which GPU there is and has none, so that kernels compile on any machine.

Importing this module needs no Triton; `stand_in_driver` imports it. Launches must be inside
`LAUNCHER.compiling()`: there is nothing to run them on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final  # Any: a value of Triton's, whose types are not ours

_DEVICES: Final = count(1_000)


class StandInDriver:
    """What `triton.JITFunction` asks of a driver in order to compile."""

    __slots__ = ("_device", "_target")

    def __init__(self, target: Any) -> None:
        self._target = target
        # Compiled kernels are kept by device: each driver is a device of its own.
        self._device = next(_DEVICES)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def stand_in_driver(arch: str) -> Iterator[None]:
    """Inside, Triton compiles for `arch`: `gfx942`, `gfx950` or `sm_90`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if arch.startswith("gfx"):
        target = GPUTarget("hip", arch, 64)
    else:
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    earlier = driver._active
    driver.set_active(StandInDriver(target))
    try:
        yield
    finally:
        driver._active = earlier
