"""Kernels ahead that write late, for what must not be read before its writer has ended."""

from collections.abc import Iterable

import torch

_BLOCK = 16_384


def write_late(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Launches, for each (source, target), a kernel that copies some 0.4 ms after it began.

    The next kernel may begin as soon as the last of them has. A source is copied whole to where its
    target, which may be longer, begins; both lie close, in a multiple of 4 bytes, on a GPU of sm_90
    or later. Imports Triton.
    """
    from syncline.model_ops_rocm.triton.kernels.late import late_copy_kernel

    for source, target in pairs:
        source_N, target_N = (one.view(-1).view(torch.int32) for one in (source, target))
        assert len(source_N) <= len(target_N)
        grid = (-(-len(source_N) // _BLOCK),)
        late_copy_kernel[grid](
            source_N, target_N, len(source_N), BLOCK=_BLOCK, num_warps=8, launch_pdl=True
        )
