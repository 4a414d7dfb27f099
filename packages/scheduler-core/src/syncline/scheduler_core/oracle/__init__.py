"""A model whose answers depend on all the KV it read, and a loop that drives a scheduler with it.

Use it to test a scheduler, a block manager, or a change to either: whatever makes a step read a
slot that holds something else, or that was never written, changes the output or raises.
"""

from syncline.scheduler_core.oracle.drafters import (
    Drafter,
    accept_all,
    accept_none,
    hash_drafter,
)
from syncline.scheduler_core.oracle.drive import (
    Outcome,
    Scenario,
    StuckError,
    apply_at_once,
    apply_when_full,
    run,
)
from syncline.scheduler_core.oracle.kv_array import OracleError, OracleKV, Slot
from syncline.scheduler_core.oracle.ledger import VersionLedger
from syncline.scheduler_core.oracle.model import HashModel, ReferenceOutput, reference_output
from syncline.scheduler_core.oracle.runner import OracleRunner
from syncline.scheduler_core.oracle.transport import (
    OracleTier,
    OracleTransport,
    Transfer,
    end_at_once,
    prefill_remotely,
)

__all__ = [
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
