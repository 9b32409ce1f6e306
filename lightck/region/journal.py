"""Read and write the boundary journal: the small state of each step, due or not.

It keeps three entries; two are never touched while the third is written (`lightck.h`).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightck.region._ffi import check, ffi, library
from lightck.region.native_region import E_EMPTY, E_FULL, RECORD_EARLY, NativeRegion

STEP_END, FORWARD, FENCE = 1, 2, 3


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The boundary state of one moment of a step.

    It may be used only with parameters of this very step and timeline.
    """

    kind: int
    """The moment of the entry. STEP_END: complete in itself. FORWARD: everything, at forward start.
    FENCE: the state that the update will not change, before the first update of the iteration that
    completes `step`."""
    step: int
    timeline: int
    sequence: int
    wall_time_ns: int
    flags: int
    blob: bytes

    @property
    def early(self) -> bool:
        """Return whether the entry was taken before forward start."""
        return bool(self.flags & RECORD_EARLY)


def write_entry(region: NativeRegion, kind: int, step: int, timeline: int, blob: bytes) -> None:
    """Write over the oldest of the three entries.

    A FENCE entry replaces the one of the same step.

    Only one thread at a time may call it; it waits for no medium.

    Raises:
        RegionFullError: a third of the journal is too small for the entry; says by how much.
        PreviousPersistError: the region is latched by an earlier failure.
        RegionError: `timeline` is not the region's newest.
    """
    entry = ffi.new("lck_journal_entry *")
    entry.step, entry.timeline, entry.length, entry.kind = step, timeline, len(blob), kind
    code = library().lck_journal_write(region.handle, entry, blob)
    if code != 0:
        check(code, f"journal of {region.label}")


def read_entry(region: NativeRegion, kind: int = 0) -> JournalEntry | None:
    """Return the newest whole entry of a kind (0: any kind) of the newest timeline, or None.

    Raises:
        CorruptSnapshotError: no entry is whole, and one is damaged.
        RegionError: the owner, another process, rewrote the entries faster than they were read.
    """
    raw = ffi.new("lck_journal_entry *")
    code = E_FULL
    while code == E_FULL:  # first pass, or the owner has just written a longer entry
        room = int(raw.length)
        blob = ffi.new("char[]", room or 1)
        code = library().lck_journal_read(region.handle, kind, raw, blob, room)
    if code == E_EMPTY:
        return None
    check(code, f"journal of {region.label}")
    return JournalEntry(
        kind=raw.kind,
        step=raw.step,
        timeline=raw.timeline,
        sequence=raw.sequence,
        wall_time_ns=raw.wall_time_ns,
        flags=raw.flags,
        blob=bytes(ffi.buffer(blob, raw.length)),
    )
