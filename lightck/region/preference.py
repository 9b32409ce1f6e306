"""Which of several whole snapshots recovery takes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from lightck.region.native import Record


class _HasRecord(Protocol):
    @property
    def record(self) -> Record: ...


T = TypeVar("T", bound=_HasRecord)

NEAR_STEPS = 3
"""How much older an exact snapshot may be that an early one yields to.

With every step due the one that is whole can be three steps back: of the last step nobody has begun
one, the step before it was being written, and the fate of the one before that is open.
"""


def is_near(early: int, exact: int) -> bool:
    """An early snapshot of one step yields to an exact one of the other."""
    return early - exact <= NEAR_STEPS


def replaces(record: Record, held: Record | None) -> bool:
    """Recovery takes it rather than the one that was the best until now."""
    if held is None or held.sequence > record.sequence:
        return held is None
    return held.early or not record.early or not is_near(record.step, held.step)


def preferred(candidates: Sequence[T]) -> list[T]:
    """Order candidates, given the newest first: those above suspicion come before all others.

    Where replicas differ, one of them is wrong, and nothing in the bytes tells which.
    """
    trusted = [c for c in candidates if not c.record.suspect]
    return [*_exact_first(trusted), *(c for c in candidates if c.record.suspect)]


def _exact_first(candidates: list[T]) -> list[T]:
    """An early snapshot yields to an exact one that is near: see `NEAR_STEPS`."""
    ordered: list[T] = []
    waiting: list[T] = []  # early ones, while an exact one may still come
    for each in candidates:
        if each.record.early:
            waiting.append(each)
            continue
        near = [e for e in waiting if is_near(e.record.step, each.record.step)]
        ordered += [*(e for e in waiting if e not in near), each, *near]
        waiting = []
    return [*ordered, *waiting]
