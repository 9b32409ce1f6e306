"""The conditions that one save waits for, and the step that devices have if they hang.

The training thread queues updates, and counts them. A device that hangs in the collective before an
update has the state before it, and keeps it; one that is only behind comes to the newest soon.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from lightck.journal.device_lag import Before
from lightck.loop.checkpointer import Recorder

DEVICE_PATIENCE_S = 1.0
"""Seconds without progress, and three steps, after which a device is taken to hang.

At most half of the time left.
"""
_STEPS = 3.0


class Waits(Enum):
    """The condition that a save waits for."""

    TRAINING = auto()
    """The training thread has to go on."""
    SLOT = auto()
    """A slot has to become free."""
    DEVICE = auto()
    """A device has to make the updates that training has queued."""


class Later(Exception):  # noqa: N818 - no error
    """The save cannot be made now: another condition has to hold first."""

    def __init__(self, why: str, waits: Waits) -> None:
        super().__init__(why)
        self.waits = waits


@dataclass(eq=False)
class Standing:
    """The observation of a recorder's devices for one save."""

    recorder: Recorder
    most: float
    """The time of `time.monotonic` at which it stops waiting."""
    _first: tuple[int, Before | None] | None = None
    """The step and the devices' state at the first look."""
    _last: Before | None = None
    _since: float = field(default_factory=time.monotonic)
    """The time since which the devices have `_last`."""

    def before(self, *, hangs: bool) -> Before | None:
        """Return the state that hanging devices have; None if training's state is the one to save.

        Called under the recorder's lock.

        Args:
            hangs: training hangs, as far as is known already.

        Raises:
            Later: devices may yet make the updates that training has queued.
            DeviceError: a device has failed.
        """
        behind, step = self.recorder.behind, self.recorder.steps.step
        if behind is None:
            return None
        before = behind.there()
        if before is None and behind.offload.has_come:
            return None
        now = time.monotonic()
        if self._first is None:
            self._first, self._last = (step, before), before
        if step != self._first[0] and before is not self._first[1]:
            return None  # both go on: the devices are about to have the wanted state
        if before is not self._last:
            self._last, self._since = before, now
        step_s = max(behind.pace_s, self.recorder.cadence.step_s or 0.0)
        patience = max(DEVICE_PATIENCE_S, _STEPS * step_s)
        known = hangs or before is behind.taken
        if before is None or (not known and now < min(self._since + patience, self.most)):
            raise Later(f"a device has not come to the end of step {step}", Waits.DEVICE)
        return before

    def take(self, before: Before | None) -> None:
        """Claim a state of hanging devices: a snapshot of it is committed or being written."""
        if before is not None and self.recorder.behind is not None:
            self.recorder.behind.take(before)
