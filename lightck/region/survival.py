"""What a committed snapshot outlives, from how its medium makes stores durable.

Standard library only: the guest's tests compare these words with what a killed machine kept, and
run where nothing is installed.
"""

from __future__ import annotations

POWER_LOSS = "power loss"
PROCESS_DEATH = "process death"

GRAN_NONE, GRAN_BYTE, GRAN_LINE, GRAN_PAGE = 0, 1, 2, 3
"""LCK_GRAN_*: memory that dies with the host; power-protected caches; line flushes; file syncs."""


def survives(granularity: int) -> str:
    """Say it in the words of the README's table."""
    durable = granularity in (GRAN_BYTE, GRAN_LINE, GRAN_PAGE)
    return POWER_LOSS if durable else PROCESS_DEATH
