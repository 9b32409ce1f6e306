"""Snapshots of plain bytes in a region, without torch: what the region's floor is tested with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightck.errors import CorruptSnapshotError
from lightck.region import allocator, location, native_region
from lightck.region.backends import select
from lightck.region.layout import Entry
from lightck.region.native_pool import NativePool
from lightck.region.native_region import RegionSpec
from lightck.region.region import Candidate, Region, open_and_recover
from lightck.region.slot_writer import SlotWriter

Bytes = npt.NDArray[np.uint8]
Contents = Mapping[str, Bytes]
BLOB_BYTES = 256


def entries_of(contents: Contents) -> tuple[Entry, ...]:
    """A layout of byte tensors."""
    return tuple(
        Entry(name, "parameter", "uint8", (len(data),), (1,), len(data), layer=name)
        for name, data in contents.items()
    )


def random_contents(rng: np.random.Generator, sizes: Mapping[str, int]) -> dict[str, Bytes]:
    """Random bytes for each name."""
    return {name: rng.integers(0, 256, size, np.uint8) for name, size in sizes.items()}


class Book:
    """One region that is written; a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 2,
        slot_bytes: int = 1 << 20,
        durable: bool = False,
        backend: location.Backend = "auto",
    ) -> None:
        self.where = location.locate(folder, 0, create=True, backend=backend)
        if self.where.exists and not select.is_blank(self.where):
            self.region = Region.open(self.where, writable=True, process_durable=not durable)
            self.region.recover()
        else:
            spec = RegionSpec(bytes(16), slots, slot_bytes, process_durable=not durable)
            self.region = Region.create(self.where, spec)
        self.pool = NativePool(threads=1, chunk_bytes=4096, idle=False)

    def __enter__(self) -> Book:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abandon what is open, unmap, unlock."""
        for slot in self.region.slots:
            slot.close_writer()
        self.pool.close()
        self.region.close()

    def open(self, contents: Contents, *, may_skip: bool = False) -> SlotWriter | None:
        """Open a snapshot of which all is captured and nothing committed; None without a slot."""
        entries = entries_of(contents)
        capacity = allocator.manifest_capacity(len(entries), 2 * BLOB_BYTES)
        writer = SlotWriter.open(self.region, self.pool, self.region.fit(entries, capacity))
        if writer is None:
            return None
        filled = np.array([i for i, e in enumerate(entries) if e.length], np.intp)
        sources = np.array([contents[entries[i].name].ctypes.data for i in filled], np.uint64)
        batch = writer.add(
            filled, sources, np.full(len(filled), may_skip), np.arange(len(filled)) % 2 == 0
        )
        writer.finish_copies(batch)
        return writer

    def seal(self, writer: SlotWriter, step: int) -> None:
        """Start the commit; the boundary blobs name the step."""
        writer.seal(step, b"at step %d" % step, b"at forward %d" % step)

    def commit(self, step: int, contents: Contents) -> bool:
        """Return whether there was a slot; on return the snapshot is committed."""
        writer = self.open(contents)
        if writer is None:
            return False
        self.seal(writer, step)
        assert writer.wait(None)
        return True


def contents_of(region: Region, candidate: Candidate) -> dict[str, Bytes]:
    """Verified bytes of a snapshot.

    Raises:
        CorruptSnapshotError: they do not match their checksums.
    """
    layout = candidate.layout
    found = {entry.name: np.zeros(entry.length, np.uint8) for entry in layout.entries}
    rows = np.zeros(len(layout.entries), native_region.READ_DTYPE)
    rows["offset"], rows["length"] = layout.offsets, layout.lengths
    rows["crc"] = candidate.manifest.crcs
    rows["destination"] = [found[entry.name].ctypes.data for entry in layout.entries]
    filled = np.flatnonzero(layout.lengths > 0)
    region.fetch(candidate, rows[filled], [layout.entries[i].name for i in filled], 1)
    return found


def newest(region: Region) -> tuple[int | None, dict[str, Bytes], list[str]]:
    """Return what recovery gives: its step (None: nothing), its verified bytes, and the problems.

    The problems say what it fell back from.
    """
    recovery = region.recover()
    problems = list(recovery.problems)
    for candidate in recovery.candidates:
        try:
            found = contents_of(region, candidate)
        except CorruptSnapshotError as error:
            problems.append(str(error))
            continue
        step = candidate.record.step
        assert candidate.manifest.at_step == b"at step %d" % step
        assert candidate.manifest.at_forward == b"at forward %d" % step
        assert candidate.manifest.step == step
        return step, found, problems
    return None, {}, problems


def stored(folder: Path) -> dict[int, dict[str, Bytes]]:
    """Every whole snapshot at a path, by step, verified."""
    region, recovery = open_and_recover(location.locate(folder, 0, create=False))
    try:
        return {c.record.step: contents_of(region, c) for c in recovery.candidates}
    finally:
        region.close()


def same(a: Contents, b: Contents) -> bool:
    """Say whether two contents are equal, byte for byte."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
