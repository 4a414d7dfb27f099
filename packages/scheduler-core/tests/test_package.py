"""The agreed public names, and the README's examples."""

import re
from pathlib import Path

import syncline.scheduler_core as scheduler_core
import syncline.scheduler_core.oracle as oracle

AGREED = [
    "AbortAll",
    "AbortRequest",
    "AddRequest",
    "ApplyResult",
    "BumpKVEpoch",
    "Column",
    "ColumnSpan",
    "FinishLoad",
    "FinishReason",
    "FinishSend",
    "FinishStore",
    "FlushPrefixCache",
    "FlushReport",
    "Handoff",
    "IdleCause",
    "KVLoad",
    "KVStore",
    "OffloadConnector",
    "Pause",
    "PauseMode",
    "PlanStep",
    "PreemptAll",
    "PreemptOne",
    "PrefillChunk",
    "Record",
    "RecordingScheduler",
    "RemotePrefill",
    "Request",
    "RequestTimings",
    "ResizePool",
    "ResultError",
    "Resume",
    "RowError",
    "RowId",
    "RowJoin",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerMetrics",
    "SchedulerStats",
    "SchedulingPolicy",
    "Sequence",
    "SequenceId",
    "SequenceSummary",
    "SetWeightVersion",
    "StateError",
    "StepOrderError",
    "StepPlan",
    "StepResult",
    "StepsInFlightError",
    "StopMatch",
    "StopMatcher",
    "StopMatcherError",
    "StopRules",
    "TransferError",
    "TransferId",
    "TransfersInFlightError",
    "UnfinishedPolicy",
    "replay",
]

AGREED_ORACLE = [
    "Drafter",
    "HashModel",
    "OracleError",
    "OracleKV",
    "OracleRunner",
    "OracleTier",
    "OracleTransport",
    "Outcome",
    "ReferenceOutput",
    "Scenario",
    "Slot",
    "StuckError",
    "Transfer",
    "VersionLedger",
    "accept_all",
    "accept_none",
    "apply_at_once",
    "apply_when_full",
    "end_at_once",
    "hash_drafter",
    "prefill_remotely",
    "reference_output",
    "run",
]


def test_the_public_names_are_the_agreed_ones() -> None:
    assert scheduler_core.__all__ == AGREED
    assert all(hasattr(scheduler_core, name) for name in AGREED)


def test_the_public_names_of_the_oracle_are_the_agreed_ones() -> None:
    assert oracle.__all__ == AGREED_ORACLE
    assert all(hasattr(oracle, name) for name in AGREED_ORACLE)


def test_the_readme_examples_run() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(examples) == 5
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
