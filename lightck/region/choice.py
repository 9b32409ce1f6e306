"""Whether what was found is still there, while a trainer may overwrite it; what is said if not."""

from __future__ import annotations

from collections.abc import Sequence

from lightck.errors import CorruptSnapshotError, NoSnapshotError, RegionIOError
from lightck.region.place import Place
from lightck.region.region import Candidate, Recovery, Region


def is_there(region: Region, candidate: Candidate) -> bool:
    """No trainer has overwritten it since it was found, and this view of the region reaches it."""
    ends = candidate.layout.offsets + candidate.layout.lengths
    if len(ends) and int(ends.max()) > region.info.size:
        return False  # the region grew after it was opened here
    try:
        return region.native.read_record(candidate.record.slot) == candidate.record
    except (NoSnapshotError, CorruptSnapshotError):
        return False
    except RegionIOError:
        return True  # whoever reads it is told why it cannot be read


def nothing_whole(
    where: Place, recovery: Recovery, step: int | str, problems: Sequence[str]
) -> str:
    """Why there is no snapshot to give, with what is there."""
    there = sorted(c.record.step for c in recovery.candidates)
    left = sorted(c.record.step for c in recovery.abandoned)
    lines = [f"{where.file}: no whole snapshot (wanted: {step}; steps there: {there or 'none'})"]
    if left:
        lines.append(f"steps left behind by a later restore or overwrite: {left}")
    return "\n  ".join([*lines, *problems])
