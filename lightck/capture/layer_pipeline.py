"""A pipeline whose copies begin right after their own layer's update, before the step has ended.

A snapshot that has *begun* holds some layers of step t while others are still of t - 1. It joins
the ordinary way at forward start, where everything is of step t: what was not copied by then is
queued, what changed in between sends the whole snapshot there. From then on each layer has its own
fence.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightck.capture.arrange import Part
from lightck.capture.flight import Flight, Group
from lightck.capture.pipeline import Pipeline
from lightck.capture.state import Collected
from lightck.capture.trace import now_ns
from lightck.region.native import RECORD_JIT
from lightck.region.writer import SlotWriter

MIXED = -1
"""Step of a layer's content while its update runs, and for good if that failed."""


@dataclass(eq=False)
class Begun:
    """Holds a snapshot that has not come to forward start."""

    flight: Flight
    parts: tuple[Part, ...]
    """The arrangement that it was planned for."""
    staged: npt.NDArray[np.bool_]
    done: dict[int, Group] = field(default_factory=dict)
    """By position in `parts`: queued already."""


@dataclass(eq=False)
class LayerPipeline(Pipeline):
    """Holders of copies are units (`capture/units.py`), or an optimizer for what is in none."""

    content: dict[int, int] = field(default_factory=dict)
    """By unit: the step that its tensors are of."""
    owners: Mapping[int, int] = field(default_factory=dict)
    """By unit: its optimizer."""
    begun: Begun | None = None
    late: set[int] = field(default_factory=set)
    """Units that the loop changes behind their update: their copies begin at forward start."""
    _told: bool = False

    def begin(self, step: int, unit: int) -> None:
        """Queue the copies of one layer, which is of `step` now; the first opens the snapshot.

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
        """Take a slot, planned as the last snapshot was: the live state is not looked through."""
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
        """As ever; a snapshot of this step that has begun goes on, if it still can."""
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
        """What was queued is what is there: the same tensors, of this step, untouched since."""
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
        """A unit's fence is its own; an optimizer's is that of its units, too."""
        if optimizer in self.owners:
            return optimizer in group.holders
        mine = any(self.owners.get(unit) == optimizer for unit in group.holders)
        return mine or super()._concerns(group, optimizer)

    def _torn(self, flight: Flight, group: Group) -> list[str]:
        """Layers carry the step of their content: one of another step is never sealed."""
        if self._of_other_step(group, flight.step):
            entries = flight.writer.layout.entries
            return [entries[int(i)].name for i in group.batch.positions]
        return super()._torn(flight, group)

    def _of_other_step(self, group: Group, step: int) -> bool:
        return any(self.content.get(unit, step) != step for unit in group.holders)

    def forget(self, why: str) -> None:
        """Also what has not come to its forward."""
        self._forget_begun(why)
        super().forget(why)

    def close(self) -> None:
        """Close, and give up a snapshot that has not come to forward start."""
        self._forget_begun("closed")
        super().close()

    def _forget_begun(self, why: str) -> None:
        begun, self.begun = self.begun, None
        if begun is not None:
            self.barrier.lost(begun.flight.step, why)
            self._abandon(begun.flight)
