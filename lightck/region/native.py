"""The native writer's handles as typed Python objects; calls of the journal are in `journal`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.errors import CorruptSnapshotError, LightckError
from lightck.region.library import check, ffi, library
from lightck.region.spec import Backing, RegionSpec

LINE_BYTES = 64
"""Extents start on a cache line and own their last line whole."""
MAX_LINEAGE = 16
ALL = 2**64 - 1
COPY_IF_CHANGED, COPY_STAGED = 1, 2
READ_ONLY = 1
RECORD_EARLY, RECORD_SUSPECT, RECORD_JIT = 1, 2, 4
E_EMPTY, E_CORRUPT, E_LEASED, E_BUSY, E_FULL, E_TIMEOUT, E_MISMATCH = -6, -5, -8, -7, -9, -10, -13
SNAP_OPEN, SNAP_SEALED, SNAP_COMMITTED, SNAP_FAILED = 0, 1, 2, 3
MEDIA = {1: "fsdax", 2: "devdax", 3: "file", 4: "tmpfs", 5: "hugetlbfs"}

COPY_DTYPE = np.dtype(
    [("offset", "<u8"), ("source", "<u8"), ("length", "<u8"), ("layer", "<u4"), ("flags", "<u4"),
     ("crc", "<u4"), ("reserved", "<u4")]
)  # fmt: skip
READ_DTYPE = np.dtype(
    [("offset", "<u8"), ("length", "<u8"), ("destination", "<u8"), ("crc", "<u4"),
     ("reserved", "<u4")]
)  # fmt: skip


def kernel(select: str | None = None) -> str:
    """Name of the copy kernel in use, after selecting another one if asked (process-wide)."""
    name = ffi.new("const char **")
    check(library().lck_kernel(select.encode() if select else ffi.NULL, name), "copy kernel")
    text: bytes = ffi.string(name[0])
    return text.decode()


def crc32c(data: bytes | memoryview) -> int:
    """CRC32C of bytes, by the kernel in use."""
    return int(library().lck_crc32c(0, ffi.from_buffer(data), len(data)))


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of the region; slot i owns `slot_bytes` from `offset + i * slot_bytes`."""

    offset: int
    length: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """What a region says about itself. Sizes in bytes, times in ns of the wall clock."""

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
    segments: tuple[Segment, ...]
    lineage: tuple[tuple[int, int], ...]
    """(timeline, sequence): ancestors of `timeline`, each up to its branch point."""


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

    @property
    def early(self) -> bool:
        """Finished before the boundary instant (b)."""
        return bool(self.flags & RECORD_EARLY)


class NativeRegion:
    """Owns one `lck_region`, and the mapping below it. Method errors name `self.label`."""

    def __init__(self, handle: Any, label: str, given: Backing | None = None) -> None:
        """Take ownership of `handle`; `label` is the path for messages."""
        self.handle = handle
        self.label = label
        self._given = given

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
        """The region's description as of now."""
        raw = ffi.new("lck_region_info *")
        check(library().lck_region_describe(self.handle, raw), f"describe region {self.label}")
        return RegionInfo(
            uuid=bytes(raw.uuid),
            run_id=bytes(raw.run_id),
            format_version=raw.format_version,
            rank=raw.rank,
            world=raw.world,
            slot_count=raw.slot_count,
            medium=MEDIA[raw.medium],
            granularity=raw.granularity,
            page_bytes=raw.page_bytes,
            latched=raw.latched,
            size=raw.size,
            generation=raw.generation,
            created_ns=raw.created_ns,
            timeline=raw.timeline,
            base=int(ffi.cast("uintptr_t", raw.base)),
            segments=tuple(
                Segment(s.offset, s.length, s.slot_bytes)
                for s in raw.segments[0 : raw.segment_count]
            ),
            lineage=tuple((b.timeline, b.sequence) for b in raw.lineage[0 : raw.lineage_count]),
        )

    def grow(self, slot_bytes: int) -> None:
        """Give every slot at least `slot_bytes` more. May block on the medium."""
        check(library().lck_region_grow(self.handle, slot_bytes), f"grow region {self.label}")

    def branch(self, timeline: int, lineage: Sequence[tuple[int, int]]) -> None:
        """Durably begin a timeline. May block on the medium."""
        rows = ffi.new("lck_branch[]", [list(pair) for pair in lineage] or 1)
        code = library().lck_region_branch(self.handle, timeline, rows, len(lineage))
        check(code, f"begin timeline in {self.label}")

    def read_record(self, slot: int) -> Record:
        """A slot's checked record.

        Raises:
            CorruptSnapshotError: record, bounds, layout table or manifest do not hold.
            RegionIOError: the medium cannot give them.
            NoSnapshotError: the slot is empty.
        """
        return _record(self._raw_record(slot))

    def read_tables(self, slot: int) -> tuple[Record, bytes, bytes]:
        """A slot's checked record with copies of its layout table and its manifest.

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
        """Take or drop a reader's lease."""
        code = library().lck_slot_lease(self.handle, slot, int(hold))
        check(code, f"lease of {self.label} slot {slot}")

    def fetch(self, reads: npt.NDArray[Any], threads: int) -> int | None:
        """Verify extents and copy them out; the index of the first bad one, or None.

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

    def close(self) -> None:
        """Unmap and unlock; idempotent."""
        handle, self.handle = self.handle, ffi.NULL
        check(library().lck_region_close(handle), f"close region {self.label}")
        given, self._given = self._given, None
        if given is not None:
            given.release()


def _record(raw: Any) -> Record:
    return Record(**{name: int(getattr(raw, name)) for name in Record.__dataclass_fields__})


class NativePool:
    """Owns one `lck_pool`: the worker threads."""

    def __init__(self, threads: int, chunk_bytes: int, nice: int) -> None:
        """Start the workers."""
        spec = ffi.new("lck_pool_spec *")
        spec.threads, spec.chunk_bytes, spec.nice = threads, chunk_bytes, nice
        out = ffi.new("lck_pool **")
        check(library().lck_pool_create(spec, out), "start the worker pool")
        self.handle = out[0]
        self.snapshots: set[NativeSnapshot] = set()
        """Every one that may be open; an interrupt can take the last other reference to one."""

    def reap(self, known: Sequence[NativeSnapshot]) -> None:
        """Free the open snapshots that nobody knows of."""
        for snapshot in [s for s in self.snapshots if s not in known]:
            snapshot.free()

    def pace(self, per_mille: int) -> None:
        """Set the workers' pace; 1000 is full speed, 0 pauses copies."""
        check(library().lck_pool_pace(self.handle, per_mille), "pace the worker pool")

    def limit(self, bytes_per_s: int) -> None:
        """Write at most that much to the region; 0: no limit."""
        check(library().lck_pool_limit(self.handle, bytes_per_s), "limit the worker pool")

    def stage(self, size: int) -> None:
        """Map and fault in DRAM for staged copies of `size` bytes. Any thread."""
        check(library().lck_pool_stage(self.handle, size), "map DRAM for staging")

    def stats(self) -> dict[str, int]:
        """Counters since the pool began (see `lck_stats`)."""
        raw = ffi.new("lck_stats *")
        check(library().lck_pool_stats(self.handle, raw), "read the pool's statistics")
        return {name: int(getattr(raw, name)) for name, _ in ffi.typeof("lck_stats").fields}

    def close(self) -> None:
        """Stop the workers; idempotent."""
        handle, self.handle = self.handle, ffi.NULL
        check(library().lck_pool_destroy(handle), "stop the worker pool")


class NativeSnapshot:
    """Owns one `lck_snapshot`."""

    def __init__(self, pool: NativePool, region: NativeRegion, slot: int) -> None:
        """Open `slot`; its old content becomes invalid before the first payload byte changes."""
        self._out = ffi.new("lck_snapshot **")
        self._pool = pool
        self.label = f"{region.label} slot {slot}"
        pool.snapshots.add(self)
        code = library().lck_snapshot_begin(pool.handle, region.handle, slot, self._out)
        if code < 0:
            pool.snapshots.discard(self)
        check(code, f"open snapshot in {self.label}")

    @property
    def handle(self) -> Any:
        """The native snapshot; NULL once it is freed."""
        return self._out[0]

    def add(self, copies: npt.NDArray[Any]) -> int:
        """Add a batch (COPY_DTYPE rows), held back until released; returns its number."""
        batch = ffi.new("uint32_t *")
        rows = ffi.cast("const lck_copy *", copies.ctypes.data)
        check(library().lck_snapshot_add(self.handle, rows, len(copies), batch), self.label)
        return int(batch[0])

    def release(self, batch: int, up_to_bytes: int = ALL) -> None:
        """Let the first `up_to_bytes` of a batch run."""
        check(library().lck_snapshot_release(self.handle, batch, up_to_bytes), self.label)

    def capture(self, batch: int, timeout_s: float | None = None, help: bool = True) -> None:
        """Return when every copy of the batch has left its source."""
        timeout_ns = -1 if timeout_s is None else int(timeout_s * 1e9)
        code = library().lck_snapshot_capture(self.handle, batch, timeout_ns, int(help))
        check(code, f"capture into {self.label}")

    def audit(self, batch: int, seed: int, everything: bool) -> int | None:
        """Compare captured bytes with the live ones; index of a copy that differs, or None."""
        bad = ffi.new("uint64_t *")
        code = library().lck_snapshot_audit(self.handle, batch, seed, int(everything), bad)
        if code == E_MISMATCH:
            return int(bad[0])
        check(code, f"audit of {self.label}")
        return None

    def digests(self, batch: int, count: int) -> npt.NDArray[np.uint32]:
        """CRC32C per copy, in the order given to `add`."""
        out = np.empty(count, np.uint32)
        crcs = ffi.cast("uint32_t *", out.ctypes.data)
        check(library().lck_snapshot_digests(self.handle, batch, crcs), self.label)
        return out

    def seal(self, fields: dict[str, int], layout: bytes | None, manifest: bytes) -> None:
        """Commit in the background. `fields` are those of the record that the caller decides."""
        record = ffi.new("lck_record *", fields)
        table = ffi.NULL if layout is None else ffi.from_buffer(layout)
        code = library().lck_snapshot_seal(self.handle, record, table, ffi.from_buffer(manifest))
        check(code, f"seal {self.label}")

    def wait(self, timeout_s: float | None) -> int:
        """State after waiting (SNAP_*); 0 polls.

        Raises:
            LightckError: the background failure, as an exception of its kind.
        """
        state = ffi.new("int *")
        timeout_ns = -1 if timeout_s is None else int(timeout_s * 1e9)
        code = library().lck_snapshot_wait(self.handle, timeout_ns, state)
        if code == E_TIMEOUT:
            return int(state[0])
        check(code, f"commit of {self.label}")
        return int(state[0])

    def free(self) -> None:
        """Give up if unsealed; idempotent."""
        handle, self._out[0] = self._out[0], ffi.NULL
        self._pool.snapshots.discard(self)
        check(library().lck_snapshot_free(handle), self.label)
