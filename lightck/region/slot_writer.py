"""Write one snapshot into a slot: copies in, digests out, manifest and record last."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.region import allocator, manifest
from lightck.region.layout import Layout
from lightck.region.manifest import Manifest
from lightck.region.native_pool import (
    ALL,
    COPY_FED,
    COPY_IF_CHANGED,
    COPY_STAGED,
    HELP_ALONE,
    SNAP_COMMITTED,
    NativePool,
    NativeSnapshot,
)
from lightck.region.native_region import HOLDS_ALL, Record
from lightck.region.region import CopyTable, Region, Slot


@dataclass(eq=False)
class Batch:
    """Copies that are released, captured and audited together."""

    number: int
    positions: npt.NDArray[np.intp]
    """The position in the layout of each copy's entry, in copy order."""
    total_bytes: int


@dataclass(eq=False)
class SlotWriter:
    """The owner of a slot until its snapshot is committed, failed or abandoned.

    Used by one thread.
    """

    region: Region
    slot: Slot
    plan: allocator.SlotPlan
    layout: Layout
    places: list[int]
    """The offsets of layout table and manifest."""
    known: npt.NDArray[np.uint32] | None
    """CRCs of what the extents hold now, if this process knows them; for copies that may be
    skipped."""
    batches: list[Batch] = field(default_factory=list)
    record: Record | None = None
    """The commit record; set by `seal`."""
    crcs: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    """The CRC32C of each entry's extent; set by `seal`."""

    @classmethod
    def open(
        cls,
        region: Region,
        pool: NativePool,
        plan: allocator.SlotPlan,
        *,
        due: bool = False,
        kept: bool = False,
    ) -> SlotWriter | None:
        """Take a free slot, or return None when there is none.

        Its old content is invalid from then on.

        Page media invalidate in the background, so that this never waits for the medium: I9 (the
        training thread waits only at the fence). For `due` and `kept` see `Region.begin`.
        """
        slot = region.begin(pool, due=due, kept=kept)
        if slot is None:
            return None
        layout, places = slot.layout_of(plan, region.info.segments)
        known = slot.take_digests(layout.digest)
        return cls(region, slot, plan, layout, places, known)

    @property
    def snapshot(self) -> NativeSnapshot:
        """Return the native snapshot, which must be open."""
        assert self.slot.writer is not None, "the snapshot is closed"
        return self.slot.writer

    def add(
        self,
        positions: npt.NDArray[np.intp],
        sources: npt.NDArray[np.uint64],
        may_skip: npt.NDArray[np.bool_],
        staged: npt.NDArray[np.bool_],
    ) -> Batch:
        """Queue copies, which wait until they are released.

        Args:
            positions: entries of the layout, in the order of release.
            sources: addresses, valid until the batch is captured.
            may_skip: a copy need not be written if its digest equals the extent's known one.
            staged: the copy goes to DRAM first.
        """
        table, copies = self._copies(positions, staged)
        copies["source"] = sources
        if self.known is not None and may_skip.any():
            copies["flags"] |= may_skip * np.uint32(COPY_IF_CHANGED)
            copies["crc"] = self.known[positions]
        return self._added(table, copies)

    def add_fed(self, positions: npt.NDArray[np.intp], staged: npt.NDArray[np.bool_]) -> Batch:
        """Queue copies whose bytes will be fed (`NativeSnapshot.feed`), in this order."""
        table, copies = self._copies(positions, staged)
        copies["flags"] |= np.uint32(COPY_FED)
        return self._added(table, copies)

    def _copies(
        self, positions: npt.NDArray[np.intp], staged: npt.NDArray[np.bool_]
    ) -> tuple[CopyTable, npt.NDArray[Any]]:
        table = self.slot.copies_of(self.plan, len(self.batches), positions)
        copies = table.rows.copy()
        if staged.any():
            copies["flags"] = staged * np.uint32(COPY_STAGED)
        return table, copies

    def _added(self, table: CopyTable, copies: npt.NDArray[Any]) -> Batch:
        batch = Batch(self.snapshot.add(copies), table.positions, table.total_bytes)
        self.batches.append(batch)
        return batch

    def release(self, batch: Batch, up_to_bytes: int = ALL) -> None:
        """Let the workers copy the first `up_to_bytes` of a batch."""
        self.snapshot.release(batch.number, up_to_bytes)

    def finish_copies(self, batch: Batch, timeout_s: float | None = None) -> None:
        """Help the workers to copy, and return when every copy of the batch has left its source."""
        self.snapshot.capture(batch.number, timeout_s)

    def copy_alone(self, batch: Batch) -> None:
        """Copy a batch on the calling thread, waking no worker; return when all of it is done."""
        self.snapshot.capture(batch.number, help=HELP_ALONE)

    def audit(self, batch: Batch, seed: int, everything: bool) -> str | None:
        """Return the name of a tensor whose live bytes differ from the captured ones, or None."""
        bad = self.snapshot.audit(batch.number, seed, everything)
        return None if bad is None else self.layout.entries[batch.positions[bad]].name

    def seal(
        self,
        step: int,
        at_step: bytes,
        at_forward: bytes,
        flags: int = 0,
        share_digest: bytes = HOLDS_ALL,
    ) -> None:
        """Start the commit in the background; every batch must be captured.

        The layout table is written only when the slot does not hold it already.
        """
        region, slot, plan = self.region, self.slot, self.plan
        crcs = np.zeros(len(plan.entries), np.uint32)
        for batch in self.batches:
            crcs[batch.positions] = self.snapshot.digests(batch.number, len(batch.positions))
        sequence = region.take_sequence()
        blob = manifest.encode(Manifest(step, sequence, crcs, at_step, at_forward))
        assert len(blob) <= plan.manifest_bytes, (len(blob), plan.manifest_bytes)
        table_at, manifest_at = self.places
        fields: dict[str, Any] = {
            "sequence": sequence,
            "step": step,
            "timeline": region.timeline,
            "parent": region.info.lineage[0][0] if region.info.lineage else 0,
            "layout_offset": table_at,
            "layout_length": plan.table_bytes,
            "manifest_offset": manifest_at,
            "manifest_length": len(blob),
            "wall_time_ns": time.time_ns(),
            "flags": flags,
            "share_digest": share_digest,
            "world": region.world,
        }
        there = slot.take_table(self.layout.digest)
        self.snapshot.seal(fields, None if there else self.layout.table, blob)
        self.crcs = crcs
        self.record = Record(
            payload_bytes=self.layout.payload_bytes,
            slot=slot.index,
            rank=region.info.rank,
            **fields,
        )

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the commit and return whether the sealed snapshot is committed; 0 polls.

        Raises:
            LightckError: the background failure; the slot stays invalid and the snapshot is closed.
        """
        try:
            state = self.snapshot.wait(timeout_s)
        except Exception:
            self.abandon()
            raise
        if state != SNAP_COMMITTED:
            return False
        assert self.record is not None
        # Protect first: an interrupt in between must not leave the newest snapshot unprotected.
        self.region.committed(self.slot, self.record)
        self.slot.note_content(self.layout.digest, self.crcs)
        self.slot.close_writer()
        return True

    def abandon(self) -> None:
        """Give the snapshot up; the slot stays invalid and can be reused. Idempotent."""
        self.slot.close_writer()
