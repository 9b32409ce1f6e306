"""Measure lightck through its public interface: attach, train, detach, restore."""

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
    """The runner's plan as a policy.

    It is pure, because a step is settled before it is asked about.
    """

    plan: Plan

    def due(self, moment: lightck.Moment) -> bool:
        """Return whether the plan has the step; see `lightck.Policy`."""
        return moment.step in self.plan.due


@dataclass
class Lightck:
    """The lightck engine: its own hooks do everything; the runner's calls are only counted.

    Without `interleaved` the snapshots are the same, but training waits until all is copied.
    """

    settings: dict[str, Any]
    interval: int = 1
    interleaved: bool = True
    spills: bool = field(default=False, init=False)

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        self._path = folder / "run"
        self.handle = lightck.attach(
            training.model,
            training.optimizer,
            self._path,
            policy=_policy(training, plan),
            on_error="raise",
            # Armed only where a definition says so; some attach two trainings in turn at one path.
            **{"failure": "off", "overwrite": True, **self.settings},
        )
        if not self.interleaved:
            # Called after lightck's own hook, which opens a due snapshot: that one is on the
            # outermost module, or on any forward.
            training.plain.register_forward_pre_hook(lambda module, inputs: self.handle.fence())
        # Without a sync or DRAM staging a snapshot commits within the window; else the time depends
        # on the medium.
        staged = self.settings.get("placement") == "staged"
        self.spills = staged or self.handle.survives != "process death"

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
        self._written = stats.bytes_copied // max(1, stats.captured)
        self.handle.detach()
        lost = {"slipped": stats.slipped, "torn": stats.torn, "failed": stats.failed}
        return Counts(stats.committed, lost)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        return restored(training, self._path)

    def written(self) -> int:
        """See `Engine`."""
        return self._written

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return self.handle.stats().stall_s


def _policy(training: Training, plan: Plan) -> int | lightck.Policy:
    """Return the plan as a policy; over ranks as a period.

    Steps of other policies are announced over ranks, and snapshots then come later.

    Raises:
        BenchError: the plan has no period.
    """
    if training.world > 1 and not plan.every:
        raise BenchError('lightck over ranks needs a fixed period: policy = "pairs"')
    return plan.every if training.world > 1 else Planned(plan)


def restored(training: Training, path: Path) -> int:
    """Restore the newest snapshot at a path; return its step.

    Raises:
        BenchError: there is no snapshot.
    """
    info = lightck.restore(training.model, training.optimizer, path)
    if info is None:
        raise BenchError(f"lightck found nothing at {path}")
    return info.step


def make(interval: int = 1, interleaved: bool = True, **settings: Any) -> Lightck:
    """Make the engine; see `bench.engines.make`. `interval` is the steps per snapshot in blocks."""
    return Lightck(settings, interval, interleaved)
