"""Writing the KV cache by AITER; knows slots, not who holds a block."""

from typing import Final

import torch

from syncline.model_ops_rocm.aiter.ops.common import HALVES, AiterOp, require_device
from syncline.model_ops_rocm.arguments.attention import check_layout_write, pool_of, require_support
from syncline.model_ops_rocm.arguments.dense import KV_WRITE, check_kv_apart
from syncline.model_ops_rocm.checks import refuse
from syncline.model_ops_rocm.contracts.attention import KVScales
from syncline.model_ops_rocm.kv.layout import KVLayout, KVOrder, KVScale
from syncline.model_ops_rocm.kv.support import KVSupport

SUPPORT: Final = KVSupport(
    op=KV_WRITE,
    backend="aiter",
    orders=(KVOrder.AITER_X_SHUFFLED_V, KVOrder.AITER_X, KVOrder.NHD),
    dtypes=HALVES,
    scales=(KVScale.NONE,),
)
_UNQUANTISED: Final = "auto"


class AiterKVWrite(AiterOp):
    """`reshape_and_cache` into the orders of its own, `reshape_and_cache_flash` into NHD."""

    __slots__ = ()

    @property
    def kv_support(self) -> KVSupport:
        return SUPPORT

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        may_skip: bool = True,
        layout: KVLayout | None = None,
        kv_scales: KVScales | None = None,
    ) -> None:
        """See `contracts.KVWrite`; -1 costs nothing here, so `may_skip` changes nothing."""
        if layout is None:
            refuse(KV_WRITE, "layout", f"be one of {', '.join(SUPPORT.orders)} for AITER", None)
        pool = pool_of(KV_WRITE, k_cache, v_cache, layout, kv_scales)
        require_support(KV_WRITE, SUPPORT, pool)
        num_tokens = check_layout_write(k_TKH, v_TKH, pool, slot_mapping)
        check_kv_apart((k_cache, v_cache), k_TKH, v_TKH, slot_mapping, kv_scales, layout)
        device = require_device(
            KV_WRITE,
            self.aiter,
            k=k_TKH,
            v=v_TKH,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=slot_mapping,
        )
        is_flash = layout.order == KVOrder.NHD
        write = self.aiter.function("reshape_and_cache_flash" if is_flash else "reshape_and_cache")
        # Its shape names a block at least, so an empty cache is known by its tensor.
        num_slots = k_cache.shape[0] * layout.kernel_block_size
        slots = _known_slots(slot_mapping, num_slots)
        if num_tokens == 0 or num_slots == 0:
            return
        call = (k_TKH.contiguous(), v_TKH.contiguous(), k_cache, v_cache, slots, _UNQUANTISED)
        if is_flash:
            # This one wants scales whether it uses them or not.
            one = torch.ones(1, dtype=torch.float32, device=device)
            write(*call, one, one)
        else:
            shuffled_v = layout.order == KVOrder.AITER_X_SHUFFLED_V
            write(*call, None, None, asm_layout=shuffled_v)


def _known_slots(slot_mapping: torch.Tensor, num_slots: int) -> torch.Tensor:
    """int64 slots: AITER skips negative ones, and would write wherever a large one points."""
    slots = slot_mapping.long()
    outside = slots >= num_slots
    if slot_mapping.device.type == "cpu" and bool((outside | (slots < -1)).any()):
        refuse(KV_WRITE, "slot_mapping", f"be -1 or in [0, {num_slots})", "one outside")
    return slots.masked_fill(outside, -1)
