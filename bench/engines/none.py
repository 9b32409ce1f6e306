"""No engine at all: whatever the method finds here is its own error."""

from __future__ import annotations

from bench.engines.base import AtOnce
from bench.work import Training


class Nothing(AtOnce):
    """Takes no snapshots."""

    def _save(self, step: int) -> None:
        """Nothing to do."""

    def restore(self, training: Training) -> int:
        """There is nothing to restore from."""
        raise NotImplementedError

    def written(self) -> int:
        """See `Engine`."""
        return 0


def make() -> Nothing:
    """See `bench.engines.make`."""
    return Nothing()
