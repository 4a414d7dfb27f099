"""What can go wrong in this package, as types; knows no op, layout or backend.

    OpError
        BackendUnavailableError    the backend cannot run here: package, version, why
        NoImplementationError      the backend runs here, but has no such (op, arch, dtype)
        NoConfigurationError       the op is there, but no configuration of it holds the shape
        NotPreparedError           a launch would have compiled where that was ruled out
        LayoutError                a tensor or region does not fit a kernel layout
        FormatError                stored tensors or a region do not fit a storage format

A bad argument of an op is a ValueError that names op, argument, value and limit.
"""

from collections.abc import Sequence as SequenceABC

import torch


class OpError(Exception):
    """Base of every error of this package that is not a plain bad argument."""


class BackendUnavailableError(OpError):
    """A backend was asked for on a machine that cannot run it."""

    def __init__(self, *, backend: str, package: str, version: str, why: str) -> None:
        super().__init__(
            f"backend {backend!r} is not available: {why} (distribution {package} {version})"
        )
        self.backend = backend
        self.package = package
        self.version = version
        self.why = why


class NoImplementationError(OpError):
    """No implementation is registered for the combination; `existing` lists what there is."""

    def __init__(
        self, *, op: str, backend: str, arch: str, dtype: torch.dtype, existing: SequenceABC[str]
    ) -> None:
        listed = "; ".join(existing) if existing else "nothing"
        super().__init__(
            f"backend {backend!r} has no {op} for arch {arch!r} and {dtype};"
            f" for {op} there is: {listed}"
        )
        self.op = op
        self.backend = backend
        self.arch = arch
        self.dtype = dtype
        self.existing = tuple(existing)


class NoConfigurationError(OpError):
    """A backend's tables have no row for a shape; nothing was launched."""

    def __init__(self, *, op: str, arch: str, dtype: torch.dtype, width: int) -> None:
        super().__init__(f"{op}: no configuration for arch {arch!r}, {dtype} and width {width}")
        self.op = op
        self.arch = arch
        self.dtype = dtype
        self.width = width


class NotPreparedError(OpError):
    """A launch needed a kernel that `prepare` had not compiled; nothing was launched."""

    def __init__(self, *, op: str, arch: str, dtype: torch.dtype) -> None:
        super().__init__(
            f"{op}: a kernel for {arch} and {dtype} is not compiled yet;"
            " prepare the op for this shape, with tensors of these strides, before"
        )
        self.op = op
        self.arch = arch
        self.dtype = dtype


class LayoutError(OpError):
    """A shape, dtype or region breaks the precondition of a layout; nothing was written."""

    def __init__(self, *, layout: str, precondition: str, got: str) -> None:
        super().__init__(f"layout {layout} requires {precondition}, got {got}")
        self.layout = layout
        self.precondition = precondition
        self.got = got


class FormatError(OpError):
    """Stored tensors or a region break the precondition of a storage format; nothing written."""

    def __init__(self, *, storage_format: str, precondition: str, got: str) -> None:
        super().__init__(f"storage format {storage_format} requires {precondition}, got {got}")
        self.storage_format = storage_format
        self.precondition = precondition
        self.got = got
