"""Which KV layouts an implementation of an op takes, and whether several take the same one.

Unit: one implementation. A pool is written by one op and read by others, so its layout is agreed
on when it is built; nothing converts it afterwards. Knows no op's arguments.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder, KVScale

_NUMBERS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSupport:
    """Layouts with any of these; of the orders, the first is the one it is fastest with."""

    op: str
    backend: str
    orders: tuple[KVOrder, ...] = tuple(KVOrder)
    dtypes: tuple[torch.dtype, ...] = (*_NUMBERS, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    scales: tuple[KVScale, ...] = tuple(KVScale)
    block_sizes: tuple[int, int] | None = None  # the least and the most; None: any
    max_head_dim: int | None = None
    head_dim_multiple: int = 1

    def why_not(self, layout: KVLayout, head_dim: int) -> str | None:
        """What the implementation would need instead; None if it takes the layout."""
        low, high = self.block_sizes or (1, layout.kernel_block_size)
        for limit, is_met in (
            (f"an order of {', '.join(self.orders)}", layout.order in self.orders),
            (f"a dtype of {', '.join(map(str, self.dtypes))}", layout.dtype in self.dtypes),
            (f"a scale of {', '.join(self.scales)}", layout.scale in self.scales),
            (
                f"a kernel_block_size of {low} to {high}",
                low <= layout.kernel_block_size <= high,
            ),
            (
                f"a head_dim up to {self.max_head_dim}",
                self.max_head_dim is None or head_dim <= self.max_head_dim,
            ),
            (
                f"a head_dim that is a multiple of {self.head_dim_multiple}",
                head_dim % self.head_dim_multiple == 0,
            ),
        ):
            if not is_met:
                return limit
        return None


def require_agreement(layout: KVLayout, head_dim: int, supports: Iterable[KVSupport]) -> None:
    """LayoutError, naming the op, unless every implementation takes the layout."""
    for support in supports:
        wanted = support.why_not(layout, head_dim)
        if wanted is not None:
            raise LayoutError(
                layout=layout.describe(),
                precondition=f"{wanted} ({support.op} of backend {support.backend!r})",
                got=f"head_dim {head_dim}" if "head_dim" in wanted else layout.describe(),
            )
