"""Linear, RMSNorm and embedding: an op, the stored weight it reads, and where that comes from.

A layer holds the arena's own tensor and never a view of it: after a wake the arena may have moved
the bytes, and only the tensor it handed out follows them.
"""

from collections.abc import Mapping

from torch import Tensor

from syncline.engine.layers.ops import Ops
from syncline.engine.weights import WeightBuilder


class Linear:
    """y = x W^T + b for one or several checkpoint weights stacked by rows, as one slot.

    `parts` maps the checkpoint prefix of each part to its rows: ("...q_proj", 64) is fed by
    "...q_proj.weight" and, with a bias, "...q_proj.bias".
    """

    __slots__ = ("_bias", "_layout", "_op", "_weight")

    def __init__(
        self,
        ops: Ops,
        builder: WeightBuilder,
        name: str,
        parts: Mapping[str, int],
        in_features: int,
        *,
        has_bias: bool = False,
    ) -> None:
        weights = {f"{part}.weight": rows for part, rows in parts.items()}
        self._op = ops.linear
        self._layout = builder.linear_layout
        self._weight = builder.linear(f"{name}.weight", weights, in_features)
        biases = {f"{part}.bias": rows for part, rows in parts.items()}
        self._bias = builder.vector(f"{name}.bias", biases) if has_bias else None

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._op(x_TK, self._weight, self._bias, layout=self._layout)


class RMSNorm:
    """Root mean square norm over the last dimension."""

    __slots__ = ("_eps", "_op", "_weight")

    def __init__(self, ops: Ops, builder: WeightBuilder, name: str, size: int, eps: float) -> None:
        self._op = ops.rms_norm
        self._eps = eps
        self._weight = builder.vector(f"{name}.weight", {f"{name}.weight": size})

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """With a residual: `residual` becomes x + residual, and the norm of that is returned."""
        return self._op(x, self._weight, self._eps, residual_TH=residual)


class Embedding:
    """Rows of a table by token id; `weight` may serve as a tied head."""

    __slots__ = ("_op", "weight")

    def __init__(
        self, ops: Ops, builder: WeightBuilder, name: str, num_rows: int, hidden_size: int
    ) -> None:
        self._op = ops.embedding
        self.weight = builder.table(f"{name}.weight", num_rows, hidden_size)

    def __call__(self, ids_T: Tensor) -> Tensor:
        return self._op(ids_T, self.weight)
