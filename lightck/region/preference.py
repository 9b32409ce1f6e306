"""Which of several whole snapshots recovery takes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from lightck.region.native import Record


class _HasRecord(Protocol):
    @property
    def record(self) -> Record: ...


T = TypeVar("T", bound=_HasRecord)


def is_near(inexact: int, exact: int) -> bool:
    """An inexact snapshot of one step yields to an exact one of the other, a step older at most."""
    return 0 <= inexact - exact <= 1  # the state of a newer one may be that of an older step


def replaces(record: Record, held: Record | None) -> bool:
    """Recovery takes it rather than an older one, the best until now."""
    return held is None or not _yields(record, held)


def worth(record: Record | None, held: Record | None) -> tuple[bool, int]:
    """What a slot's snapshot is worth: those with less are reused first.

    Args:
        record: of the slot; None: nothing that counts.
        held: of the snapshot that is protected, perhaps an early one to which this is near.
    """
    if record is None:
        return False, 0
    return held is not None and _yields(held, record), record.sequence


def _yields(newer: Record, older: Record) -> bool:
    return newer.early and not older.early and is_near(newer.step, older.step)


def preferred(candidates: Sequence[T]) -> list[T]:
    """Order candidates, given the newest first: those above suspicion come before all others.

    Where replicas differ, one of them is wrong, and nothing in the bytes tells which.
    """
    trusted = [c for c in candidates if not c.record.suspect]
    return [*_exact_first(trusted), *(c for c in candidates if c.record.suspect)]


def _exact_first(candidates: list[T]) -> list[T]:
    """An early snapshot yields to an exact one that is near."""
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
