"""Notice that due snapshots slip too often, and say once why and what to do."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from lightck.events import event
from lightck.pipeline.inflight import SlipReason

STEPS = 100
"""The number of steps during which a slip counts."""
SHARE = 0.1
"""The fraction of the due snapshots in that time above which slips are told."""
LEAST_DUE = 10
"""The number of due snapshots below which nothing can be said."""

_REMEDIES: dict[str, str] = {
    SlipReason.SLOTS: "the medium does not finish one before the next is due: take a rarer policy"
    " (policy=10), a slot more (slots=), a faster path (tmpfs, persistent memory), or"
    ' durability="process" on an ordinary file; a reader (lightck export) holds a slot, too',
    SlipReason.DRAM: "the medium is slower than the steps: take a rarer policy (policy=10), a"
    " faster path (tmpfs, persistent memory), or placement='direct' where the medium can be mapped",
    SlipReason.COPY: "the device's copy is not written away before the next is due: take a rarer"
    ' policy (policy=10) or placement="host"',
    SlipReason.GRAPH: "snapshots begin outside of the recording of a graph: mark the update with"
    " handle.before_update() and handle.after_update()",
}
_ELSE = "take a rarer policy (policy=10); the event `slipped` of each has its reason"


@dataclass(eq=False)
class SlipWatch:
    """Counts the due snapshots of the last steps, and those that slipped (were skipped).

    Used by the training thread.
    """

    told: bool = False
    """True once a warning was given; there is one in a handle's life."""
    _due: deque[tuple[int, str | None]] = field(default_factory=deque)
    """The due snapshots' steps, and why each slipped (None: it was opened)."""

    def note(self, step: int, slip: str | None) -> None:
        """Note what became of the snapshot that was due at `step`; warn if too many slipped."""
        self._due.append((step, slip))
        while self._due[0][0] <= step - STEPS:
            self._due.popleft()
        if slip is None or self.told or len(self._due) < LEAST_DUE:
            return
        slips = [why for _, why in self._due if why is not None]
        if len(slips) <= SHARE * len(self._due):
            return
        self.told = True
        why = max(slips, key=slips.count)
        event(
            "slipping",
            logging.WARNING,
            step=step,
            slipped=len(slips),
            due=len(self._due),
            why=str(why),
            remedy=_REMEDIES.get(why, _ELSE),
        )
