"""What the runner needs of an engine, so that all of them are measured by the same loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.errors import BenchError
from bench.work import Training


@dataclass
class Plan:
    """Which steps are due; decided before the step ends, never changed afterwards.

    Attributes:
        due: those decided so far.
        every: if not 0, it is every that many steps from the start, and engines can rely on it.
    """

    due: set[int] = field(default_factory=set)
    every: int = 0


@dataclass(frozen=True)
class Counts:
    """What became of the snapshots that were due.

    Attributes:
        complete: finished, on the medium's terms.
        lost: reason to number, of those that were not (slipped, torn, failed).
    """

    complete: int
    lost: Mapping[str, int] = field(default_factory=dict)


class Engine(Protocol):
    """One way of taking snapshots. All calls come from the training thread, in this order.

    With several ranks each has one; what they keep is in the same folder.

    Per step: `begin` (if the last step is due), forward and backward, `before_update`, update.

    Attributes:
        spills: work on a snapshot may go on after the next update, so that comparing single steps
            would miss some of it: whole blocks of steps are compared instead.
        interval: take a snapshot every so many steps; read after `attach` and the settling steps.
    """

    spills: bool
    interval: int

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """Prepare; all optimizer state exists. The step that has just ended is number 0."""

    def begin(self, step: int) -> None:
        """Take a snapshot of `step`, which is complete; the next forward comes after this."""

    def before_update(self) -> None:
        """Return when the live state may be changed."""

    def drain(self) -> None:
        """Return when every snapshot that was begun is complete."""

    def finish(self) -> Counts:
        """Drain, stop, let go of the training."""

    def restore(self, training: Training) -> int:
        """Bring the newest snapshot into a fresh training; its step. Called after `finish`."""

    def written(self) -> int:
        """Bytes that this rank wrote for one snapshot; called after `finish`."""

    def stalls(self) -> Mapping[str, float]:
        """Seconds by cause that the training thread spent in the engine, if it knows."""


def single_rank(engine: str, training: Training) -> None:
    """Refuse several ranks.

    Raises:
        BenchError: there are several.
    """
    if training.world > 1:
        raise BenchError(f"{engine} is measured on one rank, not on {training.world}")


def folder_bytes(folder: Path) -> int:
    """Of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
