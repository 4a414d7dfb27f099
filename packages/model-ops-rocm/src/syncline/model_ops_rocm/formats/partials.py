"""Maxima of parts of a weight, to be combined into the scales of all of it.

Unit: one weight's grid of scales. A scale whose block, or matrix, comes in several buckets or lies
on several ranks is known when the maxima of all parts are; then each part can be encoded by itself,
to the bytes of an encoding in one piece. Knows no transport.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AmaxPartial:
    """What is known of the maxima of `logical_shape`; add to it with `StorageFormat.amax_into`.

    bits: int32, one per scale: the largest magnitude so far, as the bits of a float32, and one NaN
    for whatever is not finite. It combines by an integer maximum: over ranks, all-reduce it with
    MAX. counts: int64, one per scale: elements seen so far; over ranks, all-reduce it with SUM.
    A scale can be had when all elements of its domain were counted, each once.
    """

    logical_shape: tuple[int, ...]
    bits: torch.Tensor
    counts: torch.Tensor

    def __post_init__(self) -> None:
        wanted = (("bits", self.bits, torch.int32), ("counts", self.counts, torch.int64))
        for name, tensor, dtype in wanted:
            if tensor.dtype is not dtype or tensor.shape != self.bits.shape:
                raise ValueError(
                    f"AmaxPartial: {name} must be {dtype} with shape {list(self.bits.shape)},"
                    f" got {tensor.dtype} {list(tensor.shape)}"
                )

    def combine(self, other: "AmaxPartial") -> "AmaxPartial":
        """Of both parts' elements, in new tensors; the order does not matter."""
        if self.logical_shape != other.logical_shape or self.bits.shape != other.bits.shape:
            raise ValueError(
                "AmaxPartial: other must be of the same shape and grid,"
                f" {list(self.logical_shape)} {list(self.bits.shape)}, got"
                f" {list(other.logical_shape)} {list(other.bits.shape)}"
            )
        return AmaxPartial(
            logical_shape=self.logical_shape,
            bits=torch.maximum(self.bits, other.bits),
            counts=self.counts + other.counts,
        )
