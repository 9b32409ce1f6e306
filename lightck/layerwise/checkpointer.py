"""The training loop when each layer is updated as soon as its gradients are final.

LightCheck's order: gradient, update, copy, per layer; the fence of a layer is before its next
update. Everything else of a snapshot keeps its instant: I2 (the two instants).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType

import torch
from torch.optim import Optimizer

from lightck.layerwise.gradients import Accumulated, Finality
from lightck.layerwise.layer_pipeline import MIXED, LayerPipeline
from lightck.layerwise.units import Unit, Units
from lightck.layerwise.updates import Updates, refuse
from lightck.loop.checkpointer import Recorder
from lightck.loop.due import Due
from lightck.pipeline.pipeline import Pipeline
from lightck.state.inventory import Inventory
from lightck.types import Layerwise, Policy


@dataclass(eq=False)
class AskedAhead(Due):
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
class LayerRecorder(Recorder):
    """Records a training loop whose layers it updates itself."""

    pipeline: LayerPipeline
    updates: Updates
    _ahead: bool = False
    """True if the step being computed is due, so that its copies may begin."""

    # ---- hooks -----------------------------------------------------------------------------

    def start(self) -> None:
        """Take the first step end, and listen for gradients."""
        super().start()
        self._arrange()

    def _arrange(self) -> None:
        """Find the units anew; `add_param_group` and `requires_grad_` change them."""
        self.updates.arrange(self)
        units = self.updates.units.all
        self.pipeline.owners = {unit.number: unit.optimizer for unit in units}
        self.pipeline.content = {unit.number: self.steps.step for unit in units}

    def come(self, parameter: torch.Tensor, *, final: bool) -> None:
        """Take note of a gradient, and update its layer if it was the last one that layer needs."""
        if not self.enabled:
            return
        updating = self.steps.updating and final
        unit = self.updates.come(parameter, inside_update=updating, final=final)
        if unit is not None:
            self._update(unit)

    def filled(self, parameter: torch.Tensor, final: torch.Tensor) -> None:
        """Check that the gradient after the backward is what its layer was updated from."""
        if self.enabled:
            self.updates.filled(parameter, final)

    def _update(self, unit: Unit) -> None:
        step = self.steps.step + 1
        self._stand_at_fence()
        if self.due:
            self._missed_forward("a layer's update")
        if not self.steps.partial:
            self.steps.partial = True
            self._ahead = self._ask(step)
        with self.stalls.of("fence"), self.lock, self.outcomes.reported():
            self.pipeline.fence(unit.number)
        self.pipeline.content[unit.number] = MIXED
        self.updates.update(unit)
        self.pipeline.content[unit.number] = step
        if self._ahead:
            self._ahead = False  # not again in this step, should it fail
            with self.stalls.of("boundary"), self.lock, self.outcomes.reported():
                if self.pipeline.begun is None:
                    self.poll()  # a commit gives a slot back
                self.pipeline.begin(step, unit.number)
                self._ahead = True

    def _ask(self, step: int) -> bool:
        counters = self.pipeline.counters
        cost = self.stalls.cost(step, counters.captured)
        due = self.cadence.ask(step, cost, counters.persist_s, bool(self.outcomes.wanted))
        return due and not self.outcomes.synchronous

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Check the loop at the user's `step()`, and update what has had no update yet."""
        self.updates.own.put_back()  # an interrupt may have kept a step from its end
        super().update_begins(optimizer, frame, unseen=unseen)
        index = self._index(optimizer)
        if index is not None:
            self.updates.own.behind_hooks(optimizer, lambda: self._complete(index))

    def fenced(self) -> None:
        """Do nothing: layers are updated before `step()`, so no instant precedes all updates."""

    def _complete(self, index: int) -> None:
        self.updates.check(index)
        if not self.updates.active:
            return
        self.steps.partial = True
        for unit in self.updates.units.all:
            if unit.optimizer == index and not self.updates.done(unit):
                self.pipeline.content[unit.number] = MIXED
        self.updates.rest(index)

    def update_ends(self, optimizer: Optimizer) -> None:
        """Take note that everything this optimizer holds is updated."""
        self.updates.own.put_back()
        super().update_ends(optimizer)

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Refuse a GradScaler, which decides on the whole step only after the backward.

        Raises:
            ConfigError: always.
        """
        if self._index(optimizer) is not None:
            raise self.updates.wrong("a GradScaler skipped a step")

    def mark_begin(self) -> None:
        """Refuse a loop that marks its updates itself: they are not the optimizers'.

        Raises:
            ConfigError: always.
        """
        raise self.updates.wrong("the loop marks its updates itself")

    def add_optimizer(self, optimizer: Optimizer) -> int:
        """Refuse an optimizer that was not known at attach.

        Raises:
            ConfigError: always.
        """
        raise self.updates.wrong(f"a {type(optimizer).__name__} was not given to attach")

    def _step_ended(self) -> None:
        self.steps.partial = self._ahead = False
        self.updates.step_ended()
        self._arrange()
        super()._step_ended()

    def go_on_from(self, step: int) -> None:
        """Go on from another step, of which every layer is now."""
        super().go_on_from(step)
        self._arrange()

    def finish_window(self) -> None:
        """Capture the open snapshot.

        Layers that were updated had their fence, the others are intact.
        """
        with self.stalls.of("request"), self.lock, self.outcomes.reported():
            self.pipeline.fence(None)


@dataclass(eq=False)
class Kinds:
    """Holds the classes that attach makes, as the setting `update` asks for."""

    pipeline: type[Pipeline] = Pipeline
    recorder: Callable[..., Recorder] = Recorder
    due: Callable[[Policy], Due] = Due
    defers: bool = True
    """True if an update may begin where its closure returns: the one given to the optimizer's
    `step`."""
    stop: Callable[[], None] = lambda: None
    """Ends what the recorder has begun besides."""

    @classmethod
    def of(
        cls,
        update: object,
        inventory: Inventory,
        boundary: bool,
        final: Callable[[], Finality] = Accumulated,
    ) -> Kinds:
        """Choose the plain classes, or the layer-wise ones; `final` makes their `Finality`.

        Raises:
            ConfigError: layer-wise update cannot be had here, and why.
        """
        if not isinstance(update, Layerwise):
            return cls()
        updates = Updates(Units(inventory), update.accumulation, final())
        refuse(updates.final, inventory, boundary=boundary)
        inventory.assign = updates.units.assign
        recorder = partial(LayerRecorder, updates=updates)
        return cls(LayerPipeline, recorder, AskedAhead, False, updates.stop)
