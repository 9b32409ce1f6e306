"""Snapshots that begin before forward start: their first bytes are those of the update itself.

A snapshot that has *begun* has a slot and some of its bytes when its step ends. At forward start,
when everything is of one step, it is opened in the ordinary way and becomes the window's: what is
still missing is queued. If what it has can no longer count, the whole snapshot is captured there.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.pipeline.copy_plan import PlannedGroup, TensorReading
from lightck.pipeline.pipeline import Check, CopyGroup, InflightSnapshot, Pipeline
from lightck.region.native_region import RECORD_JIT
from lightck.region.slot_writer import SlotWriter
from lightck.state.inventory import CollectedState
from lightck.tracing.trace import now_ns


@dataclass(eq=False)
class BegunSnapshot:
    """A snapshot whose copies have begun before forward start."""

    snapshot: InflightSnapshot
    parts: tuple[PlannedGroup, ...]
    """The groups of the copy plan that the snapshot was opened with."""
    staged: npt.NDArray[np.bool_]
    queued: dict[int, CopyGroup] = field(default_factory=dict)
    """The copies that are queued already, by position in `parts`."""


@dataclass(eq=False)
class BegunPipeline(Pipeline):
    """A pipeline whose snapshots may begin before forward start."""

    begun: BegunSnapshot | None = None

    def _begin(self, step: int) -> BegunSnapshot | None:
        """Take a slot with the last snapshot's plan, without looking through the live state."""
        plan = self.copy_plan.allocation
        if plan is None or not self.copy_plan.groups:
            return None
        # DRAM serves one snapshot at a time.
        one_by_one = self.region.staged or self.placement.staging
        if one_by_one and (self.window is not None or self.persisting):
            return None
        if self.barrier.opening(step) is not None:
            return None
        begin = now_ns()
        writer = SlotWriter.open(self.region, self.pool, plan, due=True)
        if writer is None:
            return None
        self._taken(writer)
        if self.trace is not None:
            self.trace.opened(step, writer, begin)
        snapshot = InflightSnapshot(step, writer, b"", b"", 0)
        self.begun = BegunSnapshot(snapshot, self.copy_plan.groups, np.zeros(0, np.bool_))
        self.begun.staged = self._choose_staged(snapshot, self.copy_plan)
        return self.begun

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
            same = plan is begun.snapshot.writer.plan and begun.parts is self.copy_plan.groups
            goes_on = same and begun.snapshot.step == step and self._goes_on(begun, reading, flags)
        except BaseException as error:
            self.barrier.lost(step, f"failed: {error}")
            self._abandon(begun.snapshot)
            raise
        if not goes_on:
            self._abandon(begun.snapshot)
            if flags & RECORD_JIT and not self.barrier.alone:
                self.barrier.lost(step, "the snapshot that had begun could not go on")
            return super().open(step, state, at_step, at_forward, **said)
        assert self.window is None, "two snapshots in one window"
        snapshot = self.window = begun.snapshot
        snapshot.complete(state, (at_step, at_forward), flags, changed)
        try:
            for part in self._missing(begun):
                self._queue(snapshot, part, begun.staged, reading)
            if snapshot.transfers:
                self.offload.start(snapshot.transfers)
        except BaseException as error:
            self.drop(f"failed: {error}")
            raise
        held = snapshot.count_held()
        self.schedule.open(held)
        self._release(snapshot, held)
        return snapshot

    @abstractmethod
    def _goes_on(self, begun: BegunSnapshot, reading: TensorReading | None, flags: int) -> bool:
        """Tell whether what the snapshot has is of its step, of the plan's tensors, and unchanged.

        `reading` is of all of the plan's tensors now, where somebody has made it; `flags` are the
        record's.
        """

    def _missing(self, begun: BegunSnapshot) -> list[PlannedGroup]:
        """Return the groups of copies that the snapshot does not have yet."""
        return [part for k, part in enumerate(begun.parts) if k not in begun.queued]

    def forget(self, why: str) -> None:
        """Give up what is open, also a snapshot that has not reached its forward start."""
        self._forget_begun(why)
        super().forget(why)

    def close(self) -> None:
        """Close, and give up a snapshot that has not reached its forward start."""
        self._forget_begun("closed")
        super().close()

    def _forget_begun(self, why: str) -> None:
        begun, self.begun = self.begun, None
        if begun is not None:
            self.barrier.lost(begun.snapshot.step, why)
            self._abandon(begun.snapshot)
