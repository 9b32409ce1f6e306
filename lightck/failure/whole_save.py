"""The save of a whole step by one healthy rank, where shares of it are missing on the node.

A rank that has saved its own share looks at its node: a peer's share is missing if the peer is dead
(nobody owns its region), or stands still, or hears nothing (it owns its region, and commits
nothing). Replicated state is in every healthy rank's memory, so the lowest one that has the step
writes all of it into the node's failure region (`region/failure_region.py`); the next one does if
that one does not come to it. Nothing is written into a peer's region, and no peer is asked.

What is a peer's own (buffers, generators, extras, data position) is in its journal, I10 (the
boundary journal), which any process of the node can read. The entries of all ranks are copied into
the snapshot, those of step end and of forward start: it needs no journal any more, which the next
life overwrites, and restore chooses the instant that all ranks have. The replicated state is the
same at both; should the loop have changed weights in between, nothing is saved.

A rank that stands inside its update, or died there, has left the entry of the fence. What its step
end would have been follows from what that very update did to the state of the rank that saves: its
own entries around it are compared (`journal/entry.py`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lightck.device.base import Device
from lightck.distributed.sharding import ReplicatedTensors, is_alike
from lightck.distributed.topology import Topology
from lightck.errors import LightckError, TornSnapshotError, WaitTimeoutError
from lightck.events import event
from lightck.journal.copy_buffer import is_readable
from lightck.journal.device_lag import PreUpdateState
from lightck.journal.entry import (
    CannotInfer,
    RankEntry,
    entries_in,
    forward_of,
    missing_tensors,
    step_end_of,
    with_entries,
)
from lightck.journal.step_journal import BoundaryCapture
from lightck.loop import state_prediction
from lightck.loop.checkpointer import Checkpointer
from lightck.pipeline.copy_plan import CopyPlan, CopySources
from lightck.region import allocator, failure_region, location
from lightck.region.layout import Entry
from lightck.region.native_pool import NativePool
from lightck.region.native_region import (
    FENCE,
    FORWARD,
    HOLDS_ALL,
    RECORD_EARLY,
    RECORD_JIT,
    STEP_END,
    JournalEntry,
    Record,
)
from lightck.region.region import Region, Slot
from lightck.region.slot_writer import SlotWriter
from lightck.state import boundary_blob, tensor_layout
from lightck.state.inventory import StateTensor

PATIENCE_S = 2.0
"""Seconds in which a living peer may still commit its share: it has to notice the failure, and to
come to its boundary or not. At most a third of the time that is left."""
TURN_S = 1.0
"""The turn of each lower rank that has the step, in seconds, before the next one writes."""
CHUNK_BYTES = 1 << 20
_FETCHED_BYTES = 4 << 20
"""Bytes fetched from a device at once."""
_POLL_S = 0.01
_MAX_NAMES = 4
_unfinished_copies: list[tuple[torch.Tensor, CopySources]] = []
"""Copies that a device did not finish in time and may still make."""


class _Refused(Exception):
    """A precondition does not hold; no snapshot was begun."""


def of_step(slots: Sequence[Slot], timeline: int, step: int | None) -> list[Record]:
    """Return the committed snapshots of a step, exact ones first."""
    records = [slot.record for slot in slots if slot.record is not None]
    found = [r for r in records if (r.timeline, r.step) == (timeline, step)]
    return sorted(found, key=lambda record: record.early)


@dataclass(frozen=True, slots=True)
class PeerShare:
    """The state of a rank's region, as far as a step is concerned.

    Attributes:
        rank: the rank.
        has_it: its share is committed, of the same instant and share map as this rank's.
        has_step: a snapshot of the step is committed, of either instant.
        may_come: it is not, but a process owns its region, which holds nothing of that step or a
            newer one.
        entries: its journal's entries of the step.
    """

    rank: int
    has_it: bool = False
    has_step: bool = False
    may_come: bool = False
    entries: tuple[JournalEntry, ...] = ()


@dataclass(eq=False)
class WholeSaver:
    """Saves a step whole for one rank of a node, if shares of it are missing. Any thread."""

    checkpointer: Checkpointer
    topology: Topology
    replicated: ReplicatedTensors
    process_durable: bool = False
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reserving: threading.Thread | None = None

    @classmethod
    def create(
        cls, checkpointer: Checkpointer, topology: Topology, *, process_durable: bool
    ) -> WholeSaver:
        """Create it for the handle of a checkpointer."""
        inventory = checkpointer.inventory
        replicated = ReplicatedTensors(inventory.model, inventory.optimizers, topology.world)
        return cls(checkpointer, topology, replicated, process_durable)

    def reserve(self) -> None:
        """Make the node's failure region, on a thread, if this is the lowest rank of several.

        What cannot be made now is told, and tried again at a failure. Called on the training
        thread, at attach.
        """
        inventory = self.checkpointer.inventory
        first = min(self.topology.peers) == self.topology.rank
        everything = inventory.everything()
        if not (
            first and self._reaches_peers() and is_alike(everything, self.replicated(everything))
        ):
            return
        entries, manifest_bytes = state_prediction.expected(inventory, whole=True)
        # Of three places, each with room for twice an entry, the snapshot has two entries a rank.
        manifest_bytes += len(self.topology.peers) * state_prediction.journal_bytes(inventory) // 3

        def make() -> None:
            try:
                with contextlib.closing(self._region(entries, manifest_bytes)) as region:
                    event("failure_region", file=region.place.file, bytes=region.info.size)
            except LightckError as error:
                event("no_failure_region", logging.WARNING, why=error)

        self._reserving = threading.Thread(target=make, name="lightck-reserve", daemon=True)
        self._reserving.start()

    def stop(self) -> None:
        """Wait until the failure region is made."""
        if self._reserving is not None:
            self._reserving.join()

    def save_if_lacking(self, deadline: float, *, joins: bool = False) -> bool:
        """Save the step of this rank's newest snapshot whole, if a peer of the node lacks its part.

        On return it is committed by this rank or another one, or nothing was missing, or an event
        says why not. It waits for peers that live, `PATIENCE_S` at most.

        Args:
            deadline: `time.monotonic()` at which it gives up.
            joins: a replacement of the lost rank goes on from the forward start at which this one
                stands: what the lost rank would have left there is inferred.

        Returns:
            Whether this rank has written it, and some rank has it of the step end only: then ranks
            of other nodes need that instant, too.
        """
        with self._lock:
            records = self._own_records()
            if not records or not self._reaches_peers():
                return False
            ours, began = records[0], self.clock()
            patience = min(PATIENCE_S, (deadline - began) / 3)
            settled_at: float | None = None
            why = ""
            while True:
                if self._is_saved(ours, whole_at_forward=joins):
                    return False
                peers = [self._share_of(rank, ours) for rank in self.topology.peers]
                lacking = [peer for peer in peers if not peer.has_it]
                if not lacking:
                    return False
                now = self.clock()
                if now >= began + patience or not any(peer.may_come for peer in lacking):
                    settled_at = settled_at or now
                lower = sum(p.has_step and p.rank < self.topology.rank for p in peers)
                if settled_at is not None and now >= settled_at + lower * TURN_S:
                    try:
                        return self._save(ours, peers, deadline, joins=joins)
                    except (_Refused, LightckError) as error:
                        why = str(error)
                if why or now >= deadline:
                    why = why or "no time was left"
                    event("not_saved_whole", logging.WARNING, step=ours.step, why=why)
                    return False
                time.sleep(_POLL_S)

    # ---- what is there ---------------------------------------------------------------------

    def _own_records(self) -> list[Record]:
        """Return this rank's committed snapshots of the step to be saved, exact ones first."""
        region = self.checkpointer.pipeline.region
        return of_step(region.slots, region.timeline, self._step)

    @property
    def _pre_update(self) -> PreUpdateState | None:
        lag = self.checkpointer.device_lag
        return lag.claimed if lag is not None else None

    @property
    def _step(self) -> int | None:
        """The step whose state devices have if they hang, else that of the live tensors."""
        if (pre_update := self._pre_update) is not None:
            return pre_update.step
        return None if self.checkpointer.mixed else self.checkpointer.steps.step

    def _reaches_peers(self) -> bool:
        place = self.checkpointer.pipeline.region.place
        return len(self.topology.peers) > 1 and place.is_plain and place.path != place.file

    def _is_saved(self, ours: Record, *, whole_at_forward: bool) -> bool:
        """Tell whether a failure region of the node holds the step already.

        `whole_at_forward`: with what is each rank's own at forward start.
        """
        own = self.checkpointer.pipeline.region
        for where in location.failure_files(own.place):
            with contextlib.suppress(LightckError), _reading(where) as region:
                for record in of_step(region.slots, ours.timeline, ours.step):
                    if not whole_at_forward or self._has_all_at_forward(region, record):
                        return True
        return False

    def _has_all_at_forward(self, region: Region, record: Record) -> bool:
        found = (c for c in region.recover().candidates if c.record == record)
        for candidate in found:
            label = f"{region.place.file} step {record.step}"
            second = boundary_blob.opened(candidate.manifest.at_forward, context=label)
            entries = entries_in(second, record, context=label)
            if {*self.topology.peers} <= {each.rank for each in entries if not each.early}:
                return True
        return False

    def _share_of(self, rank: int, ours: Record) -> PeerShare:
        own = self.checkpointer.pipeline.region
        if rank == self.topology.rank:
            return PeerShare(rank, True, True, entries=tuple(self._entries_of(own, ours)))
        where = location.locate(own.place.path, rank, create=False)
        try:
            owned = location.is_owned(where)
            with _reading(where) as region:
                found = [slot.record for slot in region.slots if slot.record is not None]
                entries = tuple(self._entries_of(region, ours))
        except LightckError:
            return PeerShare(rank)
        has_it = any(_is_same_snapshot(record, ours) for record in found)
        newest = max((r.step for r in found if r.timeline == ours.timeline), default=-1)
        may_come = owned and newest < ours.step
        has_step = any((r.timeline, r.step) == (ours.timeline, ours.step) for r in found)
        return PeerShare(rank, has_it, has_step, may_come, entries)

    def _entries_of(self, region: Region, ours: Record) -> Iterator[JournalEntry]:
        for kind in (FORWARD, STEP_END, FENCE):
            entry = region.native.read_journal(kind)
            if entry is not None and entry.blob:  # an entry without a blob was voided
                if (entry.timeline, entry.step) == (ours.timeline, ours.step):
                    yield entry

    # ---- the save --------------------------------------------------------------------------

    def _save(
        self, ours: Record, peers: Sequence[PeerShare], deadline: float, *, joins: bool
    ) -> bool:
        """Write the step into a failure region; returns as `save_if_lacking`.

        Raises:
            _Refused: something is missing that may still come.
            LightckError: it cannot be written.
        """
        everything = self.checkpointer.inventory.everything()
        same = self.replicated(everything)
        if not is_alike(everything, same):
            raise _Refused("not all parameters and their optimizers' state are alike on all ranks")
        own = {v.name for v in everything if v.alias_of is None and v.name not in same}
        entries = [entry for peer in peers for entry in self._rank_entries(peer, own, same)]
        if joins:
            entries += self._inferred_forwards(entries)
        told = {entry.rank for entry in entries}
        began_s, pool = time.monotonic(), NativePool(1, CHUNK_BYTES, idle=False)
        region: Region | None = None
        writer: SlotWriter | None = None
        try:
            with self._locked(deadline):
                instant = self._instant(ours)
                lives, blobs = self._whole_state(instant, same), _blobs(instant, entries)
                size = sum(map(len, blobs))
                described = tuple(map(tensor_layout.describe, lives))
                region = self._region(described, allocator.manifest_capacity(len(lives), size))
                plan = CopyPlan(region)
                writer = SlotWriter.open(region, pool, plan.update(lives, size))
                if writer is None:
                    raise _Refused(f"{region.place.file}: every slot is leased")
                copy(writer, plan, deadline)
                self._instant(ours)  # still so: nothing has changed while it was copied
            flags = RECORD_JIT | (RECORD_EARLY if instant.early else 0)
            writer.seal(ours.step, *blobs, flags, HOLDS_ALL)
            if not writer.wait(max(0.0, deadline - time.monotonic())):
                raise WaitTimeoutError(f"{region.place.file}: not committed by the deadline")
            event(
                "saved_whole",
                logging.WARNING,
                step=ours.step,
                ranks=sorted(told),
                file=region.place.file,
                bytes=writer.layout.payload_bytes,
                seconds=round(time.monotonic() - began_s, 3),
            )
            return not told <= {entry.rank for entry in entries if not entry.early}
        finally:
            if writer is not None:
                writer.abandon()
            if region is not None:
                region.close()
            pool.close()

    def _rank_entries(self, peer: PeerShare, own: set[str], same: set[str]) -> list[RankEntry]:
        """Return a rank's entries for the snapshot: of the step end, and of forward start.

        Raises:
            _Refused: it lacks its share, and has left nothing of the step that could be used.
        """
        by_kind = {entry.kind: entry for entry in peer.entries}
        found = [by_kind[kind] for kind in (FORWARD, STEP_END) if kind in by_kind]
        if not found and not peer.has_it:
            if FENCE not in by_kind:
                raise _Refused(f"the journal of rank {peer.rank} has nothing of the step")
            found = [self._step_end_of(by_kind[FENCE], peer.rank)]
        missing = [name for entry in found for name in missing_tensors(entry, own, same)]
        if missing and not peer.has_it:
            lacking = ", ".join(missing[:_MAX_NAMES])
            raise _Refused(f"the journal of rank {peer.rank} has not what is its own: {lacking}")
        return [] if missing else [RankEntry(peer.rank, entry) for entry in found]

    def _inferred_forwards(self, entries: Sequence[RankEntry]) -> list[RankEntry]:
        """Return entries of forward start for ranks that have left that of the step end only.

        Where what the loop did between the two is not known, there is none, and an event says so.
        """
        rows = {(each.rank, each.early): each.entry for each in entries}
        journal, rank = self.checkpointer.step_journal, self.topology.rank
        assert journal is not None, "armed"
        # The first one behind the update: the journal's has been taken again since.
        first = journal.entry(STEP_END)
        around = [first or rows.get((rank, True)), rows.get((rank, False))]
        witness = [each for each in around if each is not None]
        found = []
        for (rank, early), entry in rows.items():
            if early and (rank, False) not in rows:
                try:
                    if len(witness) < len(around):
                        raise CannotInfer(
                            "everything", "the loop, which has not come to its forward,"
                        )
                    found.append(RankEntry(rank, forward_of(entry, witness)))
                except CannotInfer as unknown:
                    event("forward_unknown", logging.WARNING, rank=rank, why=str(unknown))
        return found

    def _step_end_of(self, fence: JournalEntry, rank: int) -> JournalEntry:
        journal, native = self.checkpointer.step_journal, self.checkpointer.pipeline.region.native
        assert journal is not None, "armed"
        kinds = (FENCE, STEP_END)
        found = [journal.entry(kind) or native.read_journal(kind) for kind in kinds]
        of_update = (fence.timeline, fence.step)
        around = [e for e in found if e and e.blob and (e.timeline, e.step) == of_update]
        where = f"rank {rank} stands inside its update, or died there"
        if len(around) < len(kinds):
            raise _Refused(f"{where}, and this rank has not kept what that changed")
        try:
            return step_end_of(fence, around)
        except CannotInfer as unknown:
            raise _Refused(f"{where}: {unknown}") from unknown

    def _instant(self, ours: Record) -> BoundaryCapture:
        """Return the state of the step as it stands; under the checkpointer's lock.

        Raises:
            LightckError: the live state is not of the step any more.
        """
        journal, pre_update = self.checkpointer.step_journal, self._pre_update
        assert journal is not None, "armed"
        if self._step != ours.step:
            raise TornSnapshotError(f"step {ours.step}: this rank has gone on from it")
        if pre_update is None:
            return journal.as_of_boundary(early=ours.early)
        pre_update.require_instant(ours.early)
        return pre_update.as_of_boundary(early=ours.early)

    def _whole_state(self, instant: BoundaryCapture, same: set[str]) -> list[StateTensor]:
        """Return every tensor, none of them cut: those in `same` live, own ones as they were.

        Raises:
            _Refused: there is no copy of one that a queued update has changed in DRAM.
        """
        everything = self.checkpointer.inventory.everything()
        kept = {v.name: v for v in instant.collected.lives if v.span is None}
        copies = self._pre_update.dram_copies.by_name() if self._pre_update is not None else {}
        whole = [_as_kept(v, kept, copies, same, self._pre_update) for v in everything]
        known = {v.name for v in whole}
        return [*whole, *(v for v in instant.collected.lives if v.name not in known)]

    def _region(self, entries: Sequence[Entry], manifest_bytes: int) -> Region:
        return failure_region.make(
            self.checkpointer.pipeline.region,
            min(self.topology.peers),
            entries,
            manifest_bytes,
            process_durable=self.process_durable,
        )

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        lock = self.checkpointer.lock
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise WaitTimeoutError("the training thread held the lock until the time was over")
        try:
            yield
        finally:
            lock.release()


def _as_kept(
    live: StateTensor,
    kept: dict[str, StateTensor],
    copies: dict[str, torch.Tensor],
    same: set[str],
    pre_update: PreUpdateState | None,
) -> StateTensor:
    """Return a tensor of the whole state as it was at the instant.

    Raises:
        _Refused: there is no copy of one that a queued update has changed in DRAM.
    """
    if live.name in copies:
        return replace(live, tensor=copies[live.name])
    if live.name not in same and live.alias_of is None:
        return kept[live.name]
    if pre_update is not None and live.alias_of is None and is_readable(live.local):
        raise _Refused(f"{live.name} is of a later step here than what the device has")
    return live


def _blobs(instant: BoundaryCapture, entries: Sequence[RankEntry]) -> tuple[bytes, bytes]:
    second = with_entries(instant.forward_values, entries)
    return boundary_blob.closed(instant.step_end_values), boundary_blob.closed(second)


def _is_same_snapshot(record: Record, ours: Record) -> bool:
    keys = [(r.step, r.timeline, r.world, r.share_digest, r.early) for r in (record, ours)]
    return keys[0] == keys[1]


@contextlib.contextmanager
def _reading(where: location.Location) -> Iterator[Region]:
    """Open a region that others may write, with the records of its slots."""
    region = Region.open(where, writable=False)
    try:
        region.recover()
        yield region
    finally:
        region.close()


# ---- the copy, with a worker of its own ----------------------------------------------------------


def copy(writer: SlotWriter, plan: CopyPlan, deadline: float) -> None:
    """Copy everything; the state must not change meanwhile.

    Raises:
        TornSnapshotError: the state has changed.
        WaitTimeoutError: the copy took longer than until the deadline.
    """
    for part in plan.groups:
        chosen = plan.sources(part)
        never = np.zeros(len(part.positions), np.bool_)
        pointers = chosen.pointers + part.begins
        if part.device is not None:  # the workers cannot read it
            tensors = _fetch(part.device, chosen, deadline, made=part.is_private)
            pointers = np.array([each.data_ptr() for each in tensors], np.uint64)
        batch = writer.add(part.positions, pointers, never, never)
        writer.finish_copies(batch, max(0.0, deadline - time.monotonic()))
        if part.is_private and not part.copied_at_open:
            continue
        torn = [writer.layout.entries[int(part.positions[i])].name for i in chosen.changed()]
        found = torn[0] if torn else writer.audit(batch, secrets.randbits(63), False)
        if found:
            raise TornSnapshotError(f"{found} changed while it was copied", names=(found,))


def _fetch(
    device: Device, chosen: CopySources, deadline: float, *, made: bool
) -> list[torch.Tensor]:
    """Copy a device's tensors to memory of the CPU.

    Computations on the device may hang, and are not waited for: this rank's own snapshot of the
    step is committed, so that the device has got there. Only if the sources are copies that have
    just been `made`, the computation that made them is waited for.
    """
    if made:
        device.copy_stream_wait(device.record_event())
    place = device.pinned(_FETCHED_BYTES)
    tensors = [torch.empty(flat.numel(), dtype=torch.uint8, device="cpu") for flat in chosen.flats]
    for whole, flat in zip(tensors, chosen.flats, strict=True):
        rows = zip(whole.split(_FETCHED_BYTES), flat.split(_FETCHED_BYTES), strict=True)
        for target, source in rows:
            present = place[: source.numel()]
            copied = device.copy([present], [source])
            while not copied.query():
                if time.monotonic() > deadline:
                    _unfinished_copies.append((place, chosen))
                    raise WaitTimeoutError(f"{device.name} did not copy a part in time")
                time.sleep(_POLL_S)
            target.copy_(present)
    return tensors
