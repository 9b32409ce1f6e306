"""Snapshots whose optimizer state and parameters are written by the update itself.

The update of a due step stores what it computes in place and into the slot, in one pass
(`lightck.optim`). Such a snapshot has *begun*: it has a slot and some of its bytes when its step
ends. At forward start, if nothing has touched it since, it is opened in the ordinary way, and all
that is left to copy is what no update writes: buffers, frozen parameters, counts of steps. What has
been touched sends the whole snapshot to the forward start, where it is copied as any other.

Nothing proves that a tensor was not touched, but four things show that one was: its address, its
version counter, the write watch, and a comparison of a random part of every tensor, as at a fence.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.errors import LightckError
from lightck.events import event
from lightck.optim.update_stream import UpdateStream
from lightck.pipeline.copy_plan import CopySources, PlannedGroup, TensorReading, versions_of
from lightck.pipeline.pipeline import Check, CopyGroup, InflightSnapshot, Pipeline
from lightck.pipeline.write_watch import WriteWatch
from lightck.region.native_region import RECORD_JIT
from lightck.region.native_update import COLUMNS, NOT_STREAMED
from lightck.region.slot_writer import SlotWriter
from lightck.state.inventory import CollectedState
from lightck.tracing.trace import now_ns

Rows = Sequence[tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class StreamPlan:
    """Assignment of an update's tensors to entries, and the groups that are left to copy."""

    rows: Rows
    parts: tuple[PlannedGroup, ...]
    """The groups of the copy plan that this was made for."""
    late: frozenset[str]
    """The entries that were left out because the loop changes them behind the update."""
    lives: list[torch.Tensor]
    """The copy plan's tensors, of which the streamed ones are at `positions`."""
    positions: npt.NDArray[np.intp]
    """The entry of each streamed tensor, row by row."""
    tensors: list[torch.Tensor]
    """The streamed tensors, row by row."""
    streamed: npt.NDArray[np.bool_]
    """For each of the rows' tensors, whether it is streamed."""
    copies: npt.NDArray[np.uint32]
    """See `UpdateStream.copies`."""
    lengths: npt.NDArray[np.uint64]
    missing: list[PlannedGroup]
    """Groups of the rest; copied before the forward goes on if they are small."""


@dataclass(frozen=True)
class StreamedCopies:
    """Copies that an update has made, as it left their tensors."""

    group: CopyGroup
    plan: StreamPlan
    pointers: npt.NDArray[np.uint64]
    versions: npt.NDArray[np.int64]


@dataclass(eq=False)
class StreamPipeline(Pipeline):
    """A pipeline into which an optimizer's update may write, see `lightck.optim`."""

    begun: InflightSnapshot | None = None
    """The snapshot that an update writes or has written, up to its forward start."""
    watch: WriteWatch = field(default_factory=WriteWatch)
    _plan: StreamPlan | None = None
    _copies: StreamedCopies | None = None
    """Copies that the update has made for the snapshot that has begun."""
    _changed: frozenset[str] = frozenset()
    """Entries that were changed behind the update of the last snapshot."""
    _late: frozenset[str] = frozenset()
    """Entries that were changed so twice in a row: they are not streamed any more."""

    @property
    def may_stream(self) -> bool:
        """Tell whether the medium takes stores as fast as an update makes them."""
        return not (self.write_limited or self.region.staged or self.placement.staging)

    def stream(
        self, step: int, rows: Rows, pointers: npt.NDArray[np.uint64]
    ) -> UpdateStream | None:
        """Begin the snapshot of `step` for the update that is about to make it, see `OpenStream`.

        On the thread that updates. None: no slot is free, or the medium is one that the update
        would have to wait for.
        """
        with self.lock:
            self._forget_begun("its update was not completed")
            if not self.may_stream:
                return None
            plan = self._plan_of(rows)
            if not len(plan.positions) or not self.watch.begin():
                return None
            chosen = pointers[plan.streamed]
            nothing = np.zeros(len(plan.positions), np.bool_)
            begun = batch = None
            # What fails is met and told at the forward start, where it costs no update.
            with suppress(LightckError):
                begun = self._begin(step)
                if begun is not None:
                    batch = begun.writer.add(plan.positions, chosen, nothing, nothing)
            if begun is None or batch is None:
                self._forget_begun("its copies could not be queued")
                return None
            group = CopyGroup(frozenset(), batch, None, is_private=False)
            ended = partial(self._update_ended, begun, plan, group, chosen)
            return UpdateStream(begun.writer.snapshot, batch.number, plan.copies, ended)

    def _begin(self, step: int) -> InflightSnapshot | None:
        """Take a slot with the last snapshot's plan, without looking through the live state."""
        plan = self.copy_plan.allocation
        if plan is None or self.barrier.opening(step) is not None:
            return None
        begin = now_ns()
        writer = SlotWriter.open(self.region, self.pool, plan, due=True)
        if writer is None:
            return None
        self._taken(writer)
        if self.trace is not None:
            self.trace.opened(step, writer, begin)
        self.begun = InflightSnapshot(step, writer, b"", b"", 0)
        return self.begun

    def _update_ended(
        self,
        begun: InflightSnapshot,
        plan: StreamPlan,
        group: CopyGroup,
        pointers: npt.NDArray[np.uint64],
        complete: bool,
    ) -> None:
        """Take what the update has written; from here on the watch tells what is changed."""
        with self.lock:
            if self.begun is not begun:
                return
            if not complete:
                self._forget_begun("its update failed")
                return
            begun.groups.append(group)
            versions = np.array(versions_of(plan.tensors), np.int64)
            self._copies = StreamedCopies(group, plan, pointers, versions)

    def _plan_of(self, rows: Rows) -> StreamPlan:
        """Return which of these tensors can be streamed, and what is left to copy."""
        plan, parts = self._plan, self.copy_plan.groups
        if plan is None or plan.rows is not rows or plan.parts is not parts:
            plan = None
        if plan is None or plan.late != self._late:
            plan = self._plan = self._make_plan(rows, parts)
        return plan

    def _make_plan(self, rows: Rows, parts: tuple[PlannedGroup, ...]) -> StreamPlan:
        lives, entries = self.copy_plan.tensors, self.copy_plan.entries
        fit = {
            id(lives[i]): i
            for part in parts
            if not part.is_private and part.device is None
            for i in part.order
            if not entries[i].begin and entries[i].length == lives[i].nbytes
            if entries[i].name not in self._late
        }
        positions: list[int] = []
        streamed: list[bool] = []
        copies = np.full((len(rows), COLUMNS), NOT_STREAMED, np.uint32)
        for i, row in enumerate(rows):
            for column, tensor in enumerate(row):
                position = fit.get(id(tensor))
                streamed.append(position is not None)
                if position is not None:
                    copies[i, column] = len(positions)
                    positions.append(position)
        at = np.array(positions, np.intp)
        lengths = np.array([entries[i].length for i in positions], np.uint64)
        chosen = np.array(streamed, np.bool_)
        tensors, missing = [lives[i] for i in positions], self._missing_parts(parts, at)
        found = lives, at, tensors, chosen, copies, lengths, missing
        return StreamPlan(rows, parts, self._late, *found)

    def _missing_parts(
        self, parts: tuple[PlannedGroup, ...], streamed: npt.NDArray[np.intp]
    ) -> list[PlannedGroup]:
        """Return the groups without what is streamed; copied at once if that is small."""
        left = []
        for part in parts:
            kept = np.flatnonzero(~np.isin(part.positions, streamed))
            if len(kept) == len(part.positions):
                left.append(part)
            elif len(kept):
                order = tuple(part.order[int(i)] for i in kept)
                total = sum(self.copy_plan.entries[i].length for i in order)
                left.append(
                    replace(
                        part,
                        positions=part.positions[kept],
                        order=order,
                        free=part.free[kept],
                        begins=part.begins[kept],
                        total_bytes=total,
                        versions=None,
                        last=None,
                    )
                )
        rest = [part for part in left if part.device is None]
        total, measure = sum(part.total_bytes for part in rest), self.copy_plan.measure_at_once
        if measure is None or total > measure(total):
            return left
        return [
            part if part.is_private or part.device else replace(part, copied_at_open=True)
            for part in left
        ]

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
        """Open the snapshot of `step`, or go on with the one that has begun, if it still can."""
        begun, self.begun = self.begun, None
        said: dict[str, Any] = {"flags": flags, "changed": changed, "reading": reading}
        if begun is None:
            return super().open(step, state, at_step, at_forward, **said)
        try:
            plan = self.copy_plan.update(state.lives, len(at_step) + len(at_forward))
            same = plan is begun.writer.plan and begun.step == step
            copies = self._copies_to_go_on_with(begun, reading, flags) if same else None
        except BaseException as error:
            self.barrier.lost(step, f"failed: {error}")
            self._abandon(begun)
            raise
        if copies is None:
            self._abandon(begun)
            if flags & RECORD_JIT and not self.barrier.alone:
                self.barrier.lost(step, "the snapshot that had begun could not go on")
            return super().open(step, state, at_step, at_forward, **said)
        assert self.window is None, "two snapshots in one window"
        snapshot = self.window = begun
        snapshot.complete(state, (at_step, at_forward), flags, changed)
        try:
            staged = np.zeros(len(self.copy_plan.entries), np.bool_)
            for part in copies.plan.missing:
                self._queue(snapshot, part, staged, reading)
            if snapshot.transfers:
                self.offload.start(snapshot.transfers)
        except BaseException as error:
            self.drop(f"failed: {error}")
            raise
        held = snapshot.count_held()
        self.schedule.open(held)
        self._release(snapshot, held)
        return snapshot

    def _copies_to_go_on_with(
        self, begun: InflightSnapshot, reading: TensorReading | None, flags: int
    ) -> StreamedCopies | None:
        """Return the update's copies if they are of the plan's tensors, and these unchanged.

        `reading` is of all of the plan's tensors now, where somebody has made it; `flags` are the
        record's.
        """
        self.watch.end()
        copies = self._copies
        if copies is None or copies.plan.parts is not self.copy_plan.groups:
            return None
        plan, live = copies.plan, self.copy_plan.tensors
        same = live is plan.lives or all(
            map(operator.is_, (live[i] for i in plan.positions.tolist()), plan.tensors)
        )
        if not same:
            return None
        changed = self._find_changed(begun, copies, reading)
        if changed:
            self._late |= self._changed & changed
            self._changed = changed
            return None
        self._changed = frozenset()
        if flags & RECORD_JIT:  # training may go on beside it: the fence compares once more
            sources = CopySources(plan.tensors, copies.pointers, copies.versions, [], [])
            copies.group.compare_at_fence(sources)
        self.counters.streamed += 1
        return copies

    def _find_changed(
        self, begun: InflightSnapshot, copies: StreamedCopies, reading: TensorReading | None
    ) -> frozenset[str]:
        """Name the streamed tensors that something has changed since their update."""
        at = copies.plan.positions
        if reading is None:
            reading = TensorReading.of(self.copy_plan.tensors)
        moved = reading.pointers[at] != copies.pointers
        moved |= reading.versions[at] != copies.versions
        moved |= self.watch.wrote_to(copies.pointers, copies.plan.lengths)
        entries = self.copy_plan.entries
        if moved.any():
            return frozenset(entries[int(i)].name for i in at[moved])
        everything = self.proof or not self.watch.gapless
        seed = self._dice.getrandbits(63)
        name = begun.writer.audit(copies.group.batch, seed, everything)
        if name is None:
            return frozenset()
        if self.watch.gapless:
            event("changed_unseen", logging.WARNING, name=name)
        return frozenset((name,))

    def after_fork(self) -> None:
        """Watch nothing in a forked child."""
        super().after_fork()
        self.watch.end()

    def forget(self, why: str) -> None:
        """Give up what is open, also a snapshot that has not reached its forward start."""
        self._forget_begun(why)
        super().forget(why)

    def close(self) -> None:
        """Close, and give up a snapshot that has not reached its forward start."""
        self._forget_begun("closed")
        super().close()

    def _forget_begun(self, why: str) -> None:
        self.watch.end()
        self._copies = None
        begun, self.begun = self.begun, None
        if begun is not None:
            self.barrier.lost(begun.step, why)
            self._abandon(begun)
