"""Choose a snapshot to read: the best that is whole, while a trainer may overwrite others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from lightck.errors import (
    CorruptSnapshotError,
    NoSnapshotError,
    RegionBusyError,
    RegionIOError,
)
from lightck.events import event
from lightck.region.place import Place
from lightck.region.region import Candidate, Recovery, Region, survey

_TRIES = 8
"""How often to look at most: a trainer may overwrite what was found before it is leased."""
T = TypeVar("T")


def first_whole(
    where: Place,
    step: int | Literal["latest"],
    take: Callable[[Region, Candidate, list[str]], T],
) -> T | None:
    """What `take` makes of the best candidate that it can read.

    Args:
        where: an existing place.
        step: which snapshot.
        take: reads a candidate; is also given why better ones were passed over. It raises
            CorruptSnapshotError, RegionIOError or RegionBusyError to pass this one over; once it
            returns, the region is its own to close.

    Returns:
        None when nothing was ever written there.

    Raises:
        NoSnapshotError: snapshots are there, none is whole, or not the wanted step.
    """
    for _ in range(_TRIES):
        region, recovery = survey(where)
        try:
            problems, overtaken = [*recovery.problems, *_distrusted(where, recovery, step)], False
            for candidate in wanted(recovery, step):
                try:
                    return take(region, candidate, problems)
                except (CorruptSnapshotError, RegionBusyError, RegionIOError) as error:
                    problems.append(str(error))
                    event("fell_back", logging.WARNING, step=candidate.record.step, why=error)
                    overtaken |= isinstance(error, RegionBusyError)
            overtaken |= not all(is_there(region, c) for c in wanted(recovery, step))
        except BaseException:
            region.close()
            raise
        region.close()
        if recovery.is_empty:
            return None
        if not overtaken:
            break
    raise NoSnapshotError(nothing_whole(where, recovery, step, problems))


def wanted(recovery: Recovery, step: int | Literal["latest"]) -> list[Candidate]:
    """Candidates for a step, best first."""
    return [c for c in recovery.candidates if step in ("latest", c.record.step)]


def _distrusted(where: Place, recovery: Recovery, step: int | Literal["latest"]) -> list[str]:
    """Which newer snapshots are passed over since replicas differ; or that the best one is such."""
    records = [c.record for c in wanted(recovery, step)]
    if not records:
        return []
    best = records[0]
    newer = [r for r in records if r.suspect and r.sequence > best.sequence]
    why = "suspect, for replicas were found to differ there or before"
    none = "; no other was found that is not" if best.suspect else ""
    told = [best] if best.suspect else newer
    return [f"{where.file} slot {r.slot} step {r.step}: {why}{none}" for r in told]


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
