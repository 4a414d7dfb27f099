"""Everything this package raises for a broken contract; bad arguments are plain ValueError.

    SchedulerError
    |-- StepOrderError       a result came for another step than the oldest one in flight
    |-- ResultError          a result does not have the shape its plan asked for
    |-- StepsInFlightError   an action that needs an idle device found steps in flight
    |-- TransferError        a transfer was reported that is not under way
    |-- TransfersInFlightError   an action that needs every block found transfers that own some
    |-- StopMatcherError     a stop matcher failed; caught here, it ends that one sequence
    |-- StateError           the books contradict each other: a bug in this package
    `-- oracle.OracleError   the oracle runner saw a plan read or write what it must not

StepOrderError, ResultError and the errors of transfers and of steps in flight leave the scheduler
as it was. Scarcity is not an error: `Scheduler.plan` returns None and `idle_cause` says why.
"""


class SchedulerError(Exception):
    """Base of every error of this package."""


class StepOrderError(SchedulerError):
    """Results are applied in step order: `expected` was due (None: nothing in flight)."""

    def __init__(self, expected: int | None, got: int) -> None:
        due = "no step is in flight" if expected is None else f"step {expected} is due"
        super().__init__(f"result of step {got} cannot be applied: {due}")
        self.expected = expected
        self.got = got


class ResultError(SchedulerError):
    """The result of step `step_id` does not fit its plan; `detail` says where."""

    def __init__(self, step_id: int, detail: str) -> None:
        super().__init__(f"result of step {step_id}: {detail}")
        self.step_id = step_id
        self.detail = detail


class StepsInFlightError(SchedulerError):
    """`action` needs every launched step to be applied first; `num_steps` are not."""

    def __init__(self, action: str, num_steps: int) -> None:
        super().__init__(f"cannot {action}: {num_steps} steps are in flight; apply them first")
        self.action = action
        self.num_steps = num_steps


class TransferError(SchedulerError):
    """No `kind` ("load", "store", "send") of id `transfer_id` is under way: unknown, or reported
    before."""

    def __init__(self, kind: str, transfer_id: int) -> None:
        super().__init__(f"{kind} {transfer_id} is not under way: unknown, or reported already")
        self.kind = kind
        self.transfer_id = transfer_id


class TransfersInFlightError(SchedulerError):
    """`action` needs every block, but `num_transfers` transfers own some."""

    def __init__(self, action: str, num_transfers: int) -> None:
        super().__init__(
            f"cannot {action}: {num_transfers} transfers own blocks; report their ends first"
        )
        self.action = action
        self.num_transfers = num_transfers


class StopMatcherError(SchedulerError):
    """A sequence's stop matcher failed; `detail` says how. The sequence ends with that detail."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class StateError(SchedulerError):
    """The scheduler's books contradict each other; `detail` says where."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
