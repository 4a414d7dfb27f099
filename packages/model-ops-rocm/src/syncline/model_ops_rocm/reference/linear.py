"""Linear in PyTorch: products with a stored weight.

Knows a layout's inverse, no kernel's tile: a shuffled weight is unshuffled on every call, because
the reference must read the bytes that are stored, not a copy that an update could miss.
"""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch
import torch.nn.functional as F

from syncline.model_ops_rocm.arguments.linear import LINEAR, check_linear, require_weight_layout
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.reference.row_by_row import linear_row_by_row

_ROW_MAJOR: Final = RowMajor()
LAYOUTS: Final[tuple[WeightLayout, ...]] = (_ROW_MAJOR, Shuffle16x16())


class TorchLinear:
    """See `contracts.Linear`."""

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
        bias: torch.Tensor | None = None,
        *,
        layout: WeightLayout,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contracts.Linear`."""
        check_linear(x_TK, weight, bias, out=out)
        require_weight_layout(LINEAR, layout)
        logical = weight if layout == _ROW_MAJOR else layout.inverse(weight, shape=weight.shape)
        multiply = linear_row_by_row if batch_invariant else F.linear
        result = multiply(x_TK, logical, bias)
        return result if out is None else out.copy_(result)
