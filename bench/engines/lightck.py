"""lightck through its public interface: attach, train, detach, restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightck
from bench.engines.base import Counts, Plan
from bench.errors import BenchError
from bench.work import Training


@dataclass(frozen=True)
class Planned:
    """The runner's plan as a policy. Pure: a step's answer is settled before it is asked for."""

    plan: Plan

    def due(self, moment: lightck.Moment) -> bool:
        """See `lightck.Policy`."""
        return moment.step in self.plan.due


@dataclass
class Lightck:
    """Its own hooks do everything; the runner's calls are only counted."""

    settings: dict[str, Any]
    interval: int = 1
    spills: bool = field(default=False, init=False)

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        self._path = folder / "run"
        self.handle = lightck.attach(
            training.model,
            training.optimizer,
            self._path,
            policy=Planned(plan),
            on_error="raise",
            **self.settings,
        )
        # Committed in the window where nothing needs a sync; else the medium decides how long.
        self.spills = self.handle.survives != "process death"

    def begin(self, step: int) -> None:
        """See `Engine`."""

    def before_update(self) -> None:
        """See `Engine`."""

    def drain(self) -> None:
        """See `Engine`."""
        self.handle.wait()

    def finish(self) -> Counts:
        """See `Engine`."""
        self.handle.wait()
        stats = self.handle.stats()
        self.handle.detach()
        lost = {"slipped": stats.slipped, "torn": stats.torn, "failed": stats.failed}
        return Counts(stats.committed, lost)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        info = lightck.restore(training.model, training.optimizer, self._path)
        if info is None:
            raise BenchError(f"lightck found nothing at {self._path}")
        return info.step

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return self.handle.stats().stall_s


def make(interval: int = 1, **settings: Any) -> Lightck:
    """See `bench.engines.make`; `interval`: steps per snapshot in blocks."""
    return Lightck(settings, interval)
