"""For one save: what it has to wait for, and whether devices have another step than training has.

The training thread queues updates, and counts them. A device that hangs in the collective before
one has the state before it, and keeps it; one that is only behind comes to the newest soon.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from lightck.capture.behind import Before
from lightck.capture.recorder import Recorder

PATIENCE_S = 1.0
"""How long a device is to stand before it is taken to hang, and three steps; half of the time that
there is at most."""
_STEPS = 3.0


class Waits(Enum):
    """For what."""

    TRAINING = auto()
    """The training thread has to go on."""
    SLOT = auto()
    """A place in the region."""
    DEVICE = auto()
    """A device has to come to what training has given it."""


class Later(Exception):  # noqa: N818 - no error
    """Not now: something has to come first."""

    def __init__(self, why: str, waits: Waits) -> None:
        super().__init__(why)
        self.waits = waits


@dataclass(eq=False)
class Standing:
    """Looks at the devices of a recorder, for one save."""

    recorder: Recorder
    most: float
    """Time of `time.monotonic` at which it waits no more."""
    _first: tuple[int, Before | None] | None = None
    """Step and what devices had when the first look was taken."""
    _last: Before | None = None
    _since: float = field(default_factory=time.monotonic)
    """That they have that."""

    def before(self, *, hangs: bool) -> Before | None:
        """The state that hanging devices have; None: what training has is what counts.

        Under the recorder's lock.

        Args:
            hangs: training does, as far as is known already.

        Raises:
            Later: they may yet come to what training has given them.
            DeviceError: one has failed.
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
            return None  # both go on: it is about to have what is asked for now
        if before is not self._last:
            self._last, self._since = before, now
        step_s = max(behind.pace_s, self.recorder.cadence.step_s or 0.0)
        patience = max(PATIENCE_S, _STEPS * step_s)
        known = hangs or before is behind.taken
        if before is None or (not known and now < min(self._since + patience, self.most)):
            raise Later(f"a device has not come to the end of step {step}", Waits.DEVICE)
        return before

    def take(self, before: Before | None) -> None:
        """A snapshot of it is there, or on its way."""
        if before is not None and self.recorder.behind is not None:
            self.recorder.behind.take(before)
