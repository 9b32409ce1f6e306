"""Ask the policy, with what was measured, whether the step that has just ended is due."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightck.pipeline.commit_barrier import CommitBarrier
from lightck.types import Moment, Policy


@dataclass(eq=False)
class DueCheck:
    """Asks the policy, through the barrier of all ranks, and remembers its last due step."""

    policy: Policy
    barrier: CommitBarrier
    early: bool = False
    """True if the state at attach was an early snapshot's.

    What the loop has made up for since is in no snapshot then.
    """
    epoch: int = 0
    """Number of epochs that the loop has marked."""
    overdue: bool = False
    """True if a due snapshot was skipped: the next step is due instead."""
    step_s: float | None = None
    replaced: bool = False
    """True if the state has been replaced since attach."""
    _last: Moment | None = None
    _answer: tuple[int, bool] | None = None
    """The last step that was asked for, and the answer."""
    _ended_s: float | None = None

    @property
    def began(self) -> bool:
        """Tell whether a step has ended since attach, or the state was replaced."""
        return self.replaced or self._ended_s is not None

    @property
    def moved(self) -> bool:
        """Tell whether the last complete step may differ from all snapshots since before attach."""
        return self.began or self.early

    def end_epoch(self) -> None:
        """Count one more epoch, for policies that do."""
        self.epoch += 1

    def skipped(self, *, made_up: bool) -> None:
        """Note that the due snapshot was skipped; `made_up`: the next step is due instead."""
        self.overdue = made_up

    def go_on_from(self, step: int) -> None:
        """Note that the state has been replaced by that of `step`."""
        self.replaced, self.overdue = True, False
        self._answer = None
        if self._last is not None and self._last.step >= step:
            self._last = None

    def ask(self, step: int, cost_s: float | None, persist_s: float | None, wanted: bool) -> bool:
        """Tell whether `step`, which ends now, is due, and remember it if it is.

        A step may be asked for twice: early, where its update is about to make the snapshot, and at
        its end. The policy is asked once; what has become due in between counts, too.

        Args:
            step: the last complete step.
            cost_s: training-thread seconds per snapshot so far.
            persist_s: seconds from opening to commit of the last snapshot.
            wanted: somebody has asked for a snapshot at the next boundary.
        """
        if self._answer is not None and self._answer[0] == step:
            due = self._answer[1] or self.overdue or (wanted and self.barrier.request(step))
            self.overdue = False
            return due
        now = time.monotonic()
        if self._ended_s is not None:
            self.step_s = now - self._ended_s
        self._ended_s = now
        last = self._last
        moment = Moment(
            step=step,
            time_s=now,
            epoch=self.epoch,
            last_step=last.step if last else None,
            last_time_s=last.time_s if last else None,
            last_epoch=last.epoch if last else None,
            cost_s=cost_s,
            persist_s=persist_s,
            step_s=self.step_s,
        )
        due = self.barrier.due(moment, self.policy) or self.overdue
        due = due or (wanted and self.barrier.request(step))
        if due:
            self._last = moment
            self.overdue = False
        self._answer = step, due
        return due
