"""Steps: launch up to a depth, collect and apply the oldest; drained and fenced on demand.

Knows neither requests nor texts. The fence is how a weight update keeps forwards away: while it is
up nothing is launched, and it goes up only when nothing is in flight. A step that raises leaves the
state of scheduler and runner unknown, so the loop fails for good and says why from then on.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from syncline.engine.errors import EngineFailedError, NotReadyError
from syncline.engine.protocols import SchedulerLike
from syncline.engine.runner.protocol import Runner


class StepLoop:
    """One scheduler, one runner, and how many plans may be under way at once."""

    __slots__ = ("_failure", "_fence", "_max_steps_in_flight", "_runner", "_scheduler", "stall")

    def __init__(self, scheduler: SchedulerLike, runner: Runner, max_steps_in_flight: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._max_steps_in_flight = max_steps_in_flight
        self._fence: str | None = None
        self._failure: str | None = None
        # Why the last `advance` found nothing to do although requests are unfinished.
        self.stall: str | None = None

    @property
    def has_work(self) -> bool:
        """Unfinished requests, or results still to be collected."""
        return self._scheduler.has_unfinished or self._scheduler.steps_in_flight > 0

    @property
    def is_fenced(self) -> bool:
        return self._fence is not None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def require_unfenced(self, action: str) -> None:
        if self._fence is not None:
            raise NotReadyError(action, self._fence)

    def require_working(self) -> None:
        if self._failure is not None:
            raise EngineFailedError(self._failure)

    def advance(self) -> None:
        """Launch until the allowed depth, then collect and apply the oldest result, if any."""
        self.require_working()
        self.require_unfenced("step")
        with self._failing():
            self.stall = None
            while self._scheduler.steps_in_flight < self._max_steps_in_flight:
                plan = self._scheduler.plan()
                if plan is None:
                    self._note_stall()
                    break
                self._runner.launch(plan)
            self._apply_oldest()
            self._check_if_idle()

    def drain(self) -> None:
        """Collect and apply everything in flight; launches nothing."""
        self.require_working()
        if self._scheduler.steps_in_flight == 0:
            return
        with self._failing():
            while self._scheduler.steps_in_flight > 0:
                self._apply_oldest()
            self._check_if_idle()

    def raise_fence(self, reason: str) -> None:
        """No step from here on; refused while one is in flight or another fence is up."""
        self.require_unfenced("raise a fence")
        if self._scheduler.steps_in_flight > 0:
            raise NotReadyError("raise a fence", "steps are in flight")
        self._fence = reason

    def lift_fence(self) -> None:
        self._fence = None

    def _note_stall(self) -> None:
        if self._scheduler.steps_in_flight == 0 and self._scheduler.has_unfinished:
            self.stall = str(self._scheduler.idle_cause)

    def _apply_oldest(self) -> None:
        if self._scheduler.steps_in_flight > 0:
            self._scheduler.apply(self._runner.collect())

    def _check_if_idle(self) -> None:
        # Cheap, and a leaked or doubly held block is found at the first quiet moment.
        if not self.has_work:
            self._scheduler.check_integrity()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # Ctrl-C too: a step cut in the middle is no known state.
            self._failure = f"{type(error).__name__}: {error}"
            raise
