"""The training loop when each layer is updated as soon as its gradients are final.

LightCheck's order: gradient, update, copy, per layer; the fence of a layer is before its next
update. A layer's copies begin right behind its own update (`LayerPipeline`). Everything else of a
snapshot keeps its instant: I2 (the two instants).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from lightck.layerwise.ddp import final_gradients
from lightck.layerwise.updates import LayerUpdates, Unit, Units
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.due import DueCheck
from lightck.pipeline.copy_plan import PlannedGroup, TensorReading
from lightck.pipeline.pipeline import Check, CopyGroup, InflightSnapshot, Pipeline
from lightck.region.native_region import RECORD_JIT
from lightck.region.slot_writer import SlotWriter
from lightck.state.inventory import CollectedState
from lightck.tracing.trace import now_ns
from lightck.types import Layerwise

# ---- the pipeline: copies begin right after their own layer's update -----------------------------
# A snapshot that has *begun* holds some layers of step t while others are still of t - 1. At
# forward start everything is of step t, and the snapshot is opened in the ordinary way: what was
# not copied by then is queued; if anything changed in between, the whole snapshot is captured
# there. From then on each layer has its own fence.

MIXED = -1
"""The step number of a layer's content while its update runs, and for good if that failed."""


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
class LayerPipeline(Pipeline):
    """Groups and fences copies by unit instead of by optimizer.

    A unit is defined in `layerwise/updates.py`; tensors that are in none keep their optimizer.
    """

    may_copy_at_once: ClassVar[bool] = False  # copies begin behind each layer's update
    content: dict[int, int] = field(default_factory=dict)
    """The step that each unit's tensors are of, by the unit's number."""
    owners: Mapping[int, int] = field(default_factory=dict)
    """The index of each unit's optimizer, by the unit's number."""
    begun: BegunSnapshot | None = None
    changed_late: set[int] = field(default_factory=set)
    """Units that the loop changes after their update: their copies begin at forward start."""
    _warned: bool = False

    def set_units(self, owners: Mapping[int, int], step: int) -> None:
        """Take the units' optimizers, by the unit's number; all tensors are of `step`."""
        self.owners, self.content = owners, dict.fromkeys(owners, step)

    def update_begins(self, unit: int) -> None:
        """Note that a unit's tensors are of no step until its update has ended."""
        self.content[unit] = MIXED

    def update_ends(self, unit: int, step: int) -> None:
        """Note that a unit's tensors are of `step`."""
        self.content[unit] = step

    def begin(self, step: int, unit: int) -> None:
        """Queue the copies of one layer, which is at `step` now; the first one opens the snapshot.

        Does nothing when that is not possible: what is not queued here is queued at forward start.
        """
        assert self.content.get(unit) == step, (unit, self.content.get(unit), step)
        if unit in self.changed_late or (self.begun is None and not self._begin(step)):
            return
        begun = self.begun
        assert begun is not None and begun.snapshot.step == step
        for k, part in enumerate(begun.parts):
            early = not part.is_private and part.device is None
            if part.holders == {unit} and early and k not in begun.queued:
                group = self._queue(begun.snapshot, part, begun.staged)
                begun.queued[k] = group
                begun.snapshot.writer.release(group.batch)

    def _begin(self, step: int) -> bool:
        """Take a slot with the last snapshot's plan, without looking through the live state."""
        plan = self.copy_plan.allocation
        if plan is None or not self.copy_plan.groups:
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
        snapshot = InflightSnapshot(step, writer, b"", b"", 0)
        self.begun = BegunSnapshot(snapshot, self.copy_plan.groups, np.zeros(0, np.bool_))
        self.begun.staged = self._choose_staged(snapshot, self.copy_plan)
        return True

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
            goes_on = plan is begun.snapshot.writer.plan and self._is_unchanged(begun, step)
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
            for k, part in enumerate(begun.parts):
                if k not in begun.queued:
                    self._queue(snapshot, part, begun.staged)
            if snapshot.transfers:
                self.offload.start(snapshot.transfers)
        except BaseException as error:
            self.drop(f"failed: {error}")
            raise
        held = snapshot.count_held()
        self.schedule.open(held)
        self._release(snapshot, held)
        return snapshot

    def _is_unchanged(self, begun: BegunSnapshot, step: int) -> bool:
        """Check that the queued copies are of the same tensors, of this step and unchanged."""
        if begun.parts is not self.copy_plan.groups or begun.snapshot.step != step:
            return False
        changed: list[str] = []
        for k, group in begun.queued.items():
            part, sources = begun.parts[k], group.sources
            assert sources is not None, "captured before forward start"
            live = [self.copy_plan.tensors[i] for i in part.order]
            if not all(map(operator.is_, live, sources.tensors)) or self._of_other_step(
                group, step
            ):
                return False
            moved = sources.changed()
            if moved:
                self.changed_late.update(part.holders)
                changed += [self.copy_plan.entries[part.order[i]].name for i in moved]
        if changed and not self._warned:
            self._warned = True
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            warnings.warn(
                f"{changed[0]}{more} changed between its layer's update and the next forward"
                " (weight clipping, EMA?): the copies of these layers begin at the forward from"
                " now on; nothing was lost",
                stacklevel=2,
            )
        return not changed

    def _concerns(self, group: CopyGroup, optimizer: int | None) -> bool:
        """Tell whether a group belongs to the fence of a unit, or of an optimizer and its units."""
        if optimizer in self.owners:
            return optimizer in group.holders
        mine = any(self.owners.get(unit) == optimizer for unit in group.holders)
        return mine or super()._concerns(group, optimizer)

    def _torn(self, snapshot: InflightSnapshot, group: CopyGroup) -> list[str]:
        """Name the tensors that are torn; a layer with another step's content counts as torn."""
        if self._of_other_step(group, snapshot.step):
            entries = snapshot.writer.layout.entries
            return [entries[int(i)].name for i in group.batch.positions]
        return super()._torn(snapshot, group)

    def _of_other_step(self, group: CopyGroup, step: int) -> bool:
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
            self.barrier.lost(begun.snapshot.step, why)
            self._abandon(begun.snapshot)


# ---- the loop ------------------------------------------------------------------------------------


@dataclass(eq=False)
class EarlyDueCheck(DueCheck):
    """Asks the policy, once a step, when the first layer is updated: copies can begin then."""

    _answer: tuple[int, bool] | None = None

    def go_on_from(self, step: int) -> None:
        """Go on from another step, and forget the answer that was given for the last one."""
        super().go_on_from(step)
        self._answer = None

    def ask(self, step: int, cost_s: float | None, persist_s: float | None, wanted: bool) -> bool:
        """Repeat the answer given for this step, if any; what has become due since counts, too."""
        if self._answer is not None and self._answer[0] == step:
            due = self._answer[1] or self.overdue or (wanted and self.barrier.request(step))
            self.overdue = False
            return due
        due = super().ask(step, cost_s, persist_s, wanted)
        self._answer = (step, due)
        return due


@dataclass(eq=False, kw_only=True)
class LayerCheckpointer(Checkpointer):
    """The checkpointer of a training loop whose layers it updates itself."""

    pipeline: LayerPipeline
    updates: LayerUpdates
    _ahead: bool = False
    """True if the step being computed is due, so that its copies may begin."""

    # ---- hooks -----------------------------------------------------------------------------

    def start(self) -> None:
        """Take the first step end, and listen for gradients."""
        super().start()
        self._find_units()

    def _find_units(self) -> None:
        """Find the units anew; `add_param_group` and `requires_grad_` change them."""
        if self.updates.find_units(self):
            self.inventory.invalidate()
        units = self.updates.units.all
        self.pipeline.set_units({unit.number: unit.optimizer for unit in units}, self.steps.step)

    def gradient_added(self, parameter: torch.Tensor, *, final: bool) -> None:
        """Take note of a gradient, and update its layer if it was the last one that layer needs."""
        if not self.enabled:
            return
        updating = self.steps.updating and final
        unit = self.updates.gradient_added(parameter, inside_update=updating, final=final)
        if unit is not None:
            self._update(unit)

    def gradient_placed(self, parameter: torch.Tensor, final: torch.Tensor) -> None:
        """Check that the gradient after the backward is what its layer was updated from."""
        if self.enabled:
            self.updates.gradient_placed(parameter, final)

    def _update(self, unit: Unit) -> None:
        step = self.steps.step + 1
        self._stand_at_fence()
        if self.due:
            self._missed_forward("a layer's update")
        if self.steps.layer_updated():
            self._ahead = self._ask(step)
        with self.stall_timer.of("fence"), self.lock, self.outcomes.reported():
            self.outcomes.fence(unit.number)
        self.pipeline.update_begins(unit.number)
        self.updates.update(unit)
        self.pipeline.update_ends(unit.number, step)
        if self._ahead:
            self._ahead = False  # not again in this step, should it fail
            with self.stall_timer.of("boundary"), self.lock, self.outcomes.reported():
                if self.pipeline.begun is None:
                    self.poll()  # a commit gives a slot back
                self.pipeline.begin(step, unit.number)
                self._ahead = True

    def _ask(self, step: int) -> bool:
        counters = self.pipeline.counters
        cost = self.stall_timer.cost(step, counters.captured)
        due = self.due_check.ask(step, cost, counters.persist_s, bool(self.outcomes.wanted))
        return due and not self.outcomes.synchronous

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Check the loop at the user's `step()`, and update what has had no update yet."""
        self.updates.step_hooks.put_back()  # an interrupt may have kept a step from its end
        super().update_begins(optimizer, frame, unseen=unseen)
        index = self._index(optimizer)
        if index is not None:
            self.updates.step_hooks.behind_hooks(optimizer, lambda: self._complete(index))

    def fenced(self) -> None:
        """Do nothing: layers are updated before `step()`, so no instant precedes all updates."""

    def _complete(self, index: int) -> None:
        self.updates.check(index)
        if not self.updates.active:
            return
        self.steps.layer_updated()
        for unit in self.updates.units.all:
            if unit.optimizer == index and not self.updates.is_updated(unit):
                self.pipeline.update_begins(unit.number)
        self.updates.update_rest(index)

    def update_ends(self, optimizer: Optimizer) -> None:
        """Take note that everything this optimizer holds is updated."""
        self.updates.step_hooks.put_back()
        super().update_ends(optimizer)

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Refuse a GradScaler, which decides on the whole step only after the backward.

        Raises:
            ConfigError: always.
        """
        if self._index(optimizer) is not None:
            raise self.updates.misuse("a GradScaler skipped a step")

    def mark_begin(self) -> None:
        """Refuse a loop that marks its updates itself: they are not the optimizers'.

        Raises:
            ConfigError: always.
        """
        raise self.updates.misuse("the loop marks its updates itself")

    def add_optimizer(self, optimizer: Optimizer) -> int:
        """Refuse an optimizer that was not known at attach.

        Raises:
            ConfigError: always.
        """
        raise self.updates.misuse(f"a {type(optimizer).__name__} was not given to attach")

    def _step_ended(self) -> None:
        self._ahead = False
        self.updates.step_ended()
        self._find_units()
        super()._step_ended()

    def go_on_from(self, step: int) -> None:
        """Go on from another step, of which every layer is now."""
        super().go_on_from(step)
        self._find_units()

    def finish_window(self) -> None:
        """Capture the open snapshot.

        Layers that were updated had their fence, the others are intact.
        """
        with self.stall_timer.of("request"), self.lock, self.outcomes.reported():
            self.outcomes.fence()


@dataclass(frozen=True, eq=False)
class LoopClasses:
    """The classes that attach makes, as the setting `update` asks for."""

    pipeline: type[Pipeline] = Pipeline
    checkpointer: Callable[..., Checkpointer] = Checkpointer
    due: type[DueCheck] = DueCheck
    updates: LayerUpdates | None = None
    """The updates of single layers; None if optimizers update as the loop calls them."""

    @classmethod
    def chosen(
        cls, update: object, model: nn.Module, optimizers: list[Optimizer], *, boundary: bool
    ) -> LoopClasses:
        """Choose the plain classes, or the layer-wise ones.

        Raises:
            ConfigError: layer-wise update cannot be had here, and why.
        """
        if not isinstance(update, Layerwise):
            return cls()
        final = final_gradients(model)
        updates = LayerUpdates(Units(model, optimizers), update.accumulation, final)
        updates.refuse(boundary=boundary)
        checkpointer = partial(LayerCheckpointer, updates=updates)
        return cls(LayerPipeline, checkpointer, EarlyDueCheck, updates)

    @property
    def units(self) -> Units | None:
        """Return what assigns tensors to the units that are updated alone; None: nothing does."""
        return None if self.updates is None else self.updates.units

    @property
    def defers(self) -> bool:
        """Tell whether an update may begin where the closure that `step` was given returns."""
        return self.updates is None

    def stop(self) -> None:
        """End the updates of single layers."""
        if self.updates is not None:
            self.updates.stop()
