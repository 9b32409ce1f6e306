"""Whether the step that has just ended is due: a policy, asked with what was measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lightck.capture.barrier import Alone, Barrier
from lightck.types import Moment, Policy


@dataclass(eq=False)
class Due:
    """Asks the policy, through the barrier of all ranks, and remembers its last yes."""

    policy: Policy
    barrier: Barrier = field(default_factory=Alone)
    epoch: int = 0
    """Epochs that the loop has marked."""
    overdue: bool = False
    """A due snapshot slipped: the next step is due instead."""
    step_s: float | None = None
    early: bool = False
    """At attach the live state was an early snapshot's: what the loop makes up for is in none."""
    replaced: bool = False
    """The state has been replaced since attach."""
    _last: Moment | None = None
    _ended_s: float | None = None

    @property
    def began(self) -> bool:
        """A step has ended since attach, or the state is another's."""
        return self.replaced or self._ended_s is not None

    @property
    def moved(self) -> bool:
        """The last complete step may be other than any snapshot since before attach."""
        return self.began or self.early

    def go_on_from(self, step: int) -> None:
        """The state is that of another step now."""
        self.replaced, self.overdue = True, False
        if self._last is not None and self._last.step >= step:
            self._last = None

    def ask(self, step: int, cost_s: float | None, persist_s: float | None, wanted: bool) -> bool:
        """Whether `step`, which ends now, is due.

        Args:
            step: the step.
            cost_s: training-thread seconds per snapshot so far.
            persist_s: seconds from opening to commit of the last snapshot.
            wanted: somebody asked for a snapshot at the next boundary.
        """
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
        return due
