"""The reference of the ops that store weights: a storage format does it by itself."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

from syncline.model_ops_rocm.arguments.jobs import faults_of_jobs
from syncline.model_ops_rocm.arguments.storing import (
    check_amax,
    check_encode,
    check_jobs,
    refuse_jobs,
)
from syncline.model_ops_rocm.errors import OpError
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.storage_format import StorageFormat
from syncline.model_ops_rocm.regions import Region


class TorchEncode:
    """See `contracts.Encode`; refuses what is not finite, where no flag is given, by waiting."""

    __slots__ = ()

    def workspace_bytes(
        self, storage_format: StorageFormat, logical_shape: SequenceABC[int]
    ) -> int:
        return 0

    def __call__(
        self,
        job: EncodeJob,
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        check_encode(job)
        job.storage_format.encode_into(
            job.out, job.source, job.region, scales=job.scales, nonfinite=nonfinite
        )


class TorchPreparedEncode:
    """See `contracts.PreparedEncode`; one job after another."""

    __slots__ = ("_jobs", "_nonfinite")

    def __init__(self, jobs: SequenceABC[EncodeJob], nonfinite: torch.Tensor | None) -> None:
        self._jobs = tuple(jobs)
        self._nonfinite = nonfinite

    @property
    def num_launches(self) -> int:
        return 0

    def __call__(self) -> None:
        for job in self._jobs:
            ENCODE(job, nonfinite=self._nonfinite)


class TorchEncodeGrouped:
    """See `contracts.EncodeGrouped`."""

    __slots__ = ()

    def workspace_bytes(self, weights: Iterable[tuple[StorageFormat, SequenceABC[int]]]) -> int:
        return 0

    def prepare(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> TorchPreparedEncode:
        check_jobs(jobs)
        refused: list[tuple[int, Exception]] = []
        for index, job in enumerate(jobs):
            try:
                job.check(nonfinite=nonfinite)
            except (ValueError, OpError) as error:
                refused.append((index, error))
        refuse_jobs("encode_grouped", refused or faults_of_jobs(jobs, nonfinite))
        return TorchPreparedEncode(jobs, nonfinite)

    def __call__(
        self,
        jobs: SequenceABC[EncodeJob],
        *,
        nonfinite: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.prepare(jobs, nonfinite=nonfinite)()


def amax_into(
    storage_format: StorageFormat,
    partial: AmaxPartial,
    source: torch.Tensor | CodedSource,
    region: Region,
) -> None:
    """See `contracts.AmaxInto`."""
    check_amax(storage_format, partial)
    storage_format.amax_into(partial, source, region)


ENCODE: Final = TorchEncode()
ENCODE_GROUPED: Final = TorchEncodeGrouped()
