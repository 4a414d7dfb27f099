"""What is wrong with a table of jobs, in one wording; knows no format and no backend."""

from collections.abc import Sequence as SequenceABC


def refuse_jobs(op: str, refused: SequenceABC[tuple[int, Exception]]) -> None:
    """ValueError that names each of the jobs by its place among all, if there is one."""
    if refused:
        listed = "; ".join(f"jobs[{index}]: {error}" for index, error in refused)
        raise ValueError(f"{op}: {listed}") from refused[0][1]
