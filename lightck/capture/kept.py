"""What is kept of one instant of a step, and whether what stands is still of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightck.capture.arrange import Sources
from lightck.capture.live import Live
from lightck.capture.state import Collected
from lightck.region.journal import STEP_END
from lightck.region.native import RECORD_EARLY


@dataclass(frozen=True, eq=False)
class Instant:
    """What is known of one instant of one step."""

    kind: int
    """STEP_END or FORWARD."""
    step: int
    first: dict[str, Any]
    second: dict[str, Any]
    """See `Instants.trees`."""
    collected: Collected
    """At (b) everything; at (a) a parameter or its state that is new may be missing."""
    copies: dict[str, torch.Tensor] | None
    """Private, of what changes in the window, by name; None: too much for every step."""
    watched: Sources | None = None
    """Of (b): every other tensor, with version and address (I5)."""

    @property
    def early(self) -> bool:
        """(b) was still to come."""
        return self.kind == STEP_END

    @property
    def flags(self) -> int:
        """For the record of a snapshot."""
        return RECORD_EARLY if self.early else 0

    def changed(self, shared: Sequence[Live]) -> str:
        """What is not any more what it was at (b), as far as can be seen; empty if nothing is.

        Args:
            shared: model and optimizers, just looked up.
        """
        private = self.copies is not None
        then = watched(self.collected.lives[: len(shared)], private=private)
        now = watched(shared, private=private)
        if [(v.name, id(v.tensor)) for v in now] != [(v.name, id(v.tensor)) for v in then]:
            return "the set of tensors has changed"
        if self.watched is None:
            return "" if private else "what a forward changes is not kept"
        moved = self.watched.changed()
        lives = watched(self.collected.lives, private=private)
        return f"{lives[moved[0]].name} was changed" if moved else ""


def watched(lives: Sequence[Live], *, private: bool) -> list[Live]:
    """All but what is kept privately."""
    return [live for live in lives if not (private and live.sync)]
