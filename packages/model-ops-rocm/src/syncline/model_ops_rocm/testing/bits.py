"""Random bit patterns and their comparison, for tests that permute; knows no layout."""

import torch


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with payloads too."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, as integers of their size."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(integers[tensor.itemsize])
