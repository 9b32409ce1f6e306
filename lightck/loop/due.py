"""Ask the policy, with what was measured and learned, whether the step that has ended is due."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from lightck.events import event
from lightck.loop.policy_state import PolicyState
from lightck.loop.step_times import StepTimes
from lightck.pipeline.commit_barrier import CommitBarrier
from lightck.policy import AnyOf, OnBest
from lightck.policy.combination import interval_of, needs_of, single_policies, why_of
from lightck.state.extras import Epochs
from lightck.types import Moment, Policy

_TOLD_S = 1.0
_TOLD_FACTOR = 2.0
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Measured:
    """The engine's measurements when a step ends.

    Attributes:
        stalled_s: seconds that the training thread has spent in lightck so far.
        stall_s: those of one snapshot, lately; None before the first.
        persist_s: seconds from opening to commit of the last snapshot; None before the first.
        captured: snapshots that were captured so far.
        saved_step: the newest step that is committed on all ranks.
        in_flight: whether a snapshot is on its way.
    """

    stalled_s: float
    stall_s: float | None
    persist_s: float | None
    captured: int
    saved_step: int | None
    in_flight: bool


@dataclass(eq=False)
class DueCheck:
    """Asks the policy, through the barrier of all ranks, and remembers its last due step."""

    policy: Policy
    barrier: CommitBarrier
    early: bool = False
    """True if the state at attach was an early snapshot's, or a lost rank's that this one replaces.

    What the loop has made up for since is in no snapshot then.
    """
    state: PolicyState | None = None
    """The policies' state; None if this policy learns nothing."""
    world: int = 1
    """Number of ranks."""
    epochs: Epochs = field(default_factory=lambda: Epochs(0))
    """The epochs that the loop has marked."""
    healed: bool = False
    """True until a step ends, if ranks were given what was restored: that step is due.

    Until then the donor alone has what was restored, and a rank's own part of it may lie in its
    journal alone, which the next entries overwrite.
    """
    overdue: bool = False
    """True if a due snapshot was skipped: the next step is due instead."""
    times: StepTimes = field(default_factory=StepTimes)
    replaced: bool = False
    """True if the state has been replaced since attach."""
    _last: Moment | None = None
    _asked: Moment | None = None
    """The moment that was asked about last."""
    _answer: tuple[int, bool] | None = None
    """The last step that was asked for, and the answer."""
    _captured: int = 0
    _tell_at_s: float = 0.0
    _told_s: float | None = None
    """The interval that was told last."""
    _first_epoch: int | None = field(init=False)
    """The epochs that were marked before attach; None: none were."""
    _holds: bool = field(init=False)
    """True if every part of the policy takes nothing while the loss is no number."""

    def __post_init__(self) -> None:
        """Look at the policy's parts."""
        self._first_epoch = self.epochs.marked or None
        self._holds = all("loss" in needs_of(part) for part in single_policies(self.policy))

    @property
    def step_s(self) -> float | None:
        """Return the median seconds of the last steps; None until known."""
        return self.times.step_s

    @property
    def began(self) -> bool:
        """Tell whether a step has ended since attach, or the state was replaced."""
        return self.replaced or self._asked is not None

    @property
    def moved(self) -> bool:
        """Tell whether the last complete step may differ from all snapshots since before attach."""
        return self.began or self.early

    @property
    def why(self) -> str:
        """Return a sentence on how often snapshots are taken now, and why. Any thread."""
        asked = self._asked
        return str(self.policy) if asked is None else why_of(self.policy, asked)

    @property
    def risk(self) -> str:
        """Return what threatens the region's medium; empty: nothing that is known. Any thread."""
        return self.state.risk if self.state is not None else ""

    def skipped(self, *, made_up: bool) -> None:
        """Note that the due snapshot was skipped; `made_up`: the next step is due instead."""
        self.overdue = made_up

    def go_on_from(self, step: int) -> None:
        """Note that the state has been replaced by that of `step`."""
        self.replaced, self.overdue = True, False
        self._answer = None
        if self._last is not None and self._last.step >= step:
            self._last = None

    def ask(self, step: int, measured: Measured, wanted: bool) -> bool:
        """Tell whether `step`, which ends now, is due, and remember it if it is.

        A step may be asked for twice: early, where its update is about to make the snapshot, and at
        its end. The policy is asked once; what has become due in between counts, too.

        Args:
            step: the last complete step.
            measured: what was measured so far.
            wanted: somebody has asked for a snapshot at the next boundary.
        """
        wanted, self.healed = wanted or self.healed, False
        if self._answer is not None and self._answer[0] == step:
            made_up, self.overdue = self.overdue and not self._is_held, False
            return self._answer[1] or made_up or (wanted and self.barrier.request(step))
        moment = self._asked = self._moment(step, measured)
        due = self._is_due(moment) or (wanted and self.barrier.request(step))
        if self.state is not None:
            self.state.metrics_asked()
        if due:
            self._last = moment
            self.overdue = False
        self._answer = step, due
        self._tell(moment)
        return due

    @property
    def _is_held(self) -> bool:
        return self._holds and self._asked is not None and not self._asked.finite

    def _is_due(self, moment: Moment) -> bool:
        due = self.barrier.due(moment, self.policy)
        if not self._is_held:
            return due or self.overdue
        if due:  # rank 0 had announced it while the loss was a number
            self.barrier.lost(moment.step, "the loss is no number")
        return False

    def _moment(self, step: int, measured: Measured) -> Moment:
        now, times, state, last = time.monotonic(), self.times, self.state, self._last
        step_s = times.step_ended(now, measured.stalled_s, measured.captured, measured.in_flight)
        cost_s, persist_s = times.cost_s(measured.stall_s), measured.persist_s
        times.spent(now, cost_s, measured.captured - self._captured)
        self._captured = measured.captured
        if state is not None:
            state.cost_known(cost_s, persist_s, times.quiet_s)
            state.step_ended(step, step_s, times.step_s)
            cost_s, persist_s = state.known_cost_s, state.known_persist_s
        return Moment(
            step=step,
            time_s=now,
            epoch=self.epochs.marked,
            last_step=last.step if last else None,
            last_time_s=last.time_s if last else None,
            last_epoch=last.epoch if last else self._first_epoch,
            cost_s=cost_s,
            persist_s=persist_s,
            step_s=times.step_s,
            quiet_s=times.quiet_s,
            quiet_age=times.quiet_age,
            saved_step=measured.saved_step,
            in_flight=measured.in_flight,
            hazard=None if state is None else state.hazard,
            progress=None if state is None else state.progress,
            finite=state is None or state.finite,
            world=self.world,
            metrics=_NOTHING if state is None else state.metrics,
            extremes=_NOTHING if state is None else state.extremes,
        )

    def reported(self, metrics: Mapping[str, float]) -> bool:
        """Take note of metrics of the last complete step; tell whether they make it due.

        Every rank gets the same answer, if all report the same: it is asked of a policy that is
        due on a best value whatever else there is. Others are asked at the end of the next step.
        """
        if self.state is None:
            return False
        self.state.report(metrics)
        asked = self._asked
        if asked is None:
            return False
        now = replace(asked, metrics=self.state.metrics, extremes=self.state.extremes)
        parts = self.policy.policies if isinstance(self.policy, AnyOf) else (self.policy,)
        return any(isinstance(part, OnBest) and part.due(now) for part in parts)

    def made_due(self) -> None:
        """Note that the last step that was asked for is due after all, for a metric's sake."""
        self._last, asked = self._asked, self._asked
        if asked is not None:
            self._answer = asked.step, True
        if self.state is not None:
            self.state.metrics_asked()

    def _tell(self, moment: Moment) -> None:
        """Log the interval once it has changed by more than a factor, once a second at most."""
        if moment.time_s < self._tell_at_s:
            return
        self._tell_at_s = moment.time_s + _TOLD_S
        every_s, told_s = interval_of(self.policy, moment), self._told_s
        if every_s is None or every_s <= 0 or self.state is None:
            return
        if told_s is None or not told_s / _TOLD_FACTOR <= every_s <= told_s * _TOLD_FACTOR:
            self._told_s = every_s
            event("policy", step=moment.step, every_s=round(every_s, 3), why=self.why)
