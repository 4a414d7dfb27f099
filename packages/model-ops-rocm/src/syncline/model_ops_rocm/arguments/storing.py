"""What the ops that store weights refuse before a format is asked; knows no backend."""

from collections.abc import Sequence as SequenceABC

from syncline.model_ops_rocm.checks import refuse, require_kind
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.storage_format import StorageFormat

ENCODE = "encode"
ENCODE_GROUPED = "encode_grouped"
AMAX = "amax_into"


def check_encode(job: EncodeJob) -> None:
    require_kind(ENCODE, "job", job, EncodeJob)


def check_jobs(jobs: SequenceABC[EncodeJob]) -> None:
    """A sequence of jobs, each of its class."""
    if not isinstance(jobs, SequenceABC):
        refuse(ENCODE_GROUPED, "jobs", "be a sequence of EncodeJob", repr(jobs))
    if not all(isinstance(job, EncodeJob) for job in jobs):
        for index, job in enumerate(jobs):
            require_kind(ENCODE_GROUPED, f"jobs[{index}]", job, EncodeJob)


def check_amax(storage_format: StorageFormat, partial: AmaxPartial) -> None:
    require_kind(AMAX, "storage_format", storage_format, StorageFormat)
    require_kind(AMAX, "partial", partial, AmaxPartial)


def refuse_jobs(op: str, refused: SequenceABC[tuple[int, Exception]]) -> None:
    """ValueError that names each of the jobs by its place among all, if there is one."""
    if refused:
        listed = "; ".join(f"jobs[{index}]: {error}" for index, error in refused)
        raise ValueError(f"{op}: {listed}") from refused[0][1]
