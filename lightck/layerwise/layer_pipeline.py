"""A pipeline whose copies begin right after their own layer's update, before the step has ended.

A snapshot that has *begun* holds some layers of step t while others are still of t - 1. At forward
start everything is of step t, and the snapshot is opened in the ordinary way: what was not copied
by then is queued; if anything changed in between, the whole snapshot is captured there. From then
on each layer has its own fence.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightck.pipeline.copy_plan import Part
from lightck.pipeline.inflight import Flight, Group
from lightck.pipeline.pipeline import Pipeline
from lightck.region.native_region import RECORD_JIT
from lightck.region.slot_writer import SlotWriter
from lightck.state.inventory import Collected
from lightck.tracing.trace import now_ns

MIXED = -1
"""The step number of a layer's content while its update runs, and for good if that failed."""


@dataclass(eq=False)
class Begun:
    """Holds a snapshot whose copies have begun before forward start."""

    flight: Flight
    parts: tuple[Part, ...]
    """The groups of the copy plan that the snapshot was opened with."""
    staged: npt.NDArray[np.bool_]
    done: dict[int, Group] = field(default_factory=dict)
    """The copies that are queued already, by position in `parts`."""


@dataclass(eq=False)
class LayerPipeline(Pipeline):
    """Groups and fences copies by unit instead of by optimizer.

    A unit is defined in `layerwise/units.py`; tensors that are in none keep their optimizer.
    """

    content: dict[int, int] = field(default_factory=dict)
    """The step that each unit's tensors are of, by the unit's number."""
    owners: Mapping[int, int] = field(default_factory=dict)
    """The index of each unit's optimizer, by the unit's number."""
    begun: Begun | None = None
    late: set[int] = field(default_factory=set)
    """Units that the loop changes after their update: their copies begin at forward start."""
    _told: bool = False

    def begin(self, step: int, unit: int) -> None:
        """Queue the copies of one layer, which is at `step` now; the first one opens the snapshot.

        Does nothing when that is not possible: what is not queued here is queued at forward start.
        """
        assert self.content.get(unit) == step, (unit, self.content.get(unit), step)
        if unit in self.late or (self.begun is None and not self._begin(step)):
            return
        begun = self.begun
        assert begun is not None and begun.flight.step == step
        for k, part in enumerate(begun.parts):
            early = not part.owned and part.device is None
            if part.holders == {unit} and early and k not in begun.done:
                group = self._queue(begun.flight, part, begun.staged)
                begun.done[k] = group
                begun.flight.writer.release(group.batch)

    def _begin(self, step: int) -> bool:
        """Take a slot with the last snapshot's plan, without looking through the live state."""
        plan = self.arrangement.plan
        if plan is None or not self.arrangement.parts:
            return False
        # DRAM serves one snapshot at a time.
        one_by_one = self.region.staged or self.placement.staging
        if one_by_one and (self.window is not None or self.persisting):
            return False
        if self.barrier.opening(step) is not None:
            return False
        begin = now_ns()
        writer = SlotWriter.open(self.region, self.pool, plan, due=True)
        if writer is None:
            return False
        self._taken(writer)
        if self.trace is not None:
            self.trace.opened(step, writer, begin)
        flight = Flight(step, writer, b"", b"", 0)
        self.begun = Begun(flight, self.arrangement.parts, np.zeros(0, np.bool_))
        self.begun.staged = self._placed(flight, self.arrangement)
        return True

    def open(
        self, step: int, state: Collected, at_step: bytes, at_forward: bytes, *, flags: int = 0
    ) -> Flight | str:
        """Open the snapshot of `step`, or go on with the one that has begun, if it still can."""
        begun, self.begun = self.begun, None
        if begun is None:
            return super().open(step, state, at_step, at_forward, flags=flags)
        try:
            plan = self.arrangement.update(state.lives, len(at_step) + len(at_forward))
            joins = plan is begun.flight.writer.plan and self._still(begun, step)
        except BaseException as error:
            self.barrier.lost(step, f"failed: {error}")
            self._abandon(begun.flight)
            raise
        if not joins:
            self._abandon(begun.flight)
            if flags & RECORD_JIT and not self.barrier.alone:
                self.barrier.lost(step, "the snapshot that had begun could not go on")
            return super().open(step, state, at_step, at_forward, flags=flags)
        assert self.window is None, "two snapshots in one window"
        flight = self.window = begun.flight
        flight.at_step, flight.at_forward, flight.flags = at_step, at_forward, flags
        flight.share_digest, flight.form = state.share_digest, state.form
        try:
            for k, part in enumerate(begun.parts):
                if k not in begun.done:
                    self._queue(flight, part, begun.staged)
            self.offload.depart(flight)
        except BaseException as error:
            self.drop(f"failed: {error}")
            raise
        held = flight.held_bytes = sum(g.batch.total_bytes for g in flight.groups if g.is_held)
        self.schedule.open(held)
        self._release(flight, held)
        return flight

    def _still(self, begun: Begun, step: int) -> bool:
        """Check that the queued copies are of the same tensors, of this step and unchanged."""
        if begun.parts is not self.arrangement.parts or begun.flight.step != step:
            return False
        changed: list[str] = []
        for k, group in begun.done.items():
            part, sources = begun.parts[k], group.sources
            assert sources is not None, "captured before forward start"
            live = [self.arrangement.tensors[i] for i in part.order]
            if not all(map(operator.is_, live, sources.tensors)) or self._of_other_step(
                group, step
            ):
                return False
            moved = sources.changed()
            if moved:
                self.late.update(part.holders)
                changed += [self.arrangement.entries[part.order[i]].name for i in moved]
        if changed and not self._told:
            self._told = True
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            warnings.warn(
                f"{changed[0]}{more} changed between its layer's update and the next forward"
                " (weight clipping, EMA?): the copies of these layers begin at the forward from"
                " now on; nothing was lost",
                stacklevel=2,
            )
        return not changed

    def _concerns(self, group: Group, optimizer: int | None) -> bool:
        """Tell whether a group belongs to the fence of a unit, or of an optimizer and its units."""
        if optimizer in self.owners:
            return optimizer in group.holders
        mine = any(self.owners.get(unit) == optimizer for unit in group.holders)
        return mine or super()._concerns(group, optimizer)

    def _torn(self, flight: Flight, group: Group) -> list[str]:
        """Name the tensors that are torn; a layer with another step's content counts as torn."""
        if self._of_other_step(group, flight.step):
            entries = flight.writer.layout.entries
            return [entries[int(i)].name for i in group.batch.positions]
        return super()._torn(flight, group)

    def _of_other_step(self, group: Group, step: int) -> bool:
        return any(self.content.get(unit, step) != step for unit in group.holders)

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
            self.barrier.lost(begun.flight.step, why)
            self._abandon(begun.flight)
