"""The op implementations one engine runs, chosen once: no two paths of a model can differ.

Knows the names of the ops and nothing of their arithmetic.
"""

from dataclasses import dataclass
from typing import Self

import torch

from syncline.model_ops_rocm import (
    Embedding,
    KVCopyBlocks,
    KVWrite,
    Linear,
    PagedAttention,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    detect_arch,
    select,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation per op, all of one backend, architecture and dtype."""

    embedding: Embedding
    kv_copy_blocks: KVCopyBlocks
    kv_write: KVWrite
    linear: Linear
    paged_attention: PagedAttention
    rms_norm: RMSNorm
    rotary_embedding: RotaryEmbedding
    silu_and_mul: SiluAndMul

    @classmethod
    def select(cls, *, backend: str, device: torch.device, dtype: torch.dtype) -> Self:
        """Raises the op package's own errors: what is missing, and what there is instead."""
        arch = detect_arch(device)
        return cls(
            embedding=select("embedding", backend=backend, arch=arch, dtype=dtype),
            kv_copy_blocks=select("kv_copy_blocks", backend=backend, arch=arch, dtype=dtype),
            kv_write=select("kv_write", backend=backend, arch=arch, dtype=dtype),
            linear=select("linear", backend=backend, arch=arch, dtype=dtype),
            paged_attention=select("paged_attention", backend=backend, arch=arch, dtype=dtype),
            rms_norm=select("rms_norm", backend=backend, arch=arch, dtype=dtype),
            rotary_embedding=select("rotary_embedding", backend=backend, arch=arch, dtype=dtype),
            silu_and_mul=select("silu_and_mul", backend=backend, arch=arch, dtype=dtype),
        )
