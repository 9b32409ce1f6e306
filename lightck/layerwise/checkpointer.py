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
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightck.layerwise.ddp import final_gradients
from lightck.layerwise.updates import LayerUpdates, Unit, Units
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.stream_checkpointer import StreamCheckpointer
from lightck.pipeline.begun import BegunPipeline, BegunSnapshot
from lightck.pipeline.copy_plan import TensorReading
from lightck.pipeline.pipeline import CopyGroup, InflightSnapshot, Pipeline
from lightck.pipeline.streamed import StreamPipeline
from lightck.types import Layerwise

# ---- the pipeline: copies begin right after their own layer's update -----------------------------
# A snapshot that has begun (`pipeline/begun.py`) holds some layers of step t while others are still
# of t - 1. From forward start on each layer has its own fence.

MIXED = -1
"""The step number of a layer's content while its update runs, and for good if that failed."""


@dataclass(eq=False)
class LayerPipeline(BegunPipeline):
    """Groups and fences copies by unit instead of by optimizer.

    A unit is defined in `layerwise/updates.py`; tensors that are in none keep their optimizer.
    """

    may_copy_at_once: ClassVar[bool] = False  # copies begin behind each layer's update
    content: dict[int, int] = field(default_factory=dict)
    """The step that each unit's tensors are of, by the unit's number."""
    owners: Mapping[int, int] = field(default_factory=dict)
    """The index of each unit's optimizer, by the unit's number."""
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

    def _goes_on(self, begun: BegunSnapshot, reading: TensorReading | None, flags: int) -> bool:
        """Check that the queued copies are of the same tensors, of this step and unchanged."""
        step = begun.snapshot.step
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


# ---- the loop ------------------------------------------------------------------------------------


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
            self._ahead = self._is_due_early(step)
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

    pipeline: type[Pipeline] = StreamPipeline
    checkpointer: Callable[..., Checkpointer] = StreamCheckpointer
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
        return cls(LayerPipeline, checkpointer, updates)

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
