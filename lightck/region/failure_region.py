"""The failure region of a node: room for a whole state, where single ranks' shares are missing.

Ranks of a node write what they hold alike in shares. At a failure a share may be missing: its rank
is dead, or stands still and holds its own region. Then one healthy rank writes all of it here, with
what the other ranks' journals have of their own (`failure/whole_save.py`). There are two slots, so
that the newest whole step stays while the next is written.

The file is nobody's while training goes well. Its owner lock is the claim of the rank that saves; a
file whose owner stands still is left to it, and the next number is used. Everything else is as in a
rank's region: timelines, lineage, checksums, one small commit record. Its rank number is that of
the node's first rank, whoever wrote the snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lightck.errors import (
    RegionBusyError,
    RegionError,
    RegionFormatError,
    RegionFullError,
    UnrestoredError,
)
from lightck.region import allocator, location
from lightck.region.layout import Entry
from lightck.region.location import Location
from lightck.region.native_region import RegionSpec
from lightck.region.region import Region

SLOTS = 2
MAX_FILES = 4
"""Files of one node at most: each but the last has an owner that stands still."""


def make(
    own: Region,
    first_rank: int,
    entries: Sequence[Entry],
    manifest_bytes: int,
    *,
    process_durable: bool,
) -> Region:
    """Make, or open, the first failure region of a node that nobody owns; the caller closes it.

    Args:
        own: the region of the rank that asks, whose run and timeline it is of.
        first_rank: the lowest rank of the node.
        entries: of the whole state.
        manifest_bytes: as for `Region.fit`.
        process_durable: as in the config.

    Raises:
        RegionFullError: names the bytes needed and free.
        RegionBusyError: all files have owners.
        RegionError: a file is not safe, or not of this run.
    """
    if not own.is_in_place:
        raise RegionBusyError(f"{own.place.file}: a later life of the job has replaced it")
    busy: RegionError | None = None
    for number in range(MAX_FILES):
        where = location.failure_file(own.place, first_rank, number)
        try:
            if where.exists:
                found = _opened(where, own, process_durable)
            else:
                found = _created(where, own, first_rank, entries, manifest_bytes, process_durable)
        except RegionFullError:
            raise
        except RegionError as error:  # owned, damaged, or nothing of ours
            busy = error
            continue
        found.prepare_writing(own.world)  # another number of ranks may have made it
        try:
            found.fit(entries, manifest_bytes)
        except BaseException:
            found.close()
            raise
        return found
    assert busy is not None
    raise RegionBusyError(f"no failure region can be used; the last one: {busy}") from busy


def _created(
    where: Location,
    own: Region,
    first_rank: int,
    entries: Sequence[Entry],
    manifest_bytes: int,
    process_durable: bool,
) -> Region:
    needed = allocator.plan(entries, allocator.UNBOUNDED, manifest_bytes, own.info.page_bytes)
    assert needed is not None
    spec = RegionSpec(
        run_id=own.info.run_id,
        rank=first_rank,
        world=own.world,
        slot_count=SLOTS,
        slot_bytes=needed.needed_bytes,
        journal_bytes=0,
        process_durable=process_durable,
    )
    made = Region.create(where, spec)
    made.begin_timeline(None, own.timeline)
    return made


def _opened(where: Location, own: Region, process_durable: bool) -> Region:
    """Open a file that is there; what it holds of the timeline that counts stays protected."""
    found = Region.open(where, writable=True, process_durable=process_durable)
    try:
        if found.info.run_id != own.info.run_id:
            raise RegionFormatError(f"{where.file} belongs to another run: move it away")
        if own.timeline in [timeline for timeline, _ in found.info.lineage]:
            raise RegionFormatError(f"{where.file} belongs to a later life of this job")
        recovery = found.recover()
        if found.info.timeline != own.timeline:  # made in a life that this rank's attach missed
            found.begin_timeline(None, own.timeline)
        elif recovery.candidates:
            found.protect(found.slots[recovery.candidates[0].record.slot])
    except BaseException:
        found.close()
        raise
    return found


def require_restored(own: Location) -> None:
    """Refuse to give up what failure regions hold, for a model that continues nothing.

    Raises:
        UnrestoredError: names the steps.
    """
    for where in location.failure_files(own):
        try:
            found = Region.open(where, writable=False)
        except RegionError:
            continue
        try:
            steps = sorted(c.record.step for c in found.recover().candidates)
        finally:
            found.close()
        if steps:
            raise UnrestoredError(
                f"{where.file} holds steps {steps} that were saved at a failure and not restored:"
                " call lightck.restore(model, ...) first, choose another path, or pass"
                " overwrite=True to give them up"
            )


def begin_timeline(own: Region, restored: tuple[int, int] | None, step: int, timeline: int) -> None:
    """Let the failure regions in a folder begin the timeline that the ranks are about to begin.

    What the model continues stays whole there until something newer is: what was restored from one,
    or what was saved up to its step since. Everything else in them is given up. Call it before the
    ranks begin theirs, on one rank of the node. A file whose owner still stands is left to it: it
    is read, and never written again.

    Args:
        own: the region of a rank of the node. Nothing is done if a later life has replaced it.
        restored: (timeline, step) of what was restored; None: nothing.
        step: the step that the model is at, of the region's timeline; -1: it continues nothing.
        timeline: the new one.
    """
    for where in location.failure_files(own.place) if own.is_in_place else ():
        try:
            found = Region.open(where, writable=True)
        except RegionError:
            continue  # it is damaged, or owned: readers say so
        try:
            records = [c.record for c in found.recover().candidates]
            kept = [
                r
                for r in records
                if (r.timeline, r.step) == restored
                or (r.timeline == own.timeline and r.step <= step)
            ]
            newest = max(kept, key=lambda record: record.step, default=None)
            found.begin_timeline(newest, timeline)
        except RegionError:
            continue
        finally:
            found.close()


def remove(own: Region) -> None:
    """Remove the failure regions of a run that is over, but those that others own or read.

    Those of another timeline stay: a later life of the job has begun it.
    """
    for where in location.failure_files(own.place):
        with contextlib.suppress(RegionError):
            with contextlib.closing(Region.open(where, writable=False)) as found:
                if found.info.timeline != own.timeline:
                    continue
            with location.seized(where.file):
                where.file.unlink()
