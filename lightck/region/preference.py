"""Which of several whole snapshots recovery takes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from lightck.region.native import Record


class _HasRecord(Protocol):
    @property
    def record(self) -> Record: ...


T = TypeVar("T", bound=_HasRecord)


def preferred(candidates: Sequence[T]) -> list[T]:
    """Order candidates, given the newest first: those above suspicion come before all others.

    Where replicas differ, one of them is wrong, and nothing in the bytes tells which.
    """
    trusted = [c for c in candidates if not c.record.suspect]
    return [*_exact_first(trusted), *(c for c in candidates if c.record.suspect)]


def _exact_first(candidates: list[T]) -> list[T]:
    """An early snapshot yields to an exact one that is at most a step older (I2)."""
    ordered = list(candidates)
    for i in range(len(ordered) - 1):
        newer, older = ordered[i], ordered[i + 1]
        close = newer.record.step - older.record.step <= 1
        if newer.record.early and not older.record.early and close:
            ordered[i], ordered[i + 1] = older, newer
    return ordered
