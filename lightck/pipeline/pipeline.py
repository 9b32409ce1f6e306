"""Copies live tensors through the pool, one snapshot at a time, fenced before the update.

A snapshot in flight is opened at forward start, captured by the fence and sealed, made durable by
the pool, and counts once the barrier knows that every rank has it. Its copies form groups, one per
set of optimizers that update the tensors, so that each optimizer's step waits for its own tensors
only. The barrier is told of every step that a snapshot was due for: of its opening, its commit
here, or its loss.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from threading import Lock, RLock, Thread
from typing import Self

import numpy as np
import numpy.typing as npt

from lightck.config import Config
from lightck.errors import CoordinationError, LightckError, TornSnapshotError, WaitTimeoutError
from lightck.events import event
from lightck.pipeline.at_once import at_once_bytes
from lightck.pipeline.commit_barrier import CommitBarrier, SingleProcessBarrier, is_final
from lightck.pipeline.copy_plan import CopyPlan, CopySources, PlannedGroup, TensorReading
from lightck.pipeline.device_offload import DeviceOffload
from lightck.pipeline.device_placement import DevicePlacement
from lightck.pipeline.device_transfer import DeviceTransfer, TransferEngine
from lightck.pipeline.placement import HostPlacement, choose_placement
from lightck.region.native_pool import NativePool
from lightck.region.native_region import HOLDS_ALL, RECORD_EARLY, RECORD_JIT
from lightck.region.region import Region
from lightck.region.slot_writer import Batch, SlotWriter
from lightck.state.inventory import CollectedState, StateTensor
from lightck.tracing.trace import Trace, now_ns, spans_of
from lightck.types import Fate, ReleaseSchedule

# ---- a snapshot in flight: its copies, and who waits for it --------------------------------------

Check = Callable[[], str]  # names a tensor that has changed, or nothing (an empty text)


@dataclass(eq=False)
class CopyGroup:
    """One group of copies, whose sources the same optimizers update; its `Pipeline` changes it."""

    holders: frozenset[int]
    batch: Batch
    sources: CopySources | None
    """Tensors that are copied, which keeps their memory alive; None once they are captured."""
    is_private: bool
    """True if no copy can be torn: of private copies, or made before the opening returned."""
    transfer: DeviceTransfer | None = None
    """Transfer from the device that holds the sources; None: none does."""

    @property
    def is_held(self) -> bool:
        """Tell whether its copies run only when they are released."""
        return not (self.is_private or self.captured) and self.transfer is None

    @property
    def captured(self) -> bool:
        """Tell whether every copy has left its source.

        A device's copies may still run, but before whatever the device does next.
        """
        return self.sources is None

    def compare_at_fence(self, sources: CopySources) -> None:
        """Let the fence compare copies that were made already with what they were made of."""
        self.sources = sources


@dataclass(eq=False)
class InflightSnapshot:
    """One snapshot, from its opening at forward start until its fate is known.

    A record that its `Pipeline` alone changes, but for those who wait.
    """

    step: int
    writer: SlotWriter
    at_step: bytes
    at_forward: bytes
    flags: int
    share_digest: bytes = HOLDS_ALL
    state_fingerprint: bytes = b""
    """Fingerprint of state that all ranks hold alike, see `inventory.RankShare`."""
    rank_local: bool = False
    """True if no other rank was asked: at restore, what all of them hold decides."""
    groups: list[CopyGroup] = field(default_factory=list)
    held_bytes: int = 0
    """Bytes of all copies that run only when they are released."""
    released_bytes: int = 0
    opened_s: float = field(default_factory=time.monotonic)
    captured_s: float = 0.0
    durable_s: float = 0.0
    sealed: bool = False
    """True once sealed; False behind the fence while copies are on their way from a device."""
    waited_s: float = 0.0
    """Seconds at fences so far."""
    torn: tuple[str, ...] = ()
    """Names of what changed while it was copied, for which the snapshot was dropped."""
    changed: Check | None = None
    """Asked at the fence for changes since an instant before the opening, see `WeightGuard`."""
    futures: list[Future[int]] = field(default_factory=list)
    """Futures of those who wait for this very snapshot."""

    @property
    def agreed_fingerprint(self) -> bytes:
        """Fingerprint that must agree on all ranks; if they share, it has the instant, too."""
        agreed = self.state_fingerprint
        return bytes([agreed[0] ^ 1]) + agreed[1:] if self.is_early_share else agreed

    @property
    def is_early_share(self) -> bool:
        """Tell whether it goes together with other ranks' early shares only."""
        return self.share_digest != HOLDS_ALL and bool(self.flags & RECORD_EARLY)

    @property
    def captured(self) -> bool:
        """Tell whether every copy has left its source."""
        return all(group.captured for group in self.groups)

    @property
    def transfers(self) -> list[DeviceTransfer]:
        """Transfers of its groups."""
        return [group.transfer for group in self.groups if group.transfer is not None]

    def complete(
        self, state: CollectedState, blobs: tuple[bytes, bytes], flags: int, changed: Check | None
    ) -> None:
        """Take what only forward start tells, where copies began before it."""
        self.at_step, self.at_forward = blobs
        self.flags, self.changed = flags, changed
        self.share_digest, self.state_fingerprint = state.share_digest, state.form

    def count_held(self) -> int:
        """Count, once all groups are queued, the bytes that run only when they are released."""
        self.held_bytes = sum(group.batch.total_bytes for group in self.groups if group.is_held)
        return self.held_bytes

    def add_futures(self, futures: Sequence[Future[int]]) -> None:
        """Let these wait for this very snapshot, too."""
        self.futures += futures

    def fail(self, error: BaseException) -> None:
        """Tell those who wait that the snapshot will not come."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


@dataclass(eq=False)
class Counters:
    """Counts of what happened, for `handle.stats()`; the `Pipeline` changes them."""

    captured: int = 0
    streamed: int = 0
    """Number of snapshots of which the update wrote a part."""
    durable: int = 0
    """Number of snapshots that are durable on this rank."""
    committed: int = 0
    """Number of snapshots that are committed on every rank."""
    slipped: int = 0
    torn: int = 0
    failed: int = 0
    dead: int = 0
    commit_s: float = 0.0
    whole_s: float = 0.0
    persist_s: float | None = None
    """Seconds from opening to commit of the last snapshot; None before the first."""
    last_captured_step: int | None = None
    last_exact_step: int | None = None
    """Step of the last snapshot that was captured and is not early."""
    last_committed_step: int | None = None

    def count_slipped(self) -> None:
        """Count a due snapshot that was not opened."""
        self.slipped += 1

    def count_torn(self) -> None:
        """Count a snapshot that was dropped because its sources changed."""
        self.torn += 1

    def count_failed(self) -> None:
        """Count a snapshot that an error has cost."""
        self.failed += 1

    def forget_steps(self) -> None:
        """Forget the last steps: a timeline begins behind which none is captured yet."""
        self.last_captured_step = self.last_exact_step = self.last_committed_step = None


class SlipReason(StrEnum):
    """Why a due snapshot cannot be opened now."""

    SLOTS = "every slot is busy"
    DRAM = "the DRAM for staging still holds the last snapshot"
    COPY = "the device's own copy still holds the last snapshot"
    GRAPH = "the device records a graph"


# ---- the pipeline --------------------------------------------------------------------------------

_RELEASES = 16
"""The most parts in which a window's bytes are released: waking workers takes longer than many
copies do."""
BEHIND_S = 1.0
"""The most seconds that a loop which never waits for its device waits for it here; after that, a
snapshot is skipped."""


@dataclass(eq=False)
class Pipeline:
    """Owns the snapshots under way into one region, from their opening until they count.

    The training thread uses it, or another thread under the training thread's lock; autograd's
    thread calls `pace`.
    """

    region: Region
    pool: NativePool
    schedule: ReleaseSchedule
    barrier: CommitBarrier = field(default_factory=SingleProcessBarrier)
    trace: Trace | None = None
    placement: HostPlacement = field(default_factory=HostPlacement)
    proof: bool = False
    device_setting: str = "auto"
    """The setting `placement`, as far as devices' tensors are concerned."""
    write_limited: bool = False
    """True if a limit bounds what is written to the region per second."""
    at_once: bool = False
    """True if a small state is copied before its snapshot's opening returns."""
    window: InflightSnapshot | None = None
    """The snapshot whose sources must not change: it is opened, and not yet captured."""
    counters: Counters = field(default_factory=Counters)
    persisting: list[InflightSnapshot] = field(default_factory=list)
    """Snapshots past their fence, in commit order: sealed, so that the pool commits them, or to be
    sealed when the copies they wait for have arrived from a device."""
    awaiting: list[InflightSnapshot] = field(default_factory=list)
    """Snapshots that are durable on this rank and not yet known to be durable on every other
    one."""
    newest: InflightSnapshot | None = None
    """The last snapshot that became durable on this rank."""
    lock: RLock = field(default_factory=RLock)
    """Held by whoever uses the pipeline, except in `pace`: the training thread, one that waits for
    a commit, one that saves just in time."""
    pacing: RLock = field(default_factory=RLock)
    """Held while a snapshot opens or ends: one made just in time does so while a backward may
    run."""
    _abandoning: list[tuple[Thread, InflightSnapshot]] = field(default_factory=list)
    """Snapshots that were dropped on page media or with copies from devices under way, and the
    threads that end them; the memory they read is kept."""
    _last_stats: dict[str, int] | None = None
    _counting: Lock = field(default_factory=Lock)
    """Held while a thread asks the pool for its counters, so that the pool is not closed
    meanwhile."""
    _dice: random.Random = field(default_factory=random.Random)
    """Random numbers for audits only; the global generators belong to the user."""

    def __post_init__(self) -> None:
        """Begin with nothing planned."""
        measure = partial(at_once_bytes, self.pool) if self.at_once else None
        self.copy_plan = CopyPlan(
            self.region, may_block_at_boundary=not self.write_limited, measure_at_once=measure
        )
        self.offload = DeviceOffload(
            DevicePlacement(self.region, self.device_setting, self.write_limited),
            TransferEngine(self.pool.chunk_bytes, self._try_seal),
        )

    @classmethod
    def start(
        cls,
        region: Region,
        schedule: ReleaseSchedule,
        barrier: CommitBarrier,
        config: Config,
        step: int,
    ) -> Self:
        """Make the pool, which starts the workers, and a pipeline with the config's settings.

        `step`: the last complete one.
        """
        placement = HostPlacement(choose_placement(region, config))
        idle, spans = config.priority == "idle", spans_of(config)
        pool = NativePool(config.threads, config.chunk_bytes, idle=idle, spans=spans)
        pool.limit(config.write_limit)
        trace = Trace.of(config, region, pool, step)
        settings = config.proof, config.placement, bool(config.write_limit)
        at_once = config.schedule == "auto"
        return cls(region, pool, schedule, barrier, trace, placement, *settings, at_once)

    def prepare(self, lives: Sequence[StateTensor], boundary_bytes: int, step: int) -> None:
        """Plan the layout and make room for it, before training relies on it.

        Raises:
            RegionFullError: the bytes needed and free are named.
        """
        self.copy_plan.update(lives, boundary_bytes)
        self.placement.prepare(sum(e.length for e in self.copy_plan.entries), self.pool)
        self.offload.prepare(self.copy_plan, step)

    @property
    def on_devices(self) -> bool:
        """Tell whether a device holds tensors now, or did at the last instant."""
        return bool(self.copy_plan.devices or self.offload.stream_positions)

    def note_instant(self, *, at_forward: bool) -> None:
        """Note that training is at forward start, or else at step end.

        A thread that saves just in time starts from there.
        """
        if self.on_devices:
            self.offload.note_streams(self.copy_plan, at_forward=at_forward)

    def open(
        self,
        step: int,
        state: CollectedState,
        at_step: bytes,
        at_forward: bytes,
        *,
        flags: int = 0,
        changed: Check | None = None,
        reading: TensorReading | None = None,
    ) -> InflightSnapshot | str:
        """Open the snapshot of `step`: from now to the fence the sources must not change.

        Buffers and other sources that cannot wait are copied before this returns. If a text is
        returned, it says why the snapshot is skipped: nothing was done, and the barrier was told,
        unless the snapshot is a RECORD_JIT one of several ranks, of which it never hears. `changed`
        names, at the fence, a tensor that has changed since an instant before this. `reading` is of
        the state's tensors, of this instant, where somebody has made it.

        Raises:
            RegionFullError: the state has outgrown the medium.
            PreviousPersistError: the region is latched.
        """
        assert self.window is None, "two snapshots in one window"
        if self.offload.failure is not None:
            raise self.offload.failure
        self._free_orphans()
        local = bool(flags & RECORD_JIT) and not self.barrier.alone
        slip: str | None = self.blocked_by
        if slip is None and not local:
            slip = self.barrier.opening(step)
        writer = None
        if slip is None:
            plan = self.copy_plan.update(state.lives, len(at_step) + len(at_forward))
            begin = now_ns()
            writer = SlotWriter.open(self.region, self.pool, plan, due=not local, kept=local)
        if writer is None:
            slip = slip or SlipReason.SLOTS
            if not local:
                self.barrier.lost(step, f"slipped: {slip}")
            return slip
        self._taken(writer)
        if self.trace is not None:
            self.trace.opened(step, writer, begin)
        said = at_step, at_forward, flags, state.share_digest, state.form, local
        snapshot = self.window = InflightSnapshot(step, writer, *said, changed=changed)
        try:
            staged = self._choose_staged(snapshot, self.copy_plan)
            with self.offload.side_streams() if self.copy_plan.devices else nullcontext():
                for part in self.copy_plan.groups:
                    self._queue(snapshot, part, staged, reading)
                if snapshot.transfers:
                    self.offload.start(snapshot.transfers)
        except BaseException as error:
            self.offload.keep_error(error)
            self.drop(f"failed: {error}", for_good=is_final(error))
            raise
        self._release(snapshot, self.schedule.open(snapshot.count_held()))
        return snapshot

    def _taken(self, writer: SlotWriter) -> None:
        """Forget the newest durable snapshot if this writer has taken its slot (it was aborted)."""
        if self.newest is not None and self.newest.writer.slot is writer.slot:
            self.newest = None

    def pace(self, says: Callable[[], int]) -> None:
        """Let as many copies run as the schedule says, in a few parts: each wakes workers.

        Any thread.
        """
        with self.pacing:
            snapshot = self.window
            if snapshot is not None:
                total, held = says(), snapshot.held_bytes
                part = held // _RELEASES if total < held else 0
                if total - snapshot.released_bytes > part:
                    self._release(snapshot, total)

    def fence(self, optimizer: int | None = None, *, aside: bool = False) -> bool:
        """Return when every copy of what `optimizer` (None: anyone) changes has left its source.

        The training thread helps. Once all groups are captured the snapshot is sealed and the
        commit goes on in the background. Returns False when the snapshot was torn and dropped.

        Raises:
            LightckError: a copy failed; the snapshot is dropped, older ones are intact.
        """
        snapshot = self.window
        if snapshot is None:
            return True
        wanted = [g for g in snapshot.groups if not g.captured and self._concerns(g, optimizer)]
        began = time.perf_counter()
        try:
            for group in wanted:
                begin = now_ns()
                if group.transfer is None:
                    snapshot.writer.finish_copies(group.batch)
                elif not group.is_private:  # no stream can reach private copies
                    # `aside`: by another thread than the one whose stream updates.
                    late = aside or bool(snapshot.flags & RECORD_JIT)
                    self.offload.fence(group.transfer, wait=late)
                captured = now_ns()
                torn = self._torn(snapshot, group)
                if self.trace is not None:
                    self.trace.fenced(begin, captured)
                if torn:
                    self.drop(f"torn: {torn[0]}")
                    snapshot.torn = tuple(torn)
                    return False
                group.sources = None
            snapshot.waited_s += time.perf_counter() - began
            if snapshot.captured:
                self._leave_window(snapshot)
        except BaseException as error:
            self.offload.keep_error(error)
            self.drop(f"failed: {error}", for_good=is_final(error))
            snapshot.fail(error)
            raise
        return True

    def pool_stats(self) -> dict[str, int]:
        """Return the pool's counters, or the last ones once it is closed. Any thread."""
        with self._counting:
            return self.pool.stats() if self._last_stats is None else self._last_stats

    @property
    def busy(self) -> bool:
        """Tell whether a due snapshot must wait until one that persists is committed."""
        return self.blocked_by is not None or not self.region.has_room(due=True)

    def lag_wait_s(self) -> float:
        """Return the seconds to wait for a device, so that the next snapshot need not be skipped.

        They are 0 unless the CPU has run ahead of a device that has not yet done the last
        snapshot's copies.
        """
        under_way = any(not snapshot.sealed for snapshot in self.persisting)
        return BEHIND_S if under_way and self.busy else 0.0

    @property
    def blocked_by(self) -> SlipReason | None:
        """The reason why no snapshot can be opened, lack of slots apart; None if there is none."""
        if self.placement.staging and self.persisting:
            return SlipReason.DRAM
        if not self.copy_plan.devices:
            return None
        if self.offload.recording(self.copy_plan):
            return SlipReason.GRAPH
        return SlipReason.COPY if self.offload.spare_in_use else None

    def drop(self, why: str = "given up", *, for_good: bool = False) -> None:
        """Give up the snapshot in the window; its slot stays invalid and is reused first."""
        with self.pacing:
            snapshot, self.window = self.window, None
            if snapshot is None:
                return
            self.schedule.close()
        self._lost(snapshot, why, for_good=for_good)
        self._abandon(snapshot)

    def after_fork(self) -> None:
        """Begin with a free lock in a forked child: another thread of the parent may hold it."""
        self.lock = RLock()

    def begin_timeline(self) -> None:
        """Begin a timeline that continues the newest committed snapshot; nothing is in flight.

        This may block on the medium.
        """
        self.region.begin_timeline(self.region.continued)
        self.newest = None
        self.counters.forget_steps()

    def forget(self, why: str) -> None:
        """Give up what is open: the state was replaced."""
        snapshot = self.window
        self.drop(why)
        if snapshot is not None:
            snapshot.fail(TornSnapshotError(f"step {snapshot.step} has no snapshot: {why}"))

    def _abandon(self, snapshot: InflightSnapshot) -> None:
        if not self.region.staged and not snapshot.transfers:
            snapshot.writer.abandon()
            return
        # On page media giving up waits for the slot's invalidation, perhaps in a sync; with copies
        # under way, for a device. The training thread does not: I9 (the training thread waits only
        # at the fence). Both may still read, and a device may write the slot: it and the snapshot's
        # memory are kept.
        thread = Thread(target=self._end, args=(snapshot,), name="lightck-abandon")
        self._abandoning = [pair for pair in self._abandoning if pair[0].is_alive()]
        self._abandoning.append((thread, snapshot))
        thread.start()

    def _end(self, snapshot: InflightSnapshot) -> None:
        """End a dropped snapshot, on a thread of its own."""
        engine = self.offload.engine
        for transfer in snapshot.transfers:
            transfer.device.enter_thread()
        for transfer in snapshot.transfers:
            engine.give_up(transfer)
        snapshot.writer.abandon()
        for transfer in snapshot.transfers:
            engine.forget(transfer)

    def await_abandoned(self, deadline: float | None = None) -> bool:
        """Wait until dropped snapshots have let go of their slots and of devices' spare memory.

        False if they had not by the `deadline`, in seconds of `time.monotonic`.
        """
        for thread, _ in self._abandoning:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._abandoning = [pair for pair in self._abandoning if pair[0].is_alive()]
        return not self._abandoning

    def _free_orphans(self) -> None:
        """Free snapshots in slots that an interrupt (Ctrl-C) left without a `InflightSnapshot`."""
        snapshots = [*self.persisting, *(snapshot for _, snapshot in self._abandoning)]
        known = {id(snapshot.writer.slot) for snapshot in snapshots}
        for slot in self.region.slots:
            if id(slot) not in known:
                slot.close_writer()
        self.pool.reap([slot.writer for slot in self.region.slots if slot.writer is not None])

    def close(self) -> None:
        """Drop what is not sealed and stop the workers. Idempotent."""
        self.drop("closed")
        for snapshot in self.persisting:
            if snapshot.sealed:
                snapshot.writer.abandon()
            else:
                self._abandon(snapshot)
        for snapshot in self.in_flight:
            why = f"step {snapshot.step} was not committed before the close"
            snapshot.fail(WaitTimeoutError(why))
        self.persisting.clear()
        self.awaiting.clear()
        self.await_abandoned()
        if self._last_stats is None:
            self._free_orphans()
            with self._counting:  # from here on nobody asks the pool, which is closed below
                self._last_stats = self.pool.stats()
            self.offload.close()
            if self.trace is not None:
                self.trace.finish()
            self.pool.close()

    def _queue(
        self,
        snapshot: InflightSnapshot,
        part: PlannedGroup,
        staged: npt.NDArray[np.bool_],
        reading: TensorReading | None = None,
    ) -> CopyGroup:
        """Queue one group's copies.

        Those from private copies may run at once; those that must not wait are done on return.
        """
        chosen, at = self.copy_plan.sources(part, reading), part.positions
        if part.device is not None:
            transfer = self.offload.queue(
                snapshot.step, snapshot.writer, part, chosen, staged, self.copy_plan
            )
            group = CopyGroup(part.holders, transfer.batch, chosen, part.is_private, transfer)
            snapshot.groups.append(group)
            return group
        pointers = chosen.pointers + part.begins
        may_skip = part.unmoved(chosen.versions)
        batch = snapshot.writer.add(at, pointers, may_skip, staged[at])
        group = CopyGroup(part.holders, batch, chosen, part.is_private)
        snapshot.groups.append(group)
        if part.copied_at_open or self.copy_plan.is_at_once:
            began = time.perf_counter()
            snapshot.writer.copy_alone(batch)
            snapshot.waited_s += time.perf_counter() - began
            # Just in time, the training may go on beside it: the fence compares the others.
            if part.is_private or not snapshot.flags & RECORD_JIT:
                group.sources = None
        elif part.is_private:
            snapshot.writer.release(batch)
        return group

    def _choose_staged(self, snapshot: InflightSnapshot, plan: CopyPlan) -> npt.NDArray[np.bool_]:
        """Return, for each entry, whether its copy goes through DRAM.

        Should DRAM be short, the first ones in copy order do.
        """
        staged = np.zeros(len(plan.entries), np.bool_)
        if plan.groups and self.placement.staging:
            order = np.concatenate([part.positions for part in plan.groups])
            staged[order] = self.placement.place(snapshot.writer.layout.lengths[order])
        return staged

    def _release(self, snapshot: InflightSnapshot, total_bytes: int) -> None:
        snapshot.released_bytes = total_bytes
        if self.trace is not None:
            self.trace.released(snapshot.step, total_bytes)
        for group in snapshot.groups:
            if not group.is_held:
                continue
            if total_bytes <= 0:
                break
            # A failed snapshot is told at the fence, once, and never out of somebody's backward.
            with suppress(LightckError):
                snapshot.writer.release(group.batch, min(total_bytes, group.batch.total_bytes))
            total_bytes -= group.batch.total_bytes

    def _concerns(self, group: CopyGroup, optimizer: int | None) -> bool:
        """Tell whether a group has a tensor that `optimizer` (None: any) is about to change."""
        return optimizer is None or optimizer in group.holders or not group.holders

    def _torn(self, snapshot: InflightSnapshot, group: CopyGroup) -> list[str]:
        """Name the tensors that changed inside the window, as far as can be seen."""
        if group.is_private:
            return []
        assert group.sources is not None
        moved, entries = group.sources.changed(), snapshot.writer.layout.entries
        if moved:
            return [entries[int(group.batch.positions[i])].name for i in moved]
        if group.transfer is not None:
            i = self.offload.differs(group.transfer, group.sources) if self.proof else None
            differs = None if i is None else entries[int(group.batch.positions[i])].name
        else:
            differs = snapshot.writer.audit(group.batch, self._dice.getrandbits(63), self.proof)
        if differs is None and snapshot.changed is not None:
            differs = snapshot.changed()
        return [differs] if differs else []

    def _leave_window(self, snapshot: InflightSnapshot) -> None:
        """Take the captured snapshot out of the window, and seal it.

        With copies on their way from a device it is sealed later, when they have arrived.
        """
        if not snapshot.transfers:
            self._seal(snapshot)
        with self.pacing:
            self.window = None
            self.schedule.close()
        # With transfers, what the fence waits for says nothing of the medium.
        if self.placement.choice.may_be_late and not snapshot.transfers:
            self.placement.fence_waited(snapshot.waited_s, snapshot.writer.layout.payload_bytes)
        self.persisting.append(snapshot)
        if snapshot.transfers:
            self.offload.engine.wake()

    def _arrived(self, snapshot: InflightSnapshot, timeout_s: float | None) -> bool:
        try:
            if not self.offload.arrived(snapshot.transfers, timeout_s):
                return False
        except LightckError as error:
            self.offload.keep_error(error)
            raise
        self._seal(snapshot)
        for transfer in snapshot.transfers:
            self.offload.engine.forget(transfer)
        return True

    def _seal(self, snapshot: InflightSnapshot) -> None:
        begin = now_ns()
        said = (snapshot.at_step, snapshot.at_forward, snapshot.flags, snapshot.share_digest)
        snapshot.writer.seal(snapshot.step, *said)
        if self.trace is not None:
            self.trace.note("part", "seal", begin, now_ns())
        snapshot.sealed, snapshot.captured_s = True, time.monotonic()
        self.counters.captured += 1
        self.counters.last_captured_step = snapshot.step
        if not snapshot.flags & RECORD_EARLY:
            self.counters.last_exact_step = snapshot.step

    # ---- after the window: captured snapshots made durable, and counted --------------------

    def poll(self, timeout_s: float | None = 0.0) -> Iterator[InflightSnapshot]:
        """Yield the snapshots that are committed now; wait up to `timeout_s` for this rank's own.

        Raises:
            LightckError: a background failure; that snapshot is dropped.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.persisting:
            snapshot = self.persisting[0]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                if not (snapshot.sealed or self._arrived(snapshot, left)):
                    break
                if not snapshot.writer.wait(left):
                    break
            except Exception as error:
                self.persisting.remove(snapshot)
                self._lost(snapshot, f"failed: {error}", for_good=is_final(error))
                if not snapshot.sealed:
                    self._abandon(snapshot)
                snapshot.fail(error)
                raise
            self.persisting.remove(snapshot)
            snapshot.durable_s = time.monotonic()
            self.counters.durable += 1
            self.counters.commit_s += snapshot.durable_s - snapshot.captured_s
            self.newest = snapshot
            self.barrier.committed(snapshot.step, snapshot.agreed_fingerprint)
            if snapshot.rank_local:
                self.region.keep_rank_local(snapshot.writer.slot)
                continue
            self.awaiting.append(snapshot)
        for snapshot in [*self.awaiting]:
            fate = self.barrier.fate(snapshot.step)
            if fate is Fate.WHOLE:
                self._whole(snapshot)
                yield snapshot
            elif fate is Fate.DEAD:
                self._dead(snapshot)

    def _try_seal(self) -> bool:
        """Seal what has arrived, unless another thread has the lock; False in that case.

        Never waits. For the threads of the transfers.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return self.seal_arrived()
        finally:
            self.lock.release()

    def seal_arrived(self) -> bool:
        """Seal the snapshots that have arrived from devices; False if more is about to arrive.

        Call it under the lock. An error is raised by the next `poll`, not here.
        """
        for snapshot in self.persisting:
            if not snapshot.sealed:
                with suppress(LightckError):
                    if any(transfer.error for transfer in snapshot.transfers):
                        return True
                    if not self._arrived(snapshot, 0.0):
                        return not all(transfer.fed.is_set() for transfer in snapshot.transfers)
        return True

    def _whole(self, snapshot: InflightSnapshot) -> None:
        """Protect a snapshot that every rank has committed, and free the one protected before."""
        self.region.mark_committed(snapshot.writer.slot)
        self.awaiting = [each for each in self.awaiting if each is not snapshot]
        counters, now = self.counters, time.monotonic()
        counters.committed += 1
        counters.whole_s += now - snapshot.durable_s
        counters.persist_s = now - snapshot.opened_s
        # Fates need not come in the order of the steps.
        counters.last_committed_step = max(snapshot.step, counters.last_committed_step or 0)

    def count_last(self) -> InflightSnapshot | None:
        """Count the newest snapshot as committed, whatever its fate was; None: it was before.

        At their close the ranks found that every one of them holds it.
        """
        snapshot = self.newest
        if snapshot is None or self.counters.last_committed_step == snapshot.step:
            return None
        assert snapshot.writer.record is not None
        self.region.committed(snapshot.writer.slot, snapshot.writer.record)
        self._whole(snapshot)
        for future in snapshot.futures:
            if not future.done():
                future.set_result(snapshot.step)
        return snapshot

    def _dead(self, snapshot: InflightSnapshot) -> None:
        """Abort a snapshot that another rank does not have; its slot is reused first."""
        self.region.mark_aborted(snapshot.writer.slot)
        self.awaiting.remove(snapshot)
        self.counters.dead += 1
        why = self.barrier.why_dead(snapshot.step)
        event("dead", logging.DEBUG, step=snapshot.step, why=why)
        if self.trace is not None:
            self.trace.lost_snapshot("dead", snapshot.step, why)
        why = f"snapshot of step {snapshot.step} does not count: {why}"
        snapshot.fail(CoordinationError(why))

    @property
    def in_flight(self) -> list[InflightSnapshot]:
        """The snapshots past their fence that are neither committed on every rank nor given up."""
        return [*self.persisting, *self.awaiting]

    def await_fates(self, seconds: float) -> None:
        """Wait up to `seconds` for the fate of every snapshot this rank has committed."""
        deadline = time.monotonic() + seconds
        for snapshot in self.awaiting:
            self.barrier.wait(snapshot.step, max(0.0, deadline - time.monotonic()))

    def _lost(self, snapshot: InflightSnapshot, why: str, *, for_good: bool) -> None:
        if not snapshot.rank_local:
            self.barrier.lost(snapshot.step, why, for_good=for_good)
