"""Takeover of a dead rank's share: a survivor of its node writes the dead rank's part of a step.

Ranks that share replicated state each write a part of it. When one is killed, the just-in-time
snapshots of the others lack its part. A survivor has the same replicated state; the dead rank's
rank-local state (buffers, generators, data position) is in its region's journal: I10 (the boundary
journal). Both together are its snapshot, which the survivor writes into the dead rank's region, by
that region's own rules, as the dead rank would have: its rank, world, share map and timeline.

The rule of instants. A step is put together from shares of one instant only: all at forward start,
exact, or all before it, early. A rank *has* an instant if its snapshot of it is committed, or if it
is dead and its journal's entry is of that very step and timeline. If it was killed inside the
update that completes the step, it has the early one, too: it follows from the entry of the fence
(`inference.py`). If all ranks of the node have the exact instant, that is taken. Else it is the
early one if all can have it: a rank that has only an exact snapshot writes an early one beside it,
from the live parameters and the boundary state of step end. Else nothing of the step is written for
any rank.

A dead rank's journal does not change any more, and a living rank's snapshots only grow in number,
so that every survivor comes to the same instant by itself.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lightck.device.base import Device
from lightck.distributed.sharding import SharePartitioner
from lightck.distributed.topology import Topology
from lightck.errors import (
    CorruptSnapshotError,
    LightckError,
    RegionBusyError,
    TornSnapshotError,
    WaitTimeoutError,
)
from lightck.failure.takeover.inference import CannotInfer, RankLocalState, inferred
from lightck.journal.copy_buffer import is_readable
from lightck.journal.device_lag import PreUpdateState
from lightck.pipeline.copy_plan import CopyPlan, CopySources
from lightck.region import location
from lightck.region.location import Location
from lightck.region.native_pool import NativePool
from lightck.region.native_region import (
    FENCE,
    FORWARD,
    RECORD_EARLY,
    RECORD_JIT,
    STEP_END,
    JournalEntry,
    Record,
)
from lightck.region.region import Region, Slot
from lightck.region.slot_writer import SlotWriter
from lightck.state import boundary_blob, boundary_codec
from lightck.state.inventory import Inventory, StateTensor

# ---- the copy into a dead rank's slot ------------------------------------------------------------
# It overwrites only what that rank might. The newest whole snapshot there stays, by I6 (old before
# new).

_FETCHED_BYTES = 4 << 20
"""Bytes fetched from a device at once."""
_LOOK_S = 0.001
_under_way: list[tuple[torch.Tensor, CopySources]] = []
"""Copies that a device did not finish in time and may still make."""


def of_step(slots: Sequence[Slot], timeline: int, step: int | None) -> list[Record]:
    """Return the committed snapshots of a step, exact ones first."""
    records = [slot.record for slot in slots if slot.record is not None]
    found = [r for r in records if (r.timeline, r.step) == (timeline, step)]
    return sorted(found, key=lambda record: record.early)


def alike(record: Record, ours: Record) -> bool:
    """Tell whether two records are parts of one snapshot."""
    said = [(r.step, r.timeline, r.world, r.share_digest, r.early) for r in (record, ours)]
    return said[0] == said[1]


def shield(region: Region, own: Region) -> None:
    """Protect, in a dead rank's region, the snapshots that this rank's region protects.

    These are the newest whole one, and those of unknown outcome.
    """
    if own.reusable is not None:
        region.follow_ranks(_spare(own, own.reusable))
    newest = own.slots[own.protected].record if own.protected is not None else None
    for slot in region.slots:
        record = slot.record
        if newest and record and (record.timeline, record.step) == (newest.timeline, newest.step):
            region.protect(slot)


def _spare(own: Region, reusable: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    """Return a predicate that says whether the job can do without a snapshot of the dead rank.

    It can do without one of this timeline, too, if this rank's part of it is missing.
    """
    records = [slot.record for slot in own.slots if slot.record is not None]
    held = {(record.timeline, record.step) for record in records}
    settled = all(slot.writer is None for slot in own.slots)

    def spare(timeline: int, step: int) -> bool:
        lacking = settled and timeline == own.timeline and (timeline, step) not in held
        return lacking or reusable(timeline, step)

    return spare


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
            held = _fetched(part.device, chosen, deadline, made=part.is_private)
            pointers = np.array([each.data_ptr() for each in held], np.uint64)
        batch = writer.add(part.positions, pointers, never, never)
        writer.finish_copies(batch, max(0.0, deadline - time.monotonic()))
        if part.is_private and not part.copied_at_open:
            continue
        torn = [writer.layout.entries[int(part.positions[i])].name for i in chosen.changed()]
        found = torn[0] if torn else writer.audit(batch, secrets.randbits(63), False)
        if found:
            raise TornSnapshotError(f"{found} changed while it was copied", names=(found,))


def _fetched(
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
    held = [torch.empty(flat.numel(), dtype=torch.uint8, device="cpu") for flat in chosen.flats]
    for whole, flat in zip(held, chosen.flats, strict=True):
        rows = zip(whole.split(_FETCHED_BYTES), flat.split(_FETCHED_BYTES), strict=True)
        for target, source in rows:
            there = place[: source.numel()]
            copied = device.copy([there], [source])
            while not copied.query():
                if time.monotonic() > deadline:
                    _under_way.append((place, chosen))
                    raise WaitTimeoutError(f"{device.name} did not copy a part in time")
                time.sleep(_LOOK_S)
            target.copy_(there)
    return held


# ---- the takeover --------------------------------------------------------------------------------

CHUNK_BYTES = 1 << 20
_NAMED = 4


@dataclass(frozen=True, slots=True)
class TakeoverResult:
    """The result for one dead rank's share.

    Attributes:
        rank: the dead rank.
        step: the step of which its region now holds a snapshot that goes with the survivors'.
        early: that snapshot was finished before forward start.
        wrote: it was written here.
        why: why nothing was written, and nothing was there; empty if the region holds it.
        busy: its region is owned: it lives, or another survivor is writing.
    """

    rank: int
    step: int | None = None
    early: bool = False
    wrote: bool = False
    why: str = ""
    busy: bool = False


class _Refused(Exception):
    """A precondition does not hold; nothing was written."""


class _Owned(_Refused):
    """Another process owns the region."""


@dataclass(eq=False)
class TakeoverContext:
    """The living rank that takes over, as far as a takeover needs it."""

    region: Region
    """Its own region."""
    inventory: Inventory
    topology: Topology
    replicated: Callable[[Sequence[StateTensor]], set[str]]
    """Returns the names of the tensors that are the same on every rank."""
    lock: Any
    """While it is held, the live tensors stay those of `stands()`; a lock as in `threading`."""
    stands: Callable[[], int | None]
    """Returns the step whose state the live tensors are; None: an update is half done."""
    process_durable: bool = False
    kept: Callable[[int], JournalEntry | None] = lambda kind: None
    """Returns its own journal entry of a kind, see `StepJournal.entry`."""
    must_stand: Callable[[bool], object] = lambda early: None
    """Raises a `LightckError` if the live state is not of that instant (True: the early one)."""
    before: Callable[[], PreUpdateState | None] = lambda: None
    """Returns the state of `stands()` that hanging devices have; DRAM has that of a later step."""

    def entry(self, kind: int) -> JournalEntry | None:
        """Return the journal entry of its own last update: FENCE, or STEP_END."""
        return self.kept(kind) or self.region.native.read_journal(kind)

    def records(self) -> list[Record]:
        """Return its committed snapshots of the live tensors' step, exact ones first."""
        return of_step(self.region.slots, self.region.timeline, self.stands())


def common(instants: Iterable[Set[bool]]) -> bool | None:
    """Return the instant of a step that all ranks have (True: early); None if there is none.

    Args:
        instants: for each rank, the instants that it has, True for the early one.
    """
    held = list(instants)
    return next((early for early in (False, True) if all(early in each for each in held)), None)


@dataclass(eq=False)
class Takeover:
    """The completion of dead ranks' snapshots.

    Runs on a background thread, or while the training thread is stopped.
    """

    survivor: TakeoverContext
    own: Callable[[JournalEntry], RankLocalState]
    """Decodes an entry's blob; a `CorruptSnapshotError` that it raises refuses the takeover."""
    threads: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wants(self, dead: Iterable[int], living: Iterable[int] = ()) -> bool | None:
        """Return the instant of which this rank must have a snapshot before it takes over.

        Args:
            dead: dead ranks of this node.
            living: other ranks of this node. One that has the exact instant can write the early
                one, too; one without a snapshot of the step is not asked.

        Returns:
            Whether it is the early one; None if there is none that all can have, or this rank's
            live tensors are of no step.
        """
        step = self.survivor.stands()
        if step is None:
            return None
        here = {record.early for record in self.survivor.records()}
        held = [{True, *here}] if here else []
        held += [self._instants(rank, step, journal=True) for rank in dead]
        for rank in living:
            found = self._instants(rank, step, journal=False)
            if found:
                held.append({True, *found})
        return common(held)

    def is_done(self, rank: int, early: bool) -> bool:
        """Tell whether a rank's region holds the step of the live tensors, of that instant."""
        step = self.survivor.stands()
        return step is not None and early in self._instants(rank, step, journal=False)

    def of(self, rank: int, deadline: float, early: bool | None = None) -> TakeoverResult:
        """Write a dead rank's part of the step of this rank's last snapshot.

        An expected failure is not raised: `TakeoverResult.why` states it.

        Args:
            rank: the dead rank; its region must be in the folder of this rank's own.
            deadline: `time.monotonic()` at which it gives up.
            early: the instant that all ranks of the node have, see `wants`; None: that of this
                rank's exact snapshot, if it has one, else of its early one.
        """
        with self._lock:
            try:
                return self._of(rank, deadline, early)
            except _Refused as refusal:
                return TakeoverResult(rank, why=str(refusal), busy=isinstance(refusal, _Owned))
            except LightckError as error:
                return TakeoverResult(rank, why=f"{type(error).__name__}: {error}")

    # ---- inside ----------------------------------------------------------------------------

    def _of(self, rank: int, deadline: float, early: bool | None) -> TakeoverResult:
        ours = self._ours(rank, deadline, early)
        with _owned(self._place(rank), self.survivor.process_durable) as region:
            self._must_be_of_this_job(region, rank)
            region.recover()
            there = of_step(region.slots, region.timeline, ours.step)
            if any(alike(record, ours) for record in there):
                return TakeoverResult(rank, ours.step, ours.early)
            own = self._own(region, ours)
            shield(region, self.survivor.region)
            region.prepare_writing(ours.world)
            self._write(region, rank, own, ours, deadline)
        return TakeoverResult(rank, ours.step, ours.early, wrote=True)

    def _ours(self, rank: int, deadline: float, early: bool | None) -> Record:
        """Return this rank's own snapshot, which the dead rank's has to go with."""
        survivor = self.survivor
        if rank == survivor.topology.rank or rank not in survivor.topology.peers:
            peers = ", ".join(map(str, survivor.topology.peers))
            raise _Refused(f"rank {rank} is no peer of rank {survivor.topology.rank} ({peers})")
        with _locked(survivor.lock, deadline):
            step = survivor.stands()
            found = [r for r in survivor.records() if early in (None, r.early)]
        if step is None:
            raise _Refused("this rank is inside an update: its tensors are of no step")
        if not found:
            instant = {None: "", True: "early ", False: "exact "}[early]
            raise _Refused(f"this rank has no {instant}snapshot of step {step} itself")
        return found[0]

    def _place(self, rank: int) -> Location:
        own = self.survivor.region.place
        if not own.is_plain or own.path == own.file:
            raise _Refused(f"{own.path}: other ranks' regions cannot be reached there")
        where = location.locate(own.path, rank, create=False)
        if not where.exists:
            raise _Refused(f"{where.file}: rank {rank} has no region")
        return where

    def _must_be_of_this_job(self, region: Region, rank: int) -> None:
        """Check that the region is the rank's, and that its newest timeline is the job's.

        Its snapshots then continue the timeline that this rank continues.
        """
        own, file = self.survivor.region, region.place.file
        if region.info.rank != rank:
            raise _Refused(f"{file} is the region of rank {region.info.rank}, not of rank {rank}")
        if region.info.run_id != own.info.run_id:
            raise _Refused(f"{file} belongs to another run")
        if region.info.timeline != own.timeline:
            theirs, ours = region.info.timeline, own.timeline
            raise _Refused(f"{file}: its timeline is {theirs:x}, the job's is {ours:x}")

    def _own(self, region: Region, ours: Record) -> RankLocalState:
        """Return the dead rank's own state of that step and instant."""
        kind = STEP_END if ours.early else FORWARD
        entry = region.native.read_journal(kind)
        if ours.early and not _is_of(entry, ours.timeline, ours.step):
            fence = region.native.read_journal(FENCE)
            if fence is not None and _is_of(fence, ours.timeline, ours.step):
                return self._inferred(region, fence)
        instant = "end of the step" if ours.early else "start of the next forward"
        if entry is None:
            raise _Refused(f"{region.place.file}: its journal has no entry of the {instant}")
        if not _is_of(entry, ours.timeline, ours.step):
            raise _Refused(
                f"{region.place.file}: the journal's entry of the {instant} is of step {entry.step}"
                f" of timeline {entry.timeline:x}, wanted step {ours.step} of {ours.timeline:x}"
            )
        return self.own(entry)

    def _inferred(self, region: Region, fence: JournalEntry) -> RankLocalState:
        """Infer the state at step end that the dead rank would have had after its update."""
        kept = [self.survivor.entry(kind) for kind in (FENCE, STEP_END)]
        mine = [self.own(e) for e in kept if e and _is_of(e, fence.timeline, fence.step)]
        where = f"{region.place.file}: its rank was killed inside the update to step {fence.step}"
        if len(mine) < len(kept):
            raise _Refused(f"{where}, and this rank has not kept what that changes")
        try:
            return inferred(self.own(fence), *mine)
        except CannotInfer as unknown:
            raise _Refused(f"{where}: {unknown}") from unknown

    def _instants(self, rank: int, step: int, *, journal: bool) -> set[bool]:
        """Return the instants that a rank has of a step; none if its region cannot be read."""
        timeline = self.survivor.region.timeline
        try:
            region = Region.open(self._place(rank), writable=False)
            with contextlib.closing(region):
                region.recover()
                found = {r.early for r in of_step(region.slots, timeline, step)}
                for kind in (FORWARD, STEP_END, FENCE) if journal else ():
                    if _is_of(region.native.read_journal(kind), timeline, step):
                        found.add(kind != FORWARD)
                return found
        except (_Refused, LightckError):
            return set()

    def _write(
        self, region: Region, rank: int, own: RankLocalState, ours: Record, deadline: float
    ) -> None:
        """Copy the dead rank's snapshot under the survivor's lock, and commit it outside of it."""
        survivor, writer = self.survivor, None
        pool = NativePool(self.threads, CHUNK_BYTES, idle=False)
        try:
            with _locked(survivor.lock, deadline):
                before = survivor.before()
                must_stand = survivor.must_stand if before is None else before.must_stand
                if survivor.stands() != ours.step:
                    raise _Refused(f"this rank has gone on from step {ours.step}")
                must_stand(ours.early)
                lives = _of_then(before, self._lives(rank, own, ours), own)
                plan = CopyPlan(region)
                size = len(own.at_step) + len(own.at_forward)
                writer = SlotWriter.open(region, pool, plan.update(lives, size))
                if writer is None:
                    raise _Refused(f"{region.place.file}: every slot is protected or leased")
                copy(writer, plan, deadline)
                must_stand(ours.early)
            flags = RECORD_JIT | (RECORD_EARLY if ours.early else 0)
            blobs = own.at_step, own.at_forward
            writer.seal(ours.step, *blobs, flags, ours.share_digest)
            if not writer.wait(_left(deadline)):
                raise _Refused(f"{region.place.file}: not committed when the time was over")
        finally:
            if writer is not None:
                writer.abandon()
            pool.close()

    def _lives(self, rank: int, own: RankLocalState, ours: Record) -> list[StateTensor]:
        """Return the tensors of the dead rank's snapshot: its share from here, the rest its own."""
        topology = self.survivor.topology
        theirs = replace(topology, rank=rank)
        everything = self.survivor.inventory.everything()
        shared = SharePartitioner(theirs, self.survivor.replicated)(everything)
        if shared.told is None:
            raise _Refused("nothing is shared here: every rank holds all of its state")
        if shared.digest != ours.share_digest:
            raise _Refused(
                f"the share map is {shared.digest.hex()} now, and {ours.share_digest.hex()} in the"
                f" snapshot of step {ours.step}"
            )
        same = self.survivor.replicated(everything)
        share = [v for v in shared.lives if (v.alias_of or v.name) in same]
        rest = [v for v in shared.lives if (v.alias_of or v.name) not in same]
        kept = {v.name: v for v in own.lives if v.name not in {each.name for each in share}}
        ties = [v for v in rest if v.alias_of and v.name not in kept]  # they have no bytes
        needed = {v.name for v in rest if not v.alias_of} | (_references(own) - same)
        lacking = sorted(needed - kept.keys())
        if lacking:
            named = ", ".join(lacking[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
            raise _Refused(f"rank {rank} had state of its own that its journal has not: {named}")
        return [*share, *kept.values(), *ties]


def _of_then(
    before: PreUpdateState | None, lives: Sequence[StateTensor], own: RankLocalState
) -> list[StateTensor]:
    """Return `lives`, with copies of what DRAM held before the hanging devices' update.

    They are returned as they are if no device hangs.

    Raises:
        _Refused: there is no copy of a tensor that has changed since.
    """
    if before is None:
        return list(lives)
    then, theirs = before.counts.by_name(), {id(each.tensor) for each in own.lives}
    for live in lives:
        there = live.name in then or id(live.tensor) in theirs or live.alias_of is not None
        if not there and is_readable(live.local):
            raise _Refused(f"{live.name} is of a later step here than what the device has")
    return [
        live
        if id(live.tensor) in theirs
        else replace(live, tensor=then.get(live.name, live.tensor))
        for live in lives
    ]


@contextlib.contextmanager
def _owned(where: Location, process_durable: bool) -> Iterator[Region]:
    """Open a region that no process owns; its lock is the proof that its rank is dead."""
    try:
        region = Region.open(where, writable=True, process_durable=process_durable)
    except RegionBusyError as error:
        raise _Owned(f"{error}: its rank lives, or another survivor is at it") from error
    try:
        yield region
    finally:
        region.close()


@contextlib.contextmanager
def _locked(lock: Any, deadline: float) -> Iterator[None]:
    if not lock.acquire(timeout=_left(deadline)):
        raise _Refused("the training thread held the lock until the time was over")
    try:
        yield
    finally:
        lock.release()


def _is_of(entry: JournalEntry | None, timeline: int, step: int) -> bool:
    there = entry is not None and entry.blob  # an entry without a blob was voided
    return bool(there) and entry is not None and (entry.timeline, entry.step) == (timeline, step)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _references(own: RankLocalState) -> set[str]:
    """Return the names of the tensors that the dead rank's state refers to."""
    names: set[str] = set()
    for blob in (own.at_step, own.at_forward):
        tree: Mapping[str, Any] = boundary_blob.opened(blob, context="journal")
        _note(tree, names)
    return names


def _note(tree: Any, names: set[str]) -> None:
    if isinstance(tree, dict):
        if tree.get(boundary_codec.TAG) == "tensor":
            if type(tree.get("name")) is not str:
                raise CorruptSnapshotError("journal: a reference without a name")
            names.add(tree["name"])
            return
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for each in tree:
            _note(each, names)
