"""No engine at all: whatever the method finds here is its own error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.engines.base import Counts, Plan
from bench.work import Training


class Nothing:
    """Takes no snapshots."""

    spills = False
    interval = 1

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        self._begun = 0

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self._begun += 1

    def before_update(self) -> None:
        """See `Engine`."""

    def drain(self) -> None:
        """See `Engine`."""

    def finish(self) -> Counts:
        """See `Engine`."""
        return Counts(self._begun)

    def restore(self, training: Training) -> int:
        """There is nothing to restore from."""
        raise NotImplementedError

    def written(self) -> int:
        """See `Engine`."""
        return 0

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make() -> Nothing:
    """See `bench.engines.make`."""
    return Nothing()
