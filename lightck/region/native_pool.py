"""Wrap the native workers, and a snapshot that they write, as typed Python objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.region._ffi import check, ffi, library
from lightck.region.native_region import NativeRegion

ALL = 2**64 - 1
COPY_IF_CHANGED, COPY_STAGED, COPY_FED = 1, 2, 4
SNAP_COMMITTED = 2
HELP_TOO, HELP_ALONE = 1, 2
SPAN_COPY, SPAN_DRAIN, SPAN_INVALIDATE, SPAN_TABLES, SPAN_SYNC, SPAN_RECORD = 1, 2, 3, 4, 5, 6
THREAD_COMMIT, THREAD_CALLER = 64, 65
E_TIMEOUT, E_MISMATCH = -10, -13
_MOST_THREADS = 4  # the default's limit: a few threads use all of a memory's bandwidth

COPY_DTYPE = np.dtype(
    [("offset", "<u8"), ("source", "<u8"), ("length", "<u8"), ("layer", "<u4"), ("flags", "<u4"),
     ("crc", "<u4"), ("reserved", "<u4")]
)  # fmt: skip
SPAN_DTYPE = np.dtype(
    [("begin_ns", "<u8"), ("end_ns", "<u8"), ("bytes", "<u8"), ("start", "<u8"), ("kind", "<u4"),
     ("thread", "<u4"), ("slot", "<u4"), ("batch", "<u4"), ("copy", "<u4"), ("copies", "<u4")]
)  # fmt: skip


def usual_threads() -> int:
    """Return how many threads copy, to a region or back.

    There is one for each CPU that the calling thread may use, 4 at most.
    """
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


class NativePool:
    """The owner of one `lck_pool`: the worker threads."""

    def __init__(self, threads: int, chunk_bytes: int, *, idle: bool, spans: int = 0) -> None:
        """Start the workers.

        Args:
            threads: their number; 0: one for each CPU of the calling thread, 4 at most.
            chunk_bytes: size of one piece of a copy.
            idle: the workers take only CPU time that nothing else wants.
            spans: how many of its last spans each worker keeps for `trace`; 0: none.
        """
        self.threads, self.chunk_bytes = threads or usual_threads(), chunk_bytes
        spec = ffi.new("lck_pool_spec *")
        spec.threads, spec.chunk_bytes, spec.idle = self.threads, chunk_bytes, idle
        spec.spans = spans
        out = ffi.new("lck_pool **")
        check(library().lck_pool_create(spec, out), "start the worker pool")
        self.handle = out[0]
        self.snapshots: set[NativeSnapshot] = set()
        """Every snapshot that may be open; an interrupt can take the last other reference to
        one."""

    def reap(self, known: Sequence[NativeSnapshot]) -> None:
        """Free the open snapshots that are not in `known`."""
        for snapshot in [s for s in self.snapshots if s not in known]:
            snapshot.free()

    def wake_time(self, timeout_s: float) -> float:
        """Wake the workers for nothing; return the seconds until one looked for work, at most."""
        ns = ffi.new("uint64_t *")
        check(library().lck_pool_wake_time(self.handle, int(timeout_s * 1e9), ns), "wake workers")
        return 1e-9 * float(ns[0])

    def pace(self, per_mille: int) -> None:
        """Set the workers' pace; 1000 is full speed, 0 pauses copies."""
        check(library().lck_pool_pace(self.handle, per_mille), "pace the worker pool")

    def limit(self, bytes_per_s: int) -> None:
        """Limit the rate of writes to the region; 0: no limit."""
        check(library().lck_pool_limit(self.handle, bytes_per_s), "limit the worker pool")

    def stage(self, size: int) -> None:
        """Map and fault in DRAM for staged copies of `size` bytes. Any thread may call it."""
        check(library().lck_pool_stage(self.handle, size), "map DRAM for staging")

    def stats(self) -> dict[str, int]:
        """Return the counters since the pool began (see `lck_stats`)."""
        raw = ffi.new("lck_stats *")
        check(library().lck_pool_stats(self.handle, raw), "read the pool's statistics")
        return {name: int(getattr(raw, name)) for name, _ in ffi.typeof("lck_stats").fields}

    def trace(self) -> tuple[npt.NDArray[Any], int]:
        """Return the threads' spans (SPAN_DTYPE rows) and how many newer ones displaced."""
        count, lost = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        code = library().lck_pool_trace(self.handle, ffi.NULL, 0, count, lost)
        check(code, "size up the trace")
        rows = np.zeros(int(count[0]), SPAN_DTYPE)
        there = ffi.cast("lck_span *", rows.ctypes.data)
        code = library().lck_pool_trace(self.handle, there, len(rows), count, lost)
        check(code, "read the trace")
        return rows[: int(count[0])], int(lost[0])

    def close(self) -> None:
        """Stop the workers; idempotent."""
        handle, self.handle = self.handle, ffi.NULL
        check(library().lck_pool_destroy(handle), "stop the worker pool")


class NativeSnapshot:
    """The owner of one `lck_snapshot`."""

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
        """Return the native snapshot; NULL once it is freed."""
        return self._out[0]

    def add(self, copies: npt.NDArray[Any]) -> int:
        """Add a batch (COPY_DTYPE rows), which waits until it is released; return its number."""
        batch = ffi.new("uint32_t *")
        rows = ffi.cast("const lck_copy *", copies.ctypes.data)
        check(library().lck_snapshot_add(self.handle, rows, len(copies), batch), self.label)
        return int(batch[0])

    def release(self, batch: int, up_to_bytes: int = ALL) -> None:
        """Let the workers copy the first `up_to_bytes` of a batch."""
        check(library().lck_snapshot_release(self.handle, batch, up_to_bytes), self.label)

    def cuts(self, batch: int) -> npt.NDArray[np.uint64]:
        """Return the byte positions at which a fed batch's chunks start, in ascending order."""
        count = ffi.new("uint64_t *")
        code = library().lck_snapshot_cuts(self.handle, batch, ffi.NULL, 0, count)
        check(code, self.label)
        starts = np.empty(int(count[0]), np.uint64)
        room = ffi.cast("uint64_t *", starts.ctypes.data)
        check(library().lck_snapshot_cuts(self.handle, batch, room, len(starts), count), self.label)
        return starts

    def feed(self, batch: int, end: int, address: int) -> None:
        """Give a fed batch its bytes up to `end`; address 0: they are in their extents already.

        The bytes must stay readable at `address` until `taken` returns True. Any thread may call
        it.
        """
        source = ffi.cast("const void *", address)
        check(library().lck_snapshot_feed(self.handle, batch, end, source), f"feed {self.label}")

    def taken(self, batch: int, end: int, timeout_s: float, help: bool) -> bool:
        """Wait until a fed batch's bytes up to `end` have been read, and return whether they have.

        Any thread may call it.
        """
        timeout_ns = int(timeout_s * 1e9)
        code = library().lck_snapshot_taken(self.handle, batch, end, timeout_ns, int(help))
        if code == E_TIMEOUT:
            return False
        check(code, f"capture into {self.label}")
        return True

    def capture(self, batch: int, timeout_s: float | None = None, *, help: int = HELP_TOO) -> None:
        """Copy as `help` says, and return when every copy of the batch has left its source."""
        timeout_ns = -1 if timeout_s is None else int(timeout_s * 1e9)
        code = library().lck_snapshot_capture(self.handle, batch, timeout_ns, help)
        check(code, f"capture into {self.label}")

    def audit(self, batch: int, seed: int, everything: bool) -> int | None:
        """Compare captured bytes with the live ones.

        Return the index of a copy that differs, or None.
        """
        bad = ffi.new("uint64_t *")
        code = library().lck_snapshot_audit(self.handle, batch, seed, int(everything), bad)
        if code == E_MISMATCH:
            return int(bad[0])
        check(code, f"audit of {self.label}")
        return None

    def digests(self, batch: int, count: int) -> npt.NDArray[np.uint32]:
        """Return the CRC32C of each copy, in the order given to `add`."""
        out = np.empty(count, np.uint32)
        crcs = ffi.cast("uint32_t *", out.ctypes.data)
        check(library().lck_snapshot_digests(self.handle, batch, crcs), self.label)
        return out

    def seal(self, fields: dict[str, Any], layout: bytes | None, manifest: bytes) -> None:
        """Start the commit in the background.

        `fields` are the record's fields that the caller decides.
        """
        record = ffi.new("lck_record *", fields)
        table = ffi.NULL if layout is None else ffi.from_buffer(layout)
        code = library().lck_snapshot_seal(self.handle, record, table, ffi.from_buffer(manifest))
        check(code, f"seal {self.label}")

    def wait(self, timeout_s: float | None) -> int:
        """Wait for the commit and return the state (SNAP_*); 0 polls.

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
        """Free the snapshot, which is given up if it is not sealed; idempotent."""
        handle, self._out[0] = self._out[0], ffi.NULL
        self._pool.snapshots.discard(self)
        check(library().lck_snapshot_free(handle), self.label)
