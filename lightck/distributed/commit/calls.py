"""The calls that the commit protocol makes to the job's store.

All of them may be repeated, except `Add`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Add:
    """Add `amount` to `key`; must not be repeated."""

    key: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """Set `key` to `value` unless it has one."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Read `key` without waiting for it."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete keys that no rank will touch again."""

    keys: tuple[str, ...]


Call = Add | Claim | Read | Delete


@dataclass(slots=True)
class Traffic:
    """Counts of the calls that this rank has made to the store so far."""

    reports: int = 0
    claims: int = 0
    watches: int = 0
    looks: int = 0
    deletions: int = 0
    failures: int = 0
