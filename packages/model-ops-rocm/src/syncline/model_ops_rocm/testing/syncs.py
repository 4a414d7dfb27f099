"""A mode in which reading a tensor's values on the host fails.

A step that is recorded and replayed cannot contain such a read. Knows ATen's names, no op of ours.
"""

from collections.abc import Callable, Mapping
from typing import Any  # the arguments and results of ATen calls, of every type

from torch.utils._python_dispatch import TorchDispatchMode

_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")


class HostSyncError(Exception):
    """An op looked at values; `aten_name` says through which ATen call."""

    def __init__(self, aten_name: str) -> None:
        super().__init__(f"host sync through aten::{aten_name}")
        self.aten_name = aten_name


class NoHostSync(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's base is untyped
    """`with NoHostSync():` raises HostSyncError at the first host read inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's base is untyped

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],  # any ATen overload
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever the ATen call returns
        name = str(func).removeprefix("aten.").partition(".")[0]
        if name in _SYNCS:
            raise HostSyncError(name)
        return func(*args, **(kwargs or {}))
