"""Calls on scratch memory, so that AITER builds what it builds at a first call; knows no op.

Unit: one example of a call. AITER compiles a C++ module when a function of it is first called,
which may take minutes, and has no way to ask for that alone.
"""

from collections.abc import Mapping

import torch


def scratch_call(example: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """The same call on zeros: every tensor new, of the example's shape and dtype."""
    return {name: _scratch(value, device) for name, value in example.items()}


def _scratch(value: object, device: torch.device) -> object:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, tuple):
        return tuple(_scratch(one, device) for one in value)
    return value
