"""Linear in PyTorch: products with a stored weight.

Knows a layout's inverse, no kernel's tile: a shuffled weight is unshuffled on every call, because
the reference must read the bytes that are stored, not a copy that an update could miss.
"""

import torch
import torch.nn.functional as F

from syncline.model_ops_rocm.checks import (
    refuse,
    require_dtype,
    require_float,
    require_ndim,
    require_out,
    require_shape,
)
from syncline.model_ops_rocm.layouts import RowMajor, WeightLayout

_LINEAR = "linear"
_ROW_MAJOR = RowMajor()


def linear(
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layout: WeightLayout,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `contracts.Linear`."""
    require_float(_LINEAR, "x", x_TK)
    require_ndim(_LINEAR, "weight", weight, 2)
    require_dtype(_LINEAR, "weight", weight, x_TK.dtype)
    if x_TK.ndim == 0 or x_TK.shape[-1] != weight.shape[1]:
        refuse(_LINEAR, "x", f"have a last dimension of {weight.shape[1]}", list(x_TK.shape))
    if bias is not None:
        require_shape(_LINEAR, "bias", bias, weight.shape[:1])
        require_dtype(_LINEAR, "bias", bias, x_TK.dtype)
    logical = weight if layout == _ROW_MAJOR else layout.inverse(weight)
    result = F.linear(x_TK, logical, bias)
    if out is None:
        return result
    require_out(_LINEAR, out, result.shape, result.dtype)
    return out.copy_(result)
