"""Contracts of the products with a stored weight; knows no backend. Legend: package docstring."""

from collections.abc import Sequence as SequenceABC
from typing import Protocol

import torch

from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.layouts.base import WeightLayout


class Linear(Protocol):
    """y = x @ weight^T + bias, from the bytes of the weight as they are stored."""

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        """What `layout` may be, the preferred one first; others are a LayoutError, never converted.

        The torch backend, against which the others are compared, reads every layout that keeps the
        shape, and lists those that another backend reads too.
        """
        ...

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        """What `workspace` must hold for up to `max_tokens` rows of x; 0 where none is needed."""
        ...

    def counters_size(self, weight: torch.Tensor, max_tokens: int) -> int:
        """How many `counters` suffice for up to `max_tokens` rows of x; 0 where none are used."""
        ...

    def __call__(  # noqa: PLR0913 - three tensors, and where to write
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
        """x [..., K_in], weight stored in `layout` with logical shape [N_out, K_in], bias [N_out].

        The layout is an argument, never a flag on the tensor: a weight that is stored shuffled and
        read as row-major gives wrong numbers, which no op can notice.
        Sums in float32 or better, one rounding to x's dtype; the order of the sum is the backend's,
        and may depend on the number of rows. With `batch_invariant` it does not: the bits of a row
        are the same whatever other rows there are. Without `counters`, parts of sums take a second
        launch.
        """
        ...


class LinearQuantised(Protocol):
    """y = x @ weight^T + bias, from stored codes and scales, of x too if it comes in codes."""

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        """What `storage.layout` may be; see `Linear`."""
        ...

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        """What `workspace` must hold for up to `max_tokens` rows of x; 0 where none is needed."""
        ...

    def counters_size(self, weight: torch.Tensor, max_tokens: int) -> int:
        """How many `counters` suffice for up to `max_tokens` rows of x; 0 where none are used."""
        ...

    def __call__(  # noqa: PLR0913 - two tensors are four, and each has its recipe
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
        """`weight` and `weight_scale` as `storage`, with a quantised recipe, stores [N_out, K_in].

        Without `x_recipe`, x is floating point, [..., K_in]; the product is with the decoded
        weight. With it, x is codes of a contiguous [T, K_in], `x_scale` their scales, both as the
        recipe stores them: one scale for all, per row, or per 128 or 32 of a row. `dtype` is then
        the result's, and bias's; else it is x's, and None.
        Products of codes are exact, their sums in float32 or better, with at most 128 of K summed
        otherwise. Scales multiply in float32: those of blocks of K the block's sum or its decoded
        codes, the others the whole sum. One rounding to the result's dtype. A NaN scale makes NaN.
        Which recipes of x go with which of the weight, a backend says: it refuses by ValueError.
        `batch_invariant`, `workspace` and `counters` as in `Linear`.
        """
        ...
