"""A region: open or create it, recover what is whole, choose slots, begin timelines, grow."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.errors import (
    CorruptSnapshotError,
    LightckError,
    NoSnapshotError,
    RegionBusyError,
    RegionFullError,
    RegionIOError,
)
from lightck.region import allocator, layout, manifest, medium, native_region
from lightck.region.backends import select
from lightck.region.layout import Entry, Layout, check
from lightck.region.location import Location, shm_advice
from lightck.region.manifest import Manifest
from lightck.region.native_pool import COPY_DTYPE, NativePool, NativeSnapshot
from lightck.region.native_region import (
    PROCESS_DURABLE,
    NativeRegion,
    Record,
    RegionSpec,
    Segment,
)

# ---- whole snapshots in the order in which recovery takes them -----------------------------------


def is_near(inexact: int, exact: int) -> bool:
    """Return whether an inexact snapshot yields to an exact one.

    The exact one must be a step older at most.
    """
    return 0 <= inexact - exact <= 1  # a newer one's state may be of an older step


def replaces(record: Record, held: Record | None) -> bool:
    """Return whether recovery prefers the snapshot of `record` to `held`, the best before it."""
    return held is None or not _yields(record, held)


def reuse_priority(record: Record | None, held: Record | None) -> tuple[bool, int]:
    """Return the sort key by which slots are reused: the least first.

    Args:
        record: the slot's snapshot; None: none that counts.
        held: the protected snapshot; if it is early, an exact one near it is worth more.
    """
    if record is None:
        return False, 0
    return held is not None and _yields(held, record), record.sequence


def _yields(newer: Record, older: Record) -> bool:
    return newer.early and not older.early and is_near(newer.step, older.step)


def preferred(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates, given newest first: those that are not suspect come before all others.

    Where replicas differ, one of them is wrong, and nothing in the bytes tells which.
    """
    trusted = [c for c in candidates if not c.record.suspect]
    return [*_exact_first(trusted), *(c for c in candidates if c.record.suspect)]


def _exact_first(candidates: list[Candidate]) -> list[Candidate]:
    """Put an exact snapshot before the early ones that are near it."""
    ordered: list[Candidate] = []
    waiting: list[Candidate] = []  # early ones: an exact one near them may still come
    for each in candidates:
        if each.record.early:
            waiting.append(each)
            continue
        near = [e for e in waiting if is_near(e.record.step, each.record.step)]
        ordered += [*(e for e in waiting if e not in near), each, *near]
        waiting = []
    return [*ordered, *waiting]


def new_timeline() -> int:
    """Return the id of a timeline that no other has."""
    return secrets.randbits(63) | 1


# ---- what a model continues ----------------------------------------------------------------------


@dataclass(eq=False)
class Continuation:
    """The snapshots that one model continues: those it was restored from or recorded as.

    With it attach refuses a path whose snapshots would be overwritten because a restore was
    forgotten. It belongs to a model, not to the process: a new model, as a notebook's cell makes it
    when it is run again, continues nothing.
    """

    records: dict[bytes, Record] = field(default_factory=dict)
    """The snapshot, by region UUID, that the model was last restored from or committed as."""
    newest: dict[bytes, int] = field(default_factory=dict)
    """The region's newest sequence at the model's last restore or commit, by region UUID. A later
    one is somebody else's."""
    began_anew: bool = False
    """True if the last restore found nothing that could be restored, and all may be overwritten."""
    given_up: set[Path] = field(default_factory=set)
    """Region files that cannot be opened and whose state restore got from other ranks: attach may
    rename them."""

    def clear(self) -> None:
        """Forget everything, because the live state is about to become another snapshot's."""
        self.records.clear()
        self.newest.clear()
        self.given_up.clear()
        self.began_anew = False

    def begin_anew(self) -> None:
        """Note that a restore has found nothing that could be restored."""
        self.began_anew = True

    def mark_continued(self, region: Region, record: Record) -> None:
        """Declare that the live state continues `record`; attach may then write to its region."""
        self.records[region.info.uuid] = record
        self.newest[region.info.uuid] = region.next_sequence - 1

    def disown(self, region: Region) -> None:
        """Declare that the live state continues another region's snapshot, and none of this one.

        All snapshots of this region may then be overwritten.
        """
        self.forget(region)
        self.newest[region.info.uuid] = region.next_sequence - 1

    def forget(self, region: Region) -> None:
        """Declare that the live state continues no snapshot of the region."""
        self.records.pop(region.info.uuid, None)
        self.newest.pop(region.info.uuid, None)


# ---- slots, and the region -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CopyTable:
    """The copies of one batch to a slot, but for their sources."""

    positions: npt.NDArray[np.intp]
    rows: npt.NDArray[Any]
    """A row of `COPY_DTYPE` for each copy; nobody changes it."""
    total_bytes: int


@dataclass(eq=False)
class Slot:
    """The state that this process knows of one slot."""

    index: int
    record: Record | None = None
    """The record of the committed snapshot in the slot; None: none that counts."""
    fate_open: bool = False
    """Other ranks decide whether the snapshot counts, and their decision has not arrived here."""
    table_digest: bytes = b""
    """The digest of the layout table that the slot's last commit made durable."""
    digests: tuple[bytes, npt.NDArray[np.uint32]] | None = None
    """Layout digest and CRCs of content that this process wrote completely or read and verified."""
    _layout: tuple[allocator.SlotPlan, Layout, list[int]] | None = field(default=None, repr=False)
    """The plan last used here, and what `layout_of` returned for it."""
    _copies: dict[int, CopyTable] = field(default_factory=dict, repr=False)
    """The tables of copies for that layout, by the number of the batch."""
    writer: NativeSnapshot | None = field(default=None, repr=False)
    """The snapshot that is being written here; None: none is open."""
    kept: bool = False
    """The snapshot was begun for a failure: see `Region.keep_rank_local`."""

    def close_writer(self) -> None:
        """Free the snapshot that is being written here, if there is one."""
        if self.writer is not None:
            self.writer.free()
            self.writer = None

    def note_content(self, digest: bytes, crcs: npt.NDArray[np.uint32]) -> None:
        """Note that all of a snapshot is here: its layout's digest, and the CRCs of its extents."""
        self.table_digest, self.digests = digest, (digest, crcs)

    def take_digests(self, digest: bytes) -> npt.NDArray[np.uint32] | None:
        """Return the CRCs of the extents if they are known and of this layout, and forget them."""
        held, self.digests = self.digests, None
        return held[1] if held is not None and held[0] == digest else None

    def take_table(self, digest: bytes) -> bool:
        """Return whether the slot holds this layout table, and forget that it does."""
        held, self.table_digest = self.table_digest, b""
        return held == digest

    def layout_of(
        self, plan: allocator.SlotPlan, segments: Sequence[Segment]
    ) -> tuple[Layout, list[int]]:
        """Return a plan's layout in this slot, and the offsets of its table and its manifest."""
        if self._layout is None or self._layout[0] is not plan:
            space = allocator.Space(segments)
            metadata = np.array([plan.table_at, plan.manifest_at], np.uint64)
            layout = Layout(plan.entries, space.offsets(plan.at, self.index))
            self._copies = {}
            self._layout = plan, layout, space.offsets(metadata, self.index).tolist()
        return self._layout[1:]

    def copies_of(
        self, plan: allocator.SlotPlan, number: int, positions: npt.NDArray[np.intp]
    ) -> CopyTable:
        """Return the copies of a snapshot's batch of that number, after `layout_of` of its plan.

        It is kept: what differs from snapshot to snapshot is put into a copy of it.
        """
        known = self._copies.get(number)
        if known is None or known.positions is not positions:
            assert self._layout is not None
            layout = self._layout[1]
            rows = np.zeros(len(positions), COPY_DTYPE)
            rows["offset"] = layout.offsets[positions]
            rows["length"] = layout.lengths[positions]
            rows["layer"] = plan.layers[positions]
            known = CopyTable(positions, rows, int(rows["length"].sum()))
            self._copies[number] = known
        return known


_LOOKS = 4
"""How often a reader looks at a region at most before it believes that something is missing."""
_FEW_SEGMENTS = 4
"""With this many segments or more, the region doubles when it grows."""


@dataclass(frozen=True)
class Candidate:
    """A snapshot whose record, layout table and manifest hold; its payload is not verified yet."""

    record: Record
    layout: Layout
    manifest: Manifest


def payload_reads(candidate: Candidate) -> tuple[npt.NDArray[Any], list[str]]:
    """Return the reads that check all that a region has of a snapshot, and each one's tensor."""
    entries = candidate.layout.entries
    rows = np.zeros(len(entries), native_region.READ_DTYPE)
    rows["offset"], rows["length"] = candidate.layout.offsets, candidate.layout.lengths
    rows["crc"] = candidate.manifest.crcs
    chosen = np.flatnonzero(candidate.layout.lengths > 0)
    return rows[chosen], [entries[i].name for i in chosen]


@dataclass(frozen=True)
class Recovery:
    """The snapshots that recovery found in a region."""

    candidates: tuple[Candidate, ...]
    """Snapshots of the newest timeline and of its ancestors up to their branch points; best
    first."""
    abandoned: tuple[Candidate, ...]
    """Whole snapshots on a branch that a later restore abandoned."""
    problems: tuple[str, ...]
    """A text per slot whose record, layout table or manifest does not hold, and why."""

    @property
    def is_empty(self) -> bool:
        """Return whether no slot holds anything, whole or not."""
        return not (self.candidates or self.abandoned or self.problems)


class Region:
    """One open region. Only one thread uses it; the pool's workers run beside it."""

    def __init__(
        self, handle: NativeRegion, where: Location, continuation: Continuation | None = None
    ) -> None:
        """Wrap an open native region; see `create` and `open`.

        `continuation` has the snapshots that the live state continues; None: it continues none.
        """
        self.native = handle
        self.place = where
        self._file: os.stat_result | None = None
        """Status of the file when it was opened or made."""
        self.info = handle.describe()
        self.slots = [Slot(i) for i in range(self.info.slot_count)]
        self.protected: int | None = None
        """The slot of the best whole snapshot. By I6 (old before new) it is never invalidated,
        moved or overwritten."""
        self.reusable: Callable[[int, int], bool] | None = None
        """Tells, with several ranks, whether the slot that holds (timeline, step) may be reused."""
        self.reserved_slots = 0
        """The number of slots that due snapshots leave free for a failure."""
        self.next_sequence = 1 + max((seq for _, seq in self.info.lineage), default=0)
        self.timeline = self.info.timeline
        self.continuation = Continuation() if continuation is None else continuation
        self.world = self.info.world
        """The number of ranks that write now; the superblock keeps the number when the region was
        made."""

    @classmethod
    def create(
        cls, where: Location, spec: RegionSpec, continuation: Continuation | None = None
    ) -> Region:
        """Make and own a region; on return it is durable under its name and every slot is empty.

        Raises:
            RegionFullError: the message says how many bytes are needed and free; nothing is left.
            RegionBusyError: another process makes or owns the region.
        """
        handle: NativeRegion | None = None
        try:
            with (
                shm_advice(where.path),
                select.created(where, spec) as (fd, lock_fd, given),
            ):
                handle = NativeRegion.create(fd, lock_fd, spec, str(where.file), given)
                file = os.fstat(fd)
        except BaseException:  # the region could not be published
            if handle is not None:
                handle.close()
            raise
        made = cls(handle, where, continuation)
        made._file = file
        return made

    @classmethod
    def open(
        cls,
        where: Location,
        *,
        writable: bool,
        process_durable: bool = False,
        numa_node: int | None = None,
        continuation: Continuation | None = None,
    ) -> Region:
        """Open an existing region; a writer becomes its owner."""
        flags = (PROCESS_DURABLE if process_durable else 0) | (
            0 if writable else native_region.READ_ONLY
        )
        with select.opened(where, writable=writable) as (fd, lock_fd, given):
            label = str(where.file)
            handle = NativeRegion.open(fd, lock_fd, flags, numa_node, label, given)
            found = cls(handle, where, continuation)
            found._file = os.fstat(fd)
        if writable and not found.is_in_place:
            found.close()
            raise RegionBusyError(f"{where.file} was removed while it was opened; try again")
        return found

    def is_of(self, fd: int) -> bool:
        """Return whether a descriptor is of this region's file."""
        if self.place.is_device or self._file is None:
            return True
        return os.path.samestat(os.fstat(fd), self._file)

    @property
    def is_in_place(self) -> bool:
        """Return whether the path still leads to the file of this region."""
        if self.place.is_device or self._file is None:
            return True
        try:
            return os.path.samestat(os.stat(self.place.file), self._file)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # it cannot be known now

    @property
    def survives(self) -> str:
        """Return what a committed snapshot survives, in the words of the README's table."""
        return medium.survives(self.info.granularity)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot, which holds a snapshot and its tables."""
        return sum(segment.slot_bytes for segment in self.info.segments)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory that the region takes until it is removed.

        It is 0 on media that are not memory.
        """
        return self.info.size if medium.is_memory(self.info.medium) else 0

    @property
    def staged(self) -> bool:
        """Return whether copies go through DRAM and slots are invalidated in the background."""
        return medium.is_staged(self.info.medium, self.info.granularity)

    @property
    def continued(self) -> Record | None:
        """Return the snapshot here that the live state was last restored from or committed as."""
        return self.continuation.records.get(self.info.uuid)

    def recover(self) -> Recovery:
        """Read every slot; also set `next_sequence` and the slots' records for a writer."""
        good: list[Candidate] = []
        abandoned: list[Candidate] = []
        problems: list[str] = []
        for slot in self.slots:
            try:
                candidate = self._read(slot.index)
            except NoSnapshotError:
                continue
            except (CorruptSnapshotError, RegionIOError) as error:
                if self.native.describe().latched:
                    raise  # nothing can be written here any more
                problems.append(str(error))
                continue
            self.next_sequence = max(self.next_sequence, candidate.record.sequence + 1)
            (good if self.counts(candidate.record) else abandoned).append(candidate)
        good.sort(key=lambda c: c.record.sequence, reverse=True)
        for candidate in good:
            self.slots[candidate.record.slot].record = candidate.record
        return Recovery(tuple(preferred(good)), tuple(abandoned), tuple(problems))

    def _read(self, slot: int) -> Candidate:
        record, table, blob = self.native.read_tables(slot)
        context = f"{self.place.file} slot {slot} (step {record.step})"
        if not record.rank == self.info.rank < record.world:
            written = f"rank {record.rank} of {record.world}"
            raise CorruptSnapshotError(f"{context}: of {written}, not of rank {self.info.rank}")
        found = layout.decode(table, context=context)
        check(found, record, self.info.segments, context=context)
        state = manifest.decode(
            blob, count=len(found.entries), sequence=record.sequence, context=context
        )
        # The owner may have begun to overwrite the slot while it was read.
        if self.native.read_record(slot) != record:
            raise CorruptSnapshotError(f"{context}: overwritten while it was read")
        return Candidate(record, found, state)

    def counts(self, record: Record) -> bool:
        """Return whether recovery may use the record's snapshot.

        It must be of the newest timeline, or of an ancestor up to its branch point.
        """
        return record.timeline == self.info.timeline or any(
            record.timeline == timeline and record.sequence <= sequence
            for timeline, sequence in self.info.lineage
        )

    def fetch(
        self, candidate: Candidate, reads: npt.NDArray[Any], names: Sequence[str], threads: int
    ) -> None:
        """Verify extents of a candidate, copying those with a destination.

        Args:
            candidate: the snapshot that they belong to, for messages.
            reads: READ_DTYPE rows.
            names: the entry of each row, for messages.
            threads: number of threads, the caller included.

        Raises:
            CorruptSnapshotError: the message names slot, step and tensor; what destinations
                hold is then undefined.
        """
        bad = self.native.fetch(reads, threads) if len(reads) else None
        if bad is not None:
            record = candidate.record
            raise CorruptSnapshotError(
                f"{self.place.file} slot {record.slot} step {record.step}:"
                f" the bytes of {names[bad]} do not match their checksum"
            )

    def verified(self, candidate: Candidate) -> None:
        """Record that this process read the whole payload and found it good."""
        slot = self.slots[candidate.record.slot]
        slot.note_content(candidate.layout.digest, candidate.manifest.crcs)

    @property
    def written_here(self) -> bool:
        """Return whether the live state was restored from this region or written to it."""
        return self.info.uuid in self.continuation.newest

    @property
    def overtaken(self) -> bool:
        """Return whether others committed here since the live state was restored or written."""
        return self.next_sequence - 1 > self.continuation.newest.get(self.info.uuid, 0)

    def begin_timeline(self, continued: Record | None, timeline: int | None = None) -> None:
        """Begin a new timeline that continues `continued`, or nothing; it is durable on return.

        Snapshots beyond the branch point are abandoned from then on. May block on the medium.

        Args:
            continued: the snapshot that the live state continues.
            timeline: the id that the ranks agreed on; None: a random one, for a single rank.
        """
        lineage: list[tuple[int, int]] = []
        if continued is not None:
            lineage.append((continued.timeline, continued.sequence))
            lineage += [
                (timeline, sequence)
                for timeline, sequence in self.info.lineage
                if sequence < continued.sequence and timeline != continued.timeline
            ]
        self.timeline = timeline or new_timeline()
        self.native.branch(self.timeline, lineage[: native_region.MAX_LINEAGE])
        self.info = self.native.describe()
        self.protected = continued.slot if continued is not None else None
        for slot in self.slots:
            if slot.record and (continued is None or slot.record.sequence > continued.sequence):
                slot.record = None

    def rejoin_timeline(self, continued: Record | None, timeline: int) -> None:
        """Go on in the timeline of the other ranks, for a rank that replaces a lost one.

        Its snapshots of that timeline count as before: the rank was there.
        """
        if self.info.timeline != timeline:  # the region was made anew
            self.begin_timeline(continued, timeline)
            return
        self.timeline = timeline
        self.protected = continued.slot if continued is not None else None

    def fit(self, entries: Sequence[Entry], manifest_bytes: int) -> allocator.SlotPlan:
        """Plan the entries into a slot, growing the region when they do not fit.

        Raises:
            RegionFullError: the medium has no room, or cannot grow; the region stays as it was.
        """
        page = self.info.page_bytes
        found = allocator.plan(entries, allocator.Space(self.info.segments), manifest_bytes, page)
        if found is not None:
            return found
        needed = allocator.plan(entries, allocator.UNBOUNDED, manifest_bytes, page)
        assert needed is not None
        size = allocator.Space(self.info.segments).size
        lack = max(needed.needed_bytes - size, 0)
        # The end of every part may be too short for the next extent; the last try puts all in one
        # part.
        largest = max((entry.length for entry in entries), default=0) + page
        for missing in (lack, lack + len(self.info.segments) * largest, needed.needed_bytes):
            more = allocator.Space([*self.info.segments, Segment(0, missing, missing)])
            if allocator.plan(entries, more, manifest_bytes, page) is not None:
                break
        # A quarter more avoids the next growths; later it is more, as there can be 16 segments at
        # most.
        spare = size if len(self.info.segments) >= _FEW_SEGMENTS else size // 4
        with shm_advice(self.place.path):
            try:
                self.native.grow(max(missing, spare))
            except RegionFullError:
                if missing >= spare:
                    raise
                self.native.grow(missing)
        self.info = self.native.describe()
        grown = allocator.plan(entries, allocator.Space(self.info.segments), manifest_bytes, page)
        if grown is None:
            raise RegionFullError(
                f"{self.place.file}: a snapshot needs {needed.needed_bytes} bytes,"
                f" a slot has {allocator.Space(self.info.segments).size}"
            )
        return grown

    def prepare_writing(self, world: int, *, reserved_slots: int = 0) -> None:
        """Set how many ranks write now, and how many slots due snapshots leave to a failure."""
        self.world, self.reserved_slots = world, reserved_slots

    def use_reserved_slots(self) -> None:
        """Let due snapshots take every slot, because no later step can fail."""
        self.reserved_slots = 0

    def follow_ranks(self, reusable: Callable[[int, int], bool]) -> None:
        """Let all ranks decide from now on whether a committed snapshot counts.

        `reusable` tells whether the slot that holds (timeline, step) may be reused.
        """
        self.reusable = reusable

    def take_sequence(self) -> int:
        """Return the sequence of the next commit, which no other commit gets."""
        self.next_sequence += 1
        return self.next_sequence - 1

    def free_slots(self) -> list[Slot]:
        """List the slots that may be overwritten, those without a snapshot that counts first."""
        free = [s for s in self.slots if s.writer is None and s.index != self.protected]
        settled = (slot for slot in free if self._settled(slot))
        return sorted(settled, key=lambda slot: reuse_priority(slot.record, self._held))

    def has_room(self, *, due: bool) -> bool:
        """Return whether a snapshot can be begun; a `due` one leaves `reserved_slots` to a failure.

        A snapshot that was begun for a failure, and still counts, is in one of those slots.
        """
        return self._has_room(self.free_slots(), due=due)

    def _has_room(self, free: list[Slot], *, due: bool) -> bool:
        used = (
            sum(slot.kept for slot in self.slots if slot not in free)
            if due
            else self.reserved_slots
        )
        return len(free) > max(0, self.reserved_slots - used)

    @property
    def _held(self) -> Record | None:
        return self.slots[self.protected].record if self.protected is not None else None

    def _settled(self, slot: Slot) -> bool:
        """Return whether the slot may be reused.

        Its outcome must be known, and its snapshot not the newest that is whole over the ranks.
        """
        if slot.fate_open or self.reusable is None or slot.record is None:
            return not slot.fate_open
        if slot.kept:
            there = [s.record for s in self.slots if s.record and not s.fate_open]
            return slot.record.sequence < max(record.sequence for record in there)
        return self.reusable(slot.record.timeline, slot.record.step)

    def begin(self, pool: NativePool, *, due: bool = False, kept: bool = False) -> Slot | None:
        """Open a free slot for a new snapshot; None if every one is protected, busy or leased.

        Args:
            pool: the workers that will write.
            due: see `has_room`.
            kept: no other rank is asked about this snapshot.

        Raises:
            PreviousPersistError: an earlier failure latched the region.
        """
        free = self.free_slots()
        for slot in free if self._has_room(free, due=due) else ():
            try:
                slot.writer = NativeSnapshot(pool, self.native, slot.index)
            except RegionBusyError:
                continue
            slot.record, slot.kept = None, kept
            return slot
        return None

    def committed(self, slot: Slot, record: Record) -> None:
        """Record that the slot's snapshot is durable.

        With several ranks, its outcome is still open.
        """
        slot.record = record
        self.continuation.newest[self.info.uuid] = self.next_sequence - 1
        slot.fate_open = self.reusable is not None
        if not slot.fate_open:
            self.mark_committed(slot)

    def keep_rank_local(self, slot: Slot) -> None:
        """Keep the slot's snapshot until this rank has a newer one.

        No other rank was asked about it.
        """
        slot.fate_open, slot.kept = False, True

    def mark_committed(self, slot: Slot) -> None:
        """Record that the snapshot is durable on every rank; protect it if it is the best.

        The live state then continues it, unless a newer one is protected.
        """
        assert slot.record is not None, "overwritten before its fate was known"
        slot.fate_open = slot.kept = False
        if (held := self._held) is None or held.sequence <= slot.record.sequence:
            self.continuation.mark_continued(self, slot.record)
            # Of one step, one rank may have an exact share and another an early one: all ranks
            # protect it.
            if self.reusable is not None or replaces(slot.record, held):
                self.protect(slot)

    def protect(self, slot: Slot) -> None:
        """Keep the slot's snapshot until another slot is protected."""
        self.protected = slot.index

    def mark_aborted(self, slot: Slot) -> None:
        """Record that the slot's snapshot does not count: the slot is reused first."""
        slot.record, slot.fate_open = None, False

    def close(self) -> None:
        """Unmap and unlock; idempotent. No writer may be open."""
        self.native.close()


# ---- a region looked at while a trainer may write it ---------------------------------------------


def open_and_recover(where: Location) -> tuple[Region, Recovery]:
    """Open a region for reading and recover what it holds; the caller closes it.

    A trainer may overwrite slots, begin a timeline or grow the region between the reading of one
    slot and the next. When something is missing or does not hold, the region is therefore read
    again: real damage stays.
    """
    for _ in range(_LOOKS - 1):
        region, recovery = _look(where)
        if recovery.candidates and not recovery.problems:
            return region, recovery
        region.close()
    return _look(where)


def _look(where: Location) -> tuple[Region, Recovery]:
    region = Region.open(where, writable=False)
    try:
        return region, region.recover()
    except LightckError:
        region.close()
        raise


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
    where: Location, recovery: Recovery, step: int | str, problems: Sequence[str]
) -> str:
    """Describe why no snapshot can be given, and what the region holds."""
    there = sorted(c.record.step for c in recovery.candidates)
    left = sorted(c.record.step for c in recovery.abandoned)
    lines = [f"{where.file}: no whole snapshot (wanted: {step}; steps there: {there or 'none'})"]
    if left:
        lines.append(f"steps left behind by a later restore or overwrite: {left}")
    return "\n  ".join([*lines, *problems])
