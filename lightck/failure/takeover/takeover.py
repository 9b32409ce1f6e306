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
from typing import Any, Protocol

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
from lightck.failure.takeover.inference import CannotInfer, RankLocalState, infer_step_end
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
_POLL_S = 0.001
_unfinished_copies: list[tuple[torch.Tensor, CopySources]] = []
"""Copies that a device did not finish in time and may still make."""


def of_step(slots: Sequence[Slot], timeline: int, step: int | None) -> list[Record]:
    """Return the committed snapshots of a step, exact ones first."""
    records = [slot.record for slot in slots if slot.record is not None]
    found = [r for r in records if (r.timeline, r.step) == (timeline, step)]
    return sorted(found, key=lambda record: record.early)


def is_same_snapshot(record: Record, ours: Record) -> bool:
    """Tell whether two records are parts of one snapshot."""
    keys = [(r.step, r.timeline, r.world, r.share_digest, r.early) for r in (record, ours)]
    return keys[0] == keys[1]


def protect_like(region: Region, decode: Region) -> None:
    """Protect, in a dead rank's region, the snapshots that this rank's region protects.

    These are the newest whole one, and those of unknown outcome.
    """
    if decode.reusable is not None:
        region.follow_ranks(_reusable_for(decode, decode.reusable))
    newest = decode.slots[decode.protected].record if decode.protected is not None else None
    for slot in region.slots:
        record = slot.record
        if newest and record and (record.timeline, record.step) == (newest.timeline, newest.step):
            region.protect(slot)


def _reusable_for(
    decode: Region, reusable: Callable[[int, int], bool]
) -> Callable[[int, int], bool]:
    """Return a predicate that says whether the job can do without a snapshot of the dead rank.

    It can do without one of this timeline, too, if this rank's part of it is missing.
    """
    records = [slot.record for slot in decode.slots if slot.record is not None]
    tensors = {(record.timeline, record.step) for record in records}
    settled = all(slot.writer is None for slot in decode.slots)

    def is_reusable(timeline: int, step: int) -> bool:
        lacking = settled and timeline == decode.timeline and (timeline, step) not in tensors
        return lacking or reusable(timeline, step)

    return is_reusable


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


# ---- the takeover --------------------------------------------------------------------------------

CHUNK_BYTES = 1 << 20
_MAX_NAMES = 4


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


class _RegionOwned(_Refused):
    """Another process owns the region."""


class LiveState(Protocol):
    """The state of the living rank, as far as a takeover needs it."""

    @property
    def step(self) -> int | None:
        """The step whose state the live tensors are; None: an update is half done."""

    @property
    def pre_update(self) -> PreUpdateState | None:
        """The state of `step` that hanging devices have; DRAM has that of a later step."""

    def require_instant(self, early: bool) -> object:
        """Raise a `LightckError` if the live state is not of that instant (True: the early one)."""

    def journal_entry(self, kind: int) -> JournalEntry | None:
        """Return its own journal entry of its last update, see `StepJournal.entry`."""


@dataclass(eq=False)
class TakeoverContext:
    """The living rank that takes over, as far as a takeover needs it."""

    region: Region
    """Its own region."""
    inventory: Inventory
    topology: Topology
    replicated: Callable[[Sequence[StateTensor]], set[str]]
    """Returns the names of the tensors that are the same on every rank, see `ReplicatedTensors`."""
    lock: Any
    """While it is held, the live tensors stay those of `live.step`; a lock as in `threading`."""
    live: LiveState
    process_durable: bool = False

    def entry(self, kind: int) -> JournalEntry | None:
        """Return the journal entry of its own last update: FENCE, or STEP_END."""
        return self.live.journal_entry(kind) or self.region.native.read_journal(kind)

    def records(self) -> list[Record]:
        """Return its committed snapshots of the live tensors' step, exact ones first."""
        return of_step(self.region.slots, self.region.timeline, self.live.step)


def common_instant(instants: Iterable[Set[bool]]) -> bool | None:
    """Return the instant of a step that all ranks have (True: early); None if there is none.

    Args:
        instants: for each rank, the instants that it has, True for the early one.
    """
    tensors = list(instants)
    return next((early for early in (False, True) if all(early in each for each in tensors)), None)


@dataclass(eq=False)
class Takeover:
    """The completion of dead ranks' snapshots.

    Runs on a background thread, or while the training thread is stopped.
    """

    context: TakeoverContext
    decode: Callable[[JournalEntry], RankLocalState]
    """Decodes an entry's blob; a `CorruptSnapshotError` that it raises refuses the takeover."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def required_instant(self, dead: Iterable[int], living: Iterable[int] = ()) -> bool | None:
        """Return the instant of which this rank must have a snapshot before it takes over.

        Args:
            dead: dead ranks of this node.
            living: other ranks of this node. One that has the exact instant can write the early
                one, too; one without a snapshot of the step is not asked.

        Returns:
            Whether it is the early one; None if there is none that all can have, or this rank's
            live tensors are of no step.
        """
        step = self.context.live.step
        if step is None:
            return None
        here = {record.early for record in self.context.records()}
        tensors = [{True, *here}] if here else []
        tensors += [self._instants_of(rank, step, journal=True) for rank in dead]
        for rank in living:
            found = self._instants_of(rank, step, journal=False)
            if found:
                tensors.append({True, *found})
        return common_instant(tensors)

    def is_done(self, rank: int, early: bool) -> bool:
        """Tell whether a rank's region holds the step of the live tensors, of that instant."""
        step = self.context.live.step
        return step is not None and early in self._instants_of(rank, step, journal=False)

    def complete(self, rank: int, deadline: float, early: bool | None = None) -> TakeoverResult:
        """Write a dead rank's part of the step of this rank's last snapshot.

        An expected failure is not raised: `TakeoverResult.why` states it.

        Args:
            rank: the dead rank; its region must be in the folder of this rank's own.
            deadline: `time.monotonic()` at which it gives up.
            early: the instant that all ranks of the node have, see `required_instant`; None: that
                of this rank's exact snapshot, if it has one, else of its early one.
        """
        with self._lock:
            try:
                return self._complete(rank, deadline, early)
            except _Refused as refusal:
                return TakeoverResult(
                    rank, why=str(refusal), busy=isinstance(refusal, _RegionOwned)
                )
            except LightckError as error:
                return TakeoverResult(rank, why=f"{type(error).__name__}: {error}")

    # ---- inside ----------------------------------------------------------------------------

    def _complete(self, rank: int, deadline: float, early: bool | None) -> TakeoverResult:
        ours = self._own_record(rank, deadline, early)
        with _owned_region(self._region_location(rank), self.context.process_durable) as region:
            self._require_same_job(region, rank)
            region.recover()
            present = of_step(region.slots, region.timeline, ours.step)
            if any(is_same_snapshot(record, ours) for record in present):
                return TakeoverResult(rank, ours.step, ours.early)
            decode = self._rank_local_state(region, ours)
            protect_like(region, self.context.region)
            region.prepare_writing(ours.world)
            self._write_snapshot(region, rank, decode, ours, deadline)
        return TakeoverResult(rank, ours.step, ours.early, wrote=True)

    def _own_record(self, rank: int, deadline: float, early: bool | None) -> Record:
        """Return this rank's own snapshot, which the dead rank's has to go with."""
        context = self.context
        if rank == context.topology.rank or rank not in context.topology.peers:
            peers = ", ".join(map(str, context.topology.peers))
            raise _Refused(f"rank {rank} is no peer of rank {context.topology.rank} ({peers})")
        with _locked(context.lock, deadline):
            step = context.live.step
            found = [r for r in context.records() if early in (None, r.early)]
        if step is None:
            raise _Refused("this rank is inside an update: its tensors are of no step")
        if not found:
            instant = {None: "", True: "early ", False: "exact "}[early]
            raise _Refused(f"this rank has no {instant}snapshot of step {step} itself")
        return found[0]

    def _region_location(self, rank: int) -> Location:
        decode = self.context.region.place
        if not decode.is_plain or decode.path == decode.file:
            raise _Refused(f"{decode.path}: other ranks' regions cannot be reached there")
        where = location.locate(decode.path, rank, create=False)
        if not where.exists:
            raise _Refused(f"{where.file}: rank {rank} has no region")
        return where

    def _require_same_job(self, region: Region, rank: int) -> None:
        """Check that the region is the rank's, and that its newest timeline is the job's.

        Its snapshots then continue the timeline that this rank continues.
        """
        decode, file = self.context.region, region.place.file
        if region.info.rank != rank:
            raise _Refused(f"{file} is the region of rank {region.info.rank}, not of rank {rank}")
        if region.info.run_id != decode.info.run_id:
            raise _Refused(f"{file} belongs to another run")
        if region.info.timeline != decode.timeline:
            rank_local, ours = region.info.timeline, decode.timeline
            raise _Refused(f"{file}: its timeline is {rank_local:x}, the job's is {ours:x}")

    def _rank_local_state(self, region: Region, ours: Record) -> RankLocalState:
        """Return the dead rank's own state of that step and instant."""
        kind = STEP_END if ours.early else FORWARD
        entry = region.native.read_journal(kind)
        if ours.early and not _is_of(entry, ours.timeline, ours.step):
            fence = region.native.read_journal(FENCE)
            if fence is not None and _is_of(fence, ours.timeline, ours.step):
                return self._infer(region, fence)
        instant = "end of the step" if ours.early else "start of the next forward"
        if entry is None:
            raise _Refused(f"{region.place.file}: its journal has no entry of the {instant}")
        if not _is_of(entry, ours.timeline, ours.step):
            raise _Refused(
                f"{region.place.file}: the journal's entry of the {instant} is of step {entry.step}"
                f" of timeline {entry.timeline:x}, wanted step {ours.step} of {ours.timeline:x}"
            )
        return self.decode(entry)

    def _infer(self, region: Region, fence: JournalEntry) -> RankLocalState:
        """Infer the state at step end that the dead rank would have had after its update."""
        journal_entry = [self.context.entry(kind) for kind in (FENCE, STEP_END)]
        own_entries = [
            self.decode(e) for e in journal_entry if e and _is_of(e, fence.timeline, fence.step)
        ]
        where = f"{region.place.file}: its rank was killed inside the update to step {fence.step}"
        if len(own_entries) < len(journal_entry):
            raise _Refused(f"{where}, and this rank has not kept what that changes")
        try:
            return infer_step_end(self.decode(fence), *own_entries)
        except CannotInfer as unknown:
            raise _Refused(f"{where}: {unknown}") from unknown

    def _instants_of(self, rank: int, step: int, *, journal: bool) -> set[bool]:
        """Return the instants that a rank has of a step; none if its region cannot be read."""
        timeline = self.context.region.timeline
        try:
            region = Region.open(self._region_location(rank), writable=False)
            with contextlib.closing(region):
                region.recover()
                found = {r.early for r in of_step(region.slots, timeline, step)}
                for kind in (FORWARD, STEP_END, FENCE) if journal else ():
                    if _is_of(region.native.read_journal(kind), timeline, step):
                        found.add(kind != FORWARD)
                return found
        except (_Refused, LightckError):
            return set()

    def _write_snapshot(
        self, region: Region, rank: int, decode: RankLocalState, ours: Record, deadline: float
    ) -> None:
        """Copy the dead rank's snapshot under the survivor's lock, and commit it outside of it."""
        context, writer = self.context, None
        pool = NativePool(1, CHUNK_BYTES, idle=False)
        try:
            with _locked(context.lock, deadline):
                pre_update_state = context.live.pre_update
                require_instant = (
                    context.live.require_instant
                    if pre_update_state is None
                    else pre_update_state.require_instant
                )
                if context.live.step != ours.step:
                    raise _Refused(f"this rank has gone on from step {ours.step}")
                require_instant(ours.early)
                lives = _with_pre_update_copies(
                    pre_update_state, self._snapshot_tensors(rank, decode, ours), decode
                )
                plan = CopyPlan(region)
                size = len(decode.at_step) + len(decode.at_forward)
                writer = SlotWriter.open(region, pool, plan.update(lives, size))
                if writer is None:
                    raise _Refused(f"{region.place.file}: every slot is protected or leased")
                copy(writer, plan, deadline)
                require_instant(ours.early)
            flags = RECORD_JIT | (RECORD_EARLY if ours.early else 0)
            blobs = decode.at_step, decode.at_forward
            writer.seal(ours.step, *blobs, flags, ours.share_digest)
            if not writer.wait(_left(deadline)):
                raise _Refused(f"{region.place.file}: not committed when the time was over")
        finally:
            if writer is not None:
                writer.abandon()
            pool.close()

    def _snapshot_tensors(
        self, rank: int, decode: RankLocalState, ours: Record
    ) -> list[StateTensor]:
        """Return the tensors of the dead rank's snapshot: its share from here, the rest its own."""
        topology = self.context.topology
        rank_local = replace(topology, rank=rank)
        everything = self.context.inventory.everything()
        shared = SharePartitioner(rank_local, self.context.replicated)(everything)
        if shared.told is None:
            raise _Refused("nothing is shared here: every rank holds all of its state")
        if shared.digest != ours.share_digest:
            raise _Refused(
                f"the share map is {shared.digest.hex()} now, and {ours.share_digest.hex()} in the"
                f" snapshot of step {ours.step}"
            )
        same = self.context.replicated(everything)
        share = [v for v in shared.lives if (v.alias_of or v.name) in same]
        rest = [v for v in shared.lives if (v.alias_of or v.name) not in same]
        journal_entry = {
            v.name: v for v in decode.lives if v.name not in {each.name for each in share}
        }
        ties = [v for v in rest if v.alias_of and v.name not in journal_entry]  # they have no bytes
        needed = {v.name for v in rest if not v.alias_of} | (_references(decode) - same)
        lacking = sorted(needed - journal_entry.keys())
        if lacking:
            named = ", ".join(lacking[:_MAX_NAMES]) + (", ..." if len(lacking) > _MAX_NAMES else "")
            raise _Refused(f"rank {rank} had state of its own that its journal has not: {named}")
        return [*share, *journal_entry.values(), *ties]


def _with_pre_update_copies(
    pre_update_state: PreUpdateState | None, lives: Sequence[StateTensor], decode: RankLocalState
) -> list[StateTensor]:
    """Return `lives`, with copies of what DRAM held before the hanging devices' update.

    They are returned as they are if no device hangs.

    Raises:
        _Refused: there is no copy of a tensor that has changed since.
    """
    if pre_update_state is None:
        return list(lives)
    copies, rank_local = (
        pre_update_state.dram_copies.by_name(),
        {id(each.tensor) for each in decode.lives},
    )
    for live in lives:
        present = live.name in copies or id(live.tensor) in rank_local or live.alias_of is not None
        if not present and is_readable(live.local):
            raise _Refused(f"{live.name} is of a later step here than what the device has")
    return [
        live
        if id(live.tensor) in rank_local
        else replace(live, tensor=copies.get(live.name, live.tensor))
        for live in lives
    ]


@contextlib.contextmanager
def _owned_region(where: Location, process_durable: bool) -> Iterator[Region]:
    """Open a region that no process owns; its lock is the proof that its rank is dead."""
    try:
        region = Region.open(where, writable=True, process_durable=process_durable)
    except RegionBusyError as error:
        raise _RegionOwned(f"{error}: its rank lives, or another survivor is at it") from error
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
    present = entry is not None and entry.blob  # an entry without a blob was voided
    return bool(present) and entry is not None and (entry.timeline, entry.step) == (timeline, step)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _references(decode: RankLocalState) -> set[str]:
    """Return the names of the tensors that the dead rank's state refers to."""
    names: set[str] = set()
    for blob in (decode.at_step, decode.at_forward):
        tree: Mapping[str, Any] = boundary_blob.opened(blob, context="journal")
        _collect_references(tree, names)
    return names


def _collect_references(tree: Any, names: set[str]) -> None:
    if isinstance(tree, dict):
        if tree.get(boundary_codec.TAG) == "tensor":
            if type(tree.get("name")) is not str:
                raise CorruptSnapshotError("journal: a reference without a name")
            names.add(tree["name"])
            return
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for each in tree:
            _collect_references(each, names)
