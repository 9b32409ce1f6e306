"""Wrap a native region, its records and its boundary journal as typed objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.errors import CorruptSnapshotError, LightckError
from lightck.region._ffi import check, ffi, library
from lightck.region.medium import MEDIA

# ---- a region to make, or a mapping that somebody else made --------------------------------------

PROCESS_DURABLE = 2
JOURNAL_BYTES = 3 << 19
"""Default size of the boundary journal: three entries of 512 KiB."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """The parameters of a region to create (see `lck_region_spec`)."""

    run_id: bytes
    slot_count: int
    slot_bytes: int
    rank: int = 0
    world: int = 1
    journal_bytes: int = JOURNAL_BYTES
    process_durable: bool = False
    numa_node: int | None = None

    @property
    def measure(self) -> int:
        """Return how many bytes the region takes on a medium with pages of 4 KiB."""
        size = ffi.new("uint64_t *")
        check(library().lck_region_measure(self.to_native(), size), "measure a region")
        return int(size[0])

    def to_native(self) -> Any:
        """Convert to the native structure `lck_region_spec`."""
        native = ffi.new("lck_region_spec *")
        native.run_id = self.run_id
        native.rank, native.world = self.rank, self.world
        native.slot_count, native.slot_bytes = self.slot_count, self.slot_bytes
        native.journal_bytes = self.journal_bytes
        native.flags = PROCESS_DURABLE if self.process_durable else 0
        native.numa_node = -1 if self.numa_node is None else self.numa_node
        return native


@dataclass(frozen=True, slots=True)
class Backing:
    """A mapping that somebody else made (see `lck_backing`)."""

    base: int
    length: int
    release: Callable[[], object]
    """Unmaps the mapping; called once, when no region is open on it any more."""

    def to_native(self) -> Any:
        """Convert to the native structure `lck_backing`."""
        base = ffi.cast("void *", self.base)
        return ffi.new("lck_backing *", {"base": base, "length": self.length})


# ---- the region ----------------------------------------------------------------------------------

LINE_BYTES = 64
"""Extents start on a cache line and own their last line whole."""
MAX_LINEAGE = 16
READ_ONLY = 1
RECORD_EARLY, RECORD_SUSPECT, RECORD_JIT = 1, 2, 4
HOLDS_ALL = bytes(16)
"""The share digest in records of a rank that holds all of its state."""
E_CORRUPT, E_EMPTY, E_FULL = -5, -6, -9

READ_DTYPE = np.dtype(
    [("offset", "<u8"), ("length", "<u8"), ("destination", "<u8"), ("crc", "<u4"),
     ("reserved", "<u4")]
)  # fmt: skip


def kernel(select: str | None = None) -> str:
    """Return the name of the copy kernel in use, after selecting another one if asked.

    The selection holds for the process.
    """
    name = ffi.new("const char **")
    check(library().lck_kernel(select.encode() if select else ffi.NULL, name), "copy kernel")
    text: bytes = ffi.string(name[0])
    return text.decode()


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC32C of bytes, computed by the kernel in use."""
    return int(library().lck_crc32c(0, ffi.from_buffer(data), len(data)))


def crc32c_at(address: int, length: int, crc: int = 0) -> int:
    """Return the CRC32C of live memory, which must stay valid until the call returns.

    `crc` is the checksum of the bytes that precede it.
    """
    return int(library().lck_crc32c(crc, ffi.cast("const void *", address), length))


def crc32c_combined(crc_a: int, crc_b: int, length_b: int) -> int:
    """Return the CRC32C of bytes a followed by b, from both checksums and the length of b."""
    return int(library().lck_crc32c_combine(crc_a, crc_b, length_b))


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of the region; slot i owns `slot_bytes` from `offset + i * slot_bytes`."""

    offset: int
    length: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """The description of a region: its superblock and its mapping.

    Sizes in bytes, times in ns of the wall clock.
    """

    uuid: bytes
    run_id: bytes
    format_version: int
    rank: int
    world: int
    slot_count: int
    medium: str
    granularity: int
    page_bytes: int
    latched: int
    size: int
    generation: int
    created_ns: int
    timeline: int
    base: int
    device: int
    """The address of the same bytes for a device that stores copies itself."""
    journal_bytes: int
    """Bytes of the boundary journal, which holds three entries."""
    segments: tuple[Segment, ...]
    lineage: tuple[tuple[int, int], ...]
    """The ancestors of `timeline` as (timeline, sequence), each valid up to that sequence."""


@dataclass(frozen=True, slots=True)
class Record:
    """A commit record (see `lck_record`)."""

    sequence: int
    step: int
    timeline: int
    parent: int
    layout_offset: int
    layout_length: int
    manifest_offset: int
    manifest_length: int
    payload_bytes: int
    wall_time_ns: int
    flags: int
    slot: int
    rank: int
    world: int
    share_digest: bytes = HOLDS_ALL
    """The digest of the share map; equal on the ranks that share replicated state."""

    @property
    def early(self) -> bool:
        """Return whether the snapshot was finished before forward start."""
        return bool(self.flags & RECORD_EARLY)

    @property
    def suspect(self) -> bool:
        """Return whether replicas were found to differ at this snapshot or earlier.

        Earlier means: before this snapshot in its timeline.
        """
        return bool(self.flags & RECORD_SUSPECT)


STEP_END, FORWARD, FENCE = 1, 2, 3
"""The kinds of journal entries, LCK_JOURNAL_*; see `JournalEntry.kind`."""


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


class NativeRegion:
    """The owner of one `lck_region` and of the mapping below it.

    Errors of its methods name `self.label`.
    """

    def __init__(self, handle: Any, label: str, given: Backing | None = None) -> None:
        """Take ownership of `handle`; `label` is the path for messages."""
        self.handle = handle
        self.label = label
        self._given = given
        self._leases: Counter[int] = Counter()

    @classmethod
    def create(
        cls, fd: int, lock_fd: int, spec: RegionSpec, label: str, given: Backing | None = None
    ) -> NativeRegion:
        """Make a region in an empty file, on a device or on a given mapping, and own it.

        See `lck_region_create`. The mapping is released with the region, or when this fails.
        """
        out = ffi.new("lck_region **")
        if given is None:
            code = library().lck_region_create(fd, lock_fd, spec.to_native(), out)
        else:
            mapping = given.to_native()
            code = library().lck_region_create_on(mapping, fd, lock_fd, spec.to_native(), out)
        return cls._of(code, out[0], f"create region {label}", label, given)

    @classmethod
    def open(
        cls,
        fd: int,
        lock_fd: int,
        flags: int,
        numa_node: int | None,
        label: str,
        given: Backing | None = None,
    ) -> NativeRegion:
        """Open an existing region. See `lck_region_open`; for the mapping see `create`."""
        out = ffi.new("lck_region **")
        node = -1 if numa_node is None else numa_node
        if given is None:
            code = library().lck_region_open(fd, lock_fd, flags, node, out)
        else:
            code = library().lck_region_open_on(given.to_native(), fd, lock_fd, flags, out)
        return cls._of(code, out[0], f"open region {label}", label, given)

    @classmethod
    def _of(
        cls, code: int, handle: Any, context: str, label: str, given: Backing | None
    ) -> NativeRegion:
        try:
            check(code, context)
        except LightckError:
            if given is not None:
                given.release()
            raise
        return cls(handle, label, given)

    def describe(self) -> RegionInfo:
        """Return the region's current description."""
        raw = ffi.new("lck_region_info *")
        check(library().lck_region_describe(self.handle, raw), f"describe region {self.label}")
        return RegionInfo(
            uuid=bytes(raw.uuid),
            run_id=bytes(raw.run_id),
            medium=MEDIA[raw.medium],
            base=int(ffi.cast("uintptr_t", raw.base)),
            device=int(ffi.cast("uintptr_t", raw.device)),
            journal_bytes=raw.journal_length,
            segments=tuple(
                Segment(s.offset, s.length, s.slot_bytes)
                for s in raw.segments[0 : raw.segment_count]
            ),
            lineage=tuple((b.timeline, b.sequence) for b in raw.lineage[0 : raw.lineage_count]),
            **_numbers(
                raw,
                *("format_version", "rank", "world", "slot_count", "granularity", "page_bytes"),
                *("latched", "size", "generation", "created_ns", "timeline"),
            ),
        )

    def grow(self, slot_bytes: int) -> None:
        """Give every slot at least `slot_bytes` more. May block on the medium."""
        check(library().lck_region_grow(self.handle, slot_bytes), f"grow region {self.label}")

    def branch(self, timeline: int, lineage: Sequence[tuple[int, int]]) -> None:
        """Begin a timeline, durable on return. May block on the medium."""
        rows = ffi.new("lck_branch[]", [list(pair) for pair in lineage] or 1)
        code = library().lck_region_branch(self.handle, timeline, rows, len(lineage))
        check(code, f"begin timeline in {self.label}")

    def suspect(self, sequence: int) -> None:
        """Mark the newest timeline's snapshots from `sequence` on, future ones too, as suspect.

        The mark is durable on return. Any thread may call it; it may block on the medium.
        """
        check(library().lck_region_suspect(self.handle, sequence), f"mark in {self.label}")

    def read_record(self, slot: int) -> Record:
        """Return a slot's checked record.

        Raises:
            CorruptSnapshotError: record, bounds, layout table or manifest do not hold.
            RegionIOError: the medium cannot give them.
            NoSnapshotError: the slot is empty.
        """
        return _record(self._raw_record(slot))

    def read_tables(self, slot: int) -> tuple[Record, bytes, bytes]:
        """Return a slot's checked record with copies of its layout table and its manifest.

        Raises:
            CorruptSnapshotError: one of them does not hold, or the owner has overwritten it since.
            RegionIOError: the medium cannot give it.
            NoSnapshotError: the slot is empty.
        """
        raw = self._raw_record(slot)
        blobs = [np.empty(int(n), np.uint8) for n in (raw.layout_length, raw.manifest_length)]
        reads = np.zeros(2, READ_DTYPE)
        reads["offset"] = raw.layout_offset, raw.manifest_offset
        reads["length"] = [len(blob) for blob in blobs]
        reads["destination"] = [blob.ctypes.data for blob in blobs]
        reads["crc"] = raw.layout_crc, raw.manifest_crc
        if self.fetch(reads, 1) is not None:
            raise CorruptSnapshotError(f"{self.label} slot {slot}: overwritten while it was read")
        return _record(raw), blobs[0].tobytes(), blobs[1].tobytes()

    def _raw_record(self, slot: int) -> Any:
        raw = ffi.new("lck_record *")
        check(library().lck_slot_read(self.handle, slot, raw), f"{self.label} slot {slot}")
        return raw

    def lease(self, slot: int, hold: bool) -> None:
        """Take or drop a reader's lease; the slot is released when the last lease is dropped.

        Only one thread at a time may call it.
        """
        others = self._leases[slot] - (not hold)
        if others <= 0:  # the file's lock does not count how often it is taken
            code = library().lck_slot_lease(self.handle, slot, int(hold))
            check(code, f"lease of {self.label} slot {slot}")
        self._leases[slot] = max(others + hold, 0)

    def fetch(self, reads: npt.NDArray[Any], threads: int) -> int | None:
        """Verify extents and copy them out; return the index of the first bad one, or None.

        Args:
            reads: READ_DTYPE rows; destination 0 verifies only.
            threads: including the caller; blocks until all is read.
        """
        bad = ffi.new("uint64_t *")
        rows = ffi.cast("const lck_read *", reads.ctypes.data)
        code = library().lck_slot_fetch(self.handle, rows, len(reads), threads, bad)
        if code == E_CORRUPT:
            return int(bad[0])
        check(code, f"read {self.label}")
        return None

    def peek(self, offset: int, length: int, address: int) -> None:
        """Copy a part of an extent.

        The caller must check the whole, as no checksum of a part is known.

        Raises:
            CorruptSnapshotError: the part is outside of the region.
            RegionIOError: the medium cannot give the bytes.
        """
        if offset + length > self.describe().size:
            raise CorruptSnapshotError(f"{self.label}: [{offset}, +{length}) is outside of it")
        row = np.array([(offset, length, address, 0, 0)], READ_DTYPE)
        self.fetch(row, 1)  # its checksum verdict is ignored: the caller compares what was copied

    def write_journal(self, kind: int, step: int, timeline: int, blob: bytes) -> None:
        """Write a journal entry over the oldest of the three.

        A FENCE entry replaces the one of the same step. Only one thread at a time may call it; it
        waits for no medium.

        Raises:
            RegionFullError: a third of the journal is too small for the entry; says by how much.
            PreviousPersistError: the region is latched by an earlier failure.
            RegionError: `timeline` is not the region's newest.
        """
        entry = ffi.new("lck_journal_entry *")
        entry.step, entry.timeline, entry.length, entry.kind = step, timeline, len(blob), kind
        code = library().lck_journal_write(self.handle, entry, blob)
        if code != 0:
            check(code, f"journal of {self.label}")

    def read_journal(self, kind: int = 0) -> JournalEntry | None:
        """Return the journal's newest whole entry of a kind (0: any) and of the newest timeline.

        None: there is no such entry.

        Raises:
            CorruptSnapshotError: no entry is whole, and one is damaged.
            RegionError: the owner, another process, rewrote the entries faster than they were read.
        """
        raw = ffi.new("lck_journal_entry *")
        code = E_FULL
        while code == E_FULL:  # first pass, or the owner has just written a longer entry
            room = int(raw.length)
            blob = ffi.new("char[]", room or 1)
            code = library().lck_journal_read(self.handle, kind, raw, blob, room)
        if code == E_EMPTY:
            return None
        check(code, f"journal of {self.label}")
        numbers = JournalEntry.__dataclass_fields__.keys() - {"blob"}
        return JournalEntry(**_numbers(raw, *numbers), blob=bytes(ffi.buffer(blob, raw.length)))

    def close(self) -> None:
        """Unmap and unlock; idempotent."""
        handle, self.handle = self.handle, ffi.NULL
        check(library().lck_region_close(handle), f"close region {self.label}")
        given, self._given = self._given, None
        if given is not None:
            given.release()


def _record(raw: Any) -> Record:
    numbers = Record.__dataclass_fields__.keys() - {"share_digest"}
    return Record(**_numbers(raw, *numbers), share_digest=bytes(raw.share_digest))


def _numbers(raw: Any, *names: str) -> dict[str, int]:
    return {name: int(getattr(raw, name)) for name in names}
