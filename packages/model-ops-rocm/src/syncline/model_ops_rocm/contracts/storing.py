"""Contracts of the ops that store weights; know no name of a weight and no transport."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from typing import Protocol

import torch

from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.regions import Region


class Encode(Protocol):
    """A region of a weight, stored: what `StorageFormat.encode_into` writes, to the same bytes."""

    def workspace_bytes(
        self, storage_format: StorageFormat, logical_shape: SequenceABC[int]
    ) -> int:
        """What a call for any region of such a weight needs; 0 where one pass is enough."""
        ...

    def __call__(
        self,
        job: EncodeJob,
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Store the job's source, with the rounding and the refusals of `encode_into`.

        `nonfinite` is its flag: a bool of one element, which becomes true if a number or a given
        scale is none that can be stored. A backend that does not wait for the device cannot refuse
        such a number: there a recipe with scales needs the flag.
        """
        ...


class PreparedEncode(Protocol):
    """Jobs that were checked and described on the device once; a call stores what they hold then.

    Addresses are kept: sources, storage, given scales, flag and workspace must stay where they are,
    with nothing else written to the workspace; their contents are read anew by each call. A call
    copies nothing from the host, waits for nothing, allocates and compiles nothing, so that it can
    be recorded in a graph; two that share a workspace must not overlap.
    """

    @property
    def num_launches(self) -> int:
        """How many there are in a call, however many jobs: 0 where a backend launches no kernels.

        One for each kind of job, and a kind is what one kernel is compiled for: types of source and
        storage, recipe and layouts, whether scales are given, and whether rows, columns and
        addresses are whole vectors. A scale that takes two passes adds a launch that makes maxima
        and one that clears them; a layout that pads its scales adds one that fills the padding.
        """
        ...

    def __call__(self) -> None:
        """Store each job's source, as it is now."""
        ...


class EncodeGrouped(Protocol):
    """Many weights stored, by a launch for each kind of them; the bytes are those of `Encode`."""

    def workspace_bytes(self, weights: Iterable[tuple[StorageFormat, SequenceABC[int]]]) -> int:
        """What jobs for any regions of such weights need, one of each: for a table of them on the
        device, and for maxima where a scale takes two passes. `weights` are formats and logical
        shapes.
        """
        ...

    def prepare(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> PreparedEncode:
        """Check all jobs, describe them in `workspace` and compile what stores them.

        One flag for all. Jobs may store parts of one slot, given by the same tensors; but no two
        jobs write the same bytes, save scales that one tensor gives to both, and none writes what
        another one reads. Each must be whole in the domains of its scales or have them given.
        ValueError that names every wrong job by its place. Codes that come must have the type that
        is stored, or be encoded anew: their conversion looks at scales on the host. Not while a
        graph is recorded.
        """
        ...

    def __call__(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Prepare the jobs, of which codes may be converted, and store them once."""
        ...


class AmaxInto(Protocol):
    """Maxima of a region added to a partial: what `StorageFormat.amax_into` does, equal bits."""

    def __call__(
        self,
        storage_format: StorageFormat,
        partial: AmaxPartial,
        source: torch.Tensor | CodedSource,
        region: Region,
    ) -> None:
        """Add `source`, the elements of `region`, any rectangle, to `partial` in place."""
        ...
