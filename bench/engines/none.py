"""Measure without an engine: whatever the method finds here is its own error."""

from __future__ import annotations

from bench.engines.base import AtOnce
from bench.work import Training


class Nothing(AtOnce):
    """An engine that takes no snapshots."""

    def _save(self, step: int) -> None:
        """Do nothing."""

    def restore(self, training: Training) -> int:
        """Raise: there is nothing to restore from."""
        raise NotImplementedError

    def written(self) -> int:
        """See `Engine`."""
        return 0


def make() -> Nothing:
    """Make the engine; see `bench.engines.make`."""
    return Nothing()
