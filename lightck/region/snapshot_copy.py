"""Copy one snapshot of a region into a region file of its own, in which nothing is moved.

The copy has the superblocks, one commit record and that slot's parts of the segments, at the places
that they have in the region; everything else is a hole. So layout table, manifest and record hold
as they are, and whatever reads a region reads the copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from lightck.errors import CorruptSnapshotError, RegionError, RegionFullError
from lightck.region import location
from lightck.region.location import Location
from lightck.region.native_region import Record
from lightck.region.region import Region, payload_reads

_SUPERBLOCKS = 0, 8192
_RECORDS_AT, _RECORD_BYTES = 8192, 4096
_PIECE_BYTES = 8 << 20


def copy_snapshot(
    source: Location,
    record: Record,
    to: Location,
    *,
    copied: Callable[[], object],
    bytes_per_s: int = 0,
) -> None:
    """Copy a snapshot; on return the new file is durable under its name, and every byte verified.

    Nothing is there under that name before; an error leaves it as it was.

    Args:
        source: the region, which stays as it is.
        record: the snapshot's; the caller holds a lease on its slot.
        to: the new file, whose folder is there.
        copied: called when the region has been read: the lease may be dropped.
        bytes_per_s: the rate at which the file is written at most; 0: no limit.

    Raises:
        CorruptSnapshotError: what was copied does not match its checksums.
        RegionFullError: the medium has no room.
        RegionError: the place is not safe, or the medium fails.
    """
    with (
        location.created(to, replaces=True) as (fd, _),
        location.opened(source, writable=False) as (source_fd, _),
    ):
        try:
            for begin, length in _ranges(source, record):
                _copy(source_fd, fd, begin, length, bytes_per_s)
            # Now: a region that has grown meanwhile says so in the superblocks that were copied.
            os.ftruncate(fd, os.fstat(source_fd).st_size)
            copied()
            _verify(to, record)
            os.fsync(fd)
        except OSError as error:
            raise _in_words(to, error) from error


def _ranges(source: Location, record: Record) -> Iterator[tuple[int, int]]:
    """Yield begin and length of what the copy has of the region."""
    region = Region.open(source, writable=False)
    try:
        segments = region.info.segments
    finally:
        region.close()
    yield _SUPERBLOCKS
    yield _RECORDS_AT + _RECORD_BYTES * record.slot, _RECORD_BYTES
    for segment in segments:
        yield segment.offset + record.slot * segment.slot_bytes, segment.slot_bytes


def _copy(source_fd: int, fd: int, begin: int, length: int, bytes_per_s: int) -> None:
    # Not copy_file_range: where file systems share blocks, a store into the region would have to
    # find a new block, and could find the medium full.
    os.lseek(fd, begin, os.SEEK_SET)
    end, began_s, start = begin + length, time.monotonic(), begin
    while begin < end:
        sent = os.sendfile(fd, source_fd, begin, min(end - begin, _PIECE_BYTES))
        if not sent:
            raise CorruptSnapshotError(f"the region ends at byte {begin}, expected {end}")
        begin += sent
        if bytes_per_s:
            ahead_s = (begin - start) / bytes_per_s - (time.monotonic() - began_s)
            time.sleep(max(0.0, ahead_s))


def _verify(to: Location, record: Record) -> None:
    """Read the copy back, as any reader of a region does.

    Raises:
        CorruptSnapshotError: it is not the snapshot of that record, or a checksum does not hold.
    """
    draft = Location(to.path, location.draft_of(to), is_device=False)
    region = Region.open(draft, writable=False)
    try:
        recovery = region.recover()
        found = [c for c in recovery.candidates if c.record.sequence == record.sequence]
        if not found or found[0].record.timeline != record.timeline:
            why = "; ".join(recovery.problems) or "it was overwritten, or no longer counts"
            raise CorruptSnapshotError(f"{to.file}: step {record.step} was not copied whole: {why}")
        region.fetch(found[0], *payload_reads(found[0]), 1)
    finally:
        region.close()


def _in_words(to: Location, error: OSError) -> RegionError:
    kind = RegionFullError if error.errno in location.NO_ROOM else RegionError
    return kind(f"{to.file}: cannot be written: {error.strerror}")
