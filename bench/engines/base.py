"""The interface that the runner needs of an engine, so that the same loop measures all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.errors import BenchError
from bench.work import Training


@dataclass
class Plan:
    """The steps that are due; decided before the step ends, never changed afterwards.

    Attributes:
        due: the due steps decided so far.
        every: if not 0, every that many steps from the start are due, and engines can rely on it.
    """

    due: set[int] = field(default_factory=set)
    every: int = 0


@dataclass(frozen=True)
class Counts:
    """The outcome of the snapshots that were due.

    Attributes:
        complete: how many were finished, as durable as the medium is.
        lost: reason to number, of those that were not (slipped, torn, failed).
    """

    complete: int
    lost: Mapping[str, int] = field(default_factory=dict)


class Engine(Protocol):
    """A way of taking snapshots. All calls come from the training thread, in this order.

    With several ranks each has one; all of them write into the same folder.

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
        """Drain, stop, and release the training."""

    def restore(self, training: Training) -> int:
        """Restore the newest snapshot into a fresh training; return its step.

        Called after `finish`.
        """

    def written(self) -> int:
        """Return the bytes that this rank wrote for one snapshot; called after `finish`."""

    def stalls(self) -> Mapping[str, float]:
        """Return the training thread's seconds in the engine by cause, if it knows them."""


class AtOnce:
    """An engine for which training waits: the snapshot is complete when `begin` returns.

    If a subclass writes a single file, it names it in `_path`.
    """

    spills = False
    interval = 1
    _path: Path

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """Keep the training and start counting; see `Engine`."""
        self._training, self._begun = training, 0

    def begin(self, step: int) -> None:
        """Save and count the snapshot; see `Engine`."""
        self._save(step)
        self._begun += 1

    def _save(self, step: int) -> None:
        """Return when the snapshot is complete."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Return at once: no snapshot is under way."""

    def drain(self) -> None:
        """Return at once: no snapshot is under way."""

    def finish(self) -> Counts:
        """Release the training and return the counts; see `Engine`."""
        del self._training
        return Counts(self._begun)

    def written(self) -> int:
        """Return the size of the file; see `Engine`."""
        return self._path.stat().st_size

    def stalls(self) -> Mapping[str, float]:
        """Return nothing: the engine does not know its stalls."""
        return {}


class InTurn:
    """An engine that saves in the background, one snapshot at a time: the next waits for it.

    It uses two folders in turn, so that one is complete at any time.
    """

    spills = True
    interval = 1

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """Keep the training and start counting; see `Engine`."""
        self._training, self._folder = training, folder
        self._running: Any = None
        self._begun = self._complete = 0

    def begin(self, step: int) -> None:
        """Wait for the last snapshot and start one; see `Engine`."""
        self.drain()
        self._begun += 1
        self._running = self._started(step)

    def _started(self, step: int) -> Any:
        """Start saving into `_target`; return what `_wait` takes."""
        raise NotImplementedError

    def _target(self) -> Path:
        return self._folder / f"checkpoint-{self._begun % 2}"

    def before_update(self) -> None:
        """Return at once: the state had been copied when `begin` returned."""

    def drain(self) -> None:
        """Wait for the snapshot that is under way; see `Engine`."""
        if self._running is not None:
            self._wait(self._running)
            self._running = None
            self._complete += 1

    def _wait(self, running: Any) -> None:
        """Return when the snapshot is complete; raise its error if it failed."""
        running.result()

    def finish(self) -> Counts:
        """Drain, release the training and return the counts; see `Engine`."""
        self.drain()
        del self._training
        return Counts(self._complete)

    def written(self) -> int:
        """Return the bytes of the newest folder; see `Engine`."""
        return folder_bytes(self._target())

    def stalls(self) -> Mapping[str, float]:
        """Return nothing: the engine does not know its stalls."""
        return {}


def single_rank(engine: str, training: Training) -> None:
    """Refuse several ranks.

    Raises:
        BenchError: there are several ranks.
    """
    if training.world > 1:
        raise BenchError(f"{engine} is measured on one rank, not on {training.world}")


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
