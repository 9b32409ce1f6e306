"""Tell what a committed snapshot survives, from how its medium makes stores durable.

This module needs the standard library only: the guest's tests compare these words with what a
killed machine kept, and run where nothing is installed.
"""

from __future__ import annotations

POWER_LOSS = "power loss"
PROCESS_DEATH = "process death"

GRAN_NONE, GRAN_BYTE, GRAN_LINE, GRAN_PAGE = 0, 1, 2, 3
"""The values of LCK_GRAN_*: memory that dies with the host; power-protected caches; line flushes;
file syncs."""


def survives(granularity: int) -> str:
    """Return what a snapshot survives at a granularity, in the words of the README's table."""
    durable = granularity in (GRAN_BYTE, GRAN_LINE, GRAN_PAGE)
    return POWER_LOSS if durable else PROCESS_DEATH
