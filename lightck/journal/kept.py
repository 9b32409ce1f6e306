"""Keep the state of one instant of a step, and tell whether the live state is still of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightck.pipeline.copy_plan import Sources
from lightck.region.journal import STEP_END
from lightck.region.native_region import RECORD_EARLY
from lightck.state.inventory import Collected
from lightck.state.live import Live


@dataclass(frozen=True, eq=False)
class Instant:
    """State that is kept of one instant of one step."""

    kind: int
    """Kind of the instant: STEP_END or FORWARD."""
    step: int
    first: dict[str, Any]
    second: dict[str, Any]
    """Values of step end (`first`) and of forward start (`second`), see `Instants.trees`."""
    collected: Collected
    """All state at forward start; at step end a new parameter or its state may be missing."""
    copies: dict[str, torch.Tensor] | None
    """Private copies, by name, of what changes in the window; None: too much for every step."""
    watched: Sources | None = None
    """Every other tensor at forward start, with version and address, by which changes are seen."""

    @property
    def early(self) -> bool:
        """Tell whether forward start was still to come."""
        return self.kind == STEP_END

    @property
    def flags(self) -> int:
        """Flags for the commit record of a snapshot of this instant."""
        return RECORD_EARLY if self.early else 0

    def changed(self, shared: Sequence[Live]) -> str:
        """Name what is seen to have changed since forward start; empty if nothing is.

        Args:
            shared: tensors of model and optimizers, just looked up.
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
    """Return all tensors; if `private`, without those that are copied privately."""
    return [live for live in lives if not (private and live.sync)]
