"""Order whole snapshots by which recovery takes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from lightck.region.native_region import Record


class _HasRecord(Protocol):
    @property
    def record(self) -> Record: ...


T = TypeVar("T", bound=_HasRecord)


def is_near(inexact: int, exact: int) -> bool:
    """Return whether an inexact snapshot yields to an exact one.

    The exact one must be a step older at most.
    """
    return 0 <= inexact - exact <= 1  # a newer one's state may be of an older step


def replaces(record: Record, held: Record | None) -> bool:
    """Return whether recovery prefers the snapshot of `record` to `held`, the best before it."""
    return held is None or not _yields(record, held)


def worth(record: Record | None, held: Record | None) -> tuple[bool, int]:
    """Return the sort key by which slots are reused: the least first.

    Args:
        record: the slot's snapshot; None: none that counts.
        held: the protected snapshot; if it is early, an exact one near it is worth more.
    """
    if record is None:
        return False, 0
    return held is not None and _yields(held, record), record.sequence


def _yields(newer: Record, older: Record) -> bool:
    return newer.early and not older.early and is_near(newer.step, older.step)


def preferred(candidates: Sequence[T]) -> list[T]:
    """Order candidates, given newest first: those that are not suspect come before all others.

    Where replicas differ, one of them is wrong, and nothing in the bytes tells which.
    """
    trusted = [c for c in candidates if not c.record.suspect]
    return [*_exact_first(trusted), *(c for c in candidates if c.record.suspect)]


def _exact_first(candidates: list[T]) -> list[T]:
    """Put an exact snapshot before the early ones that are near it."""
    ordered: list[T] = []
    waiting: list[T] = []  # early ones: an exact one near them may still come
    for each in candidates:
        if each.record.early:
            waiting.append(each)
            continue
        near = [e for e in waiting if is_near(e.record.step, each.record.step)]
        ordered += [*(e for e in waiting if e not in near), each, *near]
        waiting = []
    return [*ordered, *waiting]
