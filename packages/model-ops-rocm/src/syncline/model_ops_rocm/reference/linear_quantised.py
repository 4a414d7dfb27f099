"""Linear of quantised weights in PyTorch: stored codes and scales, decoded, and one product.

Knows recipes and layouts by their own `decode` and `inverse`, no kernel's tile. Everything is
float32 until the one rounding at the end, so scales may multiply codes or sums alike.
"""

from collections.abc import Sequence as SequenceABC

import torch
import torch.nn.functional as F

from syncline.model_ops_rocm.arguments.linear import (
    check_quantised_result,
    check_quantised_weight,
    check_x_of_codes,
    check_x_of_floats,
)
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.base import WeightLayout
from syncline.model_ops_rocm.reference.linear import LAYOUTS
from syncline.model_ops_rocm.reference.row_by_row import linear_row_by_row


class TorchLinearQuantised:
    """See `contracts.LinearQuantised`. Takes every recipe there is, in every pairing."""

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        return LAYOUTS

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        return 0

    def counters_size(self, weight: torch.Tensor, max_tokens: int) -> int:
        return 0

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        storage: StorageFormat,
        x_scale: torch.Tensor | None = None,
        x_recipe: Quantised | None = None,
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contracts.LinearQuantised`."""
        _, (num_out, depth) = check_quantised_weight(weight, weight_scale, storage)
        if x_recipe is None:
            check_x_of_floats(x_TK, x_scale, depth)
            x, x_dtype = x_TK.float(), x_TK.dtype
        else:
            x_dtype = None
            scales = check_x_of_codes(x_TK, x_scale, x_recipe, depth)
            x = x_recipe.decode({WEIGHT: x_TK, WEIGHT_SCALE: scales})
        shape = (*x.shape[:-1], num_out)
        dtype = check_quantised_result(
            *(shape, bias, out),
            dtype=dtype,
            x_dtype=x_dtype,
            x=x_TK,
            x_scale=x_scale,
            weight=weight,
            weight_scale=weight_scale,
        )
        decoded = storage.decode({WEIGHT: weight, WEIGHT_SCALE: weight_scale})
        multiply = linear_row_by_row if batch_invariant else F.linear
        result = multiply(x, decoded, None if bias is None else bias.float()).to(dtype)
        return result if out is None else out.copy_(result)
