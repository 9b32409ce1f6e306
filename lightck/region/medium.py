"""Name the media a region may lie on, and tell what each one promises.

Which medium a file is on is found by trying (`lck_medium_detect` in `native/src/medium.c`), and the
native writer alone makes stores durable (`native/src/persist.c`): CONTRIBUTING.md has the steps for
another one.

This module needs the standard library only: the guest's tests compare its words with what a killed
machine kept, and run where nothing is installed.
"""

from __future__ import annotations

MEDIA = {1: "fsdax", 2: "devdax", 3: "file", 4: "tmpfs", 5: "hugetlbfs"}
"""Each medium's name, by its number in `native/include/lightck.h`."""

GRAN_NONE, GRAN_BYTE, GRAN_LINE, GRAN_PAGE = 0, 1, 2, 3
"""The values of LCK_GRAN_*: memory that dies with the host; power-protected caches; line flushes;
file syncs."""
GRANULARITIES = ("none", "byte", "cache line", "page")
"""The granularities in words, as `lightck inspect` shows them."""

POWER_LOSS = "power loss"
PROCESS_DEATH = "process death"


def survives(granularity: int) -> str:
    """Return what a snapshot survives at a granularity, in the words of the README's table."""
    durable = granularity in (GRAN_BYTE, GRAN_LINE, GRAN_PAGE)
    return POWER_LOSS if durable else PROCESS_DEATH


def is_memory(medium: str) -> bool:
    """Tell whether a region on this medium takes memory of the host."""
    return medium in ("tmpfs", "hugetlbfs")


def is_staged(medium: str, granularity: int) -> bool:
    """Tell whether copies go through DRAM and slots are invalidated in the background."""
    return medium == "file" or granularity == GRAN_PAGE
