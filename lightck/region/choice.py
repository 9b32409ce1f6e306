"""Tell whether a snapshot that was found is still there while a trainer may overwrite it."""

from __future__ import annotations

from collections.abc import Sequence

from lightck.errors import CorruptSnapshotError, NoSnapshotError, RegionIOError
from lightck.region.location import Place
from lightck.region.region import Candidate, Recovery, Region


def is_there(region: Region, candidate: Candidate) -> bool:
    """Return whether no trainer has overwritten the snapshot and this mapping reaches all of it."""
    ends = candidate.layout.offsets + candidate.layout.lengths
    if len(ends) and int(ends.max()) > region.info.size:
        return False  # the region grew after it was opened here
    try:
        return region.native.read_record(candidate.record.slot) == candidate.record
    except (NoSnapshotError, CorruptSnapshotError):
        return False
    except RegionIOError:
        return True  # reading it will raise, and the error says why


def nothing_whole(
    where: Place, recovery: Recovery, step: int | str, problems: Sequence[str]
) -> str:
    """Describe why no snapshot can be given, and what the region holds."""
    there = sorted(c.record.step for c in recovery.candidates)
    left = sorted(c.record.step for c in recovery.abandoned)
    lines = [f"{where.file}: no whole snapshot (wanted: {step}; steps there: {there or 'none'})"]
    if left:
        lines.append(f"steps left behind by a later restore or overwrite: {left}")
    return "\n  ".join([*lines, *problems])
