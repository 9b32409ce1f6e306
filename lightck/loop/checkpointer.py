"""Follows the training loop: steps end, forwards begin, updates come; snapshots follow them.

Decides when the pipeline does what keeps these: I1 (when a step is complete), I2 (the two
instants), I3 (window and fence), I4 (captured before the forward) and I5 (never commit a torn
snapshot). Runs on the training thread; what becomes of the snapshots is for `Outcomes`, whose lock
guards what a waiter's thread touches, too. A save that ends the process pauses the loop here.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.data.lookahead import Lookahead
from lightck.data.prefetched import Prefetched
from lightck.errors import StateError
from lightck.events import event
from lightck.journal.boundary_state import BoundaryState
from lightck.journal.device_lag import DeviceLag
from lightck.journal.pre_fence import PreFencePredictor
from lightck.journal.step_journal import BoundaryCapture, StepJournal
from lightck.loop.due import DueCheck, Measured
from lightck.loop.extra_movement import Movement
from lightck.loop.hooks import Hooks, Watched
from lightck.loop.outcomes import Outcomes
from lightck.loop.publisher import StallTimer, StatusPublisher
from lightck.loop.steps import Steps
from lightck.pipeline.commit_barrier import is_final
from lightck.pipeline.pipeline import Pipeline
from lightck.reader.fill import SavedOptimizer, install_pending
from lightck.state import data_loaders
from lightck.state.inventory import CollectedState, Inventory, refuse_twins

# ---- a pause of training, while a save that ends the process runs --------------------------------
# A single rank is paused at its fence: of what it would go on to compute, nothing is saved any
# more. Several are paused at the start of a forward, where each has made the update that another
# may have made already: all ranks are at the same step then.

_LOOK_S = 0.05
"""Seconds of one wait: handlers on the main thread run in between, whatever locks do here."""


@dataclass(eq=False)
class TrainingPause:
    """Pause of the training thread, begun and ended by the thread that has the state saved."""

    at_fence: bool = False
    until_s: float = 0.0
    """Time (`time.monotonic`) at which the pause ends in any case."""
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Begin without a pause."""
        self._over.set()

    def begin(self, until_s: float, *, at_fence: bool) -> None:
        """Pause the training thread at its next fence, or forward if not `at_fence`. Any thread."""
        self.at_fence, self.until_s = at_fence, until_s
        self._over.clear()

    def end(self) -> None:
        """End the pause. Any thread."""
        self._over.set()

    def wait_if_paused(self, *, fence: bool) -> None:
        """Wait while paused here. For the training thread, which holds no lock of lightck's."""
        while fence == self.at_fence and not self._over.is_set():
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                return
            self._over.wait(min(left_s, _LOOK_S))


# ---- the loop ------------------------------------------------------------------------------------

_OTHERS = 100
"""Updates of other parameters after which it is told that the model's own have had none."""


@dataclass(eq=False)
class Checkpointer:
    """Listens to one training loop and opens, fences and seals its snapshots."""

    inventory: Inventory
    boundary_state: BoundaryState
    pipeline: Pipeline
    steps: Steps
    due_check: DueCheck
    watched: Watched
    outcomes: Outcomes
    hooks: Hooks
    publisher: StatusPublisher
    stall_timer: StallTimer
    movement: Movement
    """The check for extras that change from a step's end to the next forward."""
    pending: list[SavedOptimizer]
    """State that restore has kept for optimizers that are found when they first step."""
    step_journal: StepJournal | None = None
    """The boundary state of every step, kept while the failure path is armed; else None."""
    device_lag: DeviceLag | None = None
    """The states that devices still have, while the failure path is armed; else None."""
    predictor: PreFencePredictor | None = None
    """Says when all gradients of an iteration have come; None with a single rank."""
    pause: TrainingPause = field(default_factory=TrainingPause)
    """Pauses training while a thread that will end the process saves."""
    ticks: int = 0
    """A counter that moves with every hook, which shows that training makes progress."""
    thread: int = field(default_factory=threading.get_ident)
    """The id of the training thread, as far as the hooks have seen it."""
    enabled: bool = True
    """True but in forked children and after detach."""
    due: bool = False
    """True if the last complete step gets a snapshot that is not opened yet."""
    _gradients: int = 0
    """The number of gradient hooks since the last step ended; > 0 inside an iteration."""
    _ended_in: int = -1
    """The id of the backward inside which the last step ended, if optimizers step in it; else
    -1."""
    _room_made: bool = False
    forward_unseen: bool = True
    """True if the last forward ran where no hook can see it (a compiled loop, a CUDA graph), or if
    none has run yet: buffers are then taken at the step's end, in case the next one goes unseen,
    too."""
    _warned: bool = False
    _others: int = 0
    """Updates by optimizers of other parameters."""
    buffers: list[int] | None = None
    """The buffers' version counters when this forward began, empty if their values are kept; None
    before the forward."""

    @property
    def lock(self) -> threading.RLock:
        """The lock that guards what a waiter's thread uses, too."""
        return self.pipeline.lock

    def stop(self) -> None:
        """Do nothing at hooks from now on: detached, or in a forked child."""
        self.enabled = False

    # ---- hooks -----------------------------------------------------------------------------

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Fence an update: wait until what this optimizer changes has been copied."""
        index = self._index(optimizer)
        if index is None:
            self._tell_of_others(optimizer)
            return
        self._tick()
        if not self.steps.settled and self.steps.counts[index] > self.steps.step:
            with self.lock:  # a save changes the copy plan, too
                self._settle()
        if unseen:
            self.outcomes.drop_for_unseen_update(due=self.due)
            self.due = False
        else:
            self._stand_at_fence()
        self._begin(index, frame, seen=not unseen)

    def _begin(self, who: int, frame: FrameType | None = None, *, seen: bool = True) -> None:
        first = not self.steps.between_updates
        outermost = self.steps.begin(who, frame)
        self.fence(None if who == Steps.MARK else who)
        if first and outermost:
            self.fenced()
        if outermost and self.enabled and self.device_lag is not None and self.pipeline.on_devices:
            with self.stall_timer.of("fence"), self.lock:
                self.device_lag.update_begins(self.steps.step, first=first, seen=seen)

    def update_ends(self, optimizer: Optimizer) -> None:
        """Take note that an update has ended; a step may be complete."""
        index = self._index(optimizer)
        self._tick()
        if index is not None:
            with self.lock:  # no save may see a new step with the old one's boundary state
                if self.steps.end(index):
                    self._step_ended()

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Take note that the gradient scaler left an update out: the step counts all the same."""
        index = self._index(optimizer)
        if index is not None:
            with self.lock:
                if self.steps.skipped(index):
                    self._step_ended()

    def forward(self, training: bool) -> None:
        """Take forward start if gradients are on; else RNG states and buffers, once."""
        if not self.enabled or self.steps.updating:
            return
        self._tick()
        # A save on another thread takes buffers as they are before the forward, or as kept here.
        with self.stall_timer.of("boundary"), self.lock:
            if training:
                self.forward_unseen = False
                self.boundary_state.forward_seen()
                self.hooks.disarm_forward()
                self._window_begins(seen=True)
            elif self.due or self.step_journal is not None:
                self.boundary_state.capture_before_forward(generators=True)
        if training:
            self.pause.wait_if_paused(fence=False)

    def evaluation(self) -> None:
        """Do nothing: what an evaluation reads is as it was."""

    def _window_begins(self, *, seen: bool) -> None:
        """Keep the state at forward start, seen or missed, and open the due snapshot."""
        if self.movement.extras:
            self.movement.forward(self.steps.step)
        kept = None
        if self.step_journal is None:
            self.buffers = [buffer._version for buffer in self.inventory.buffers()]
        else:
            self.buffers = []
            kept = self.step_journal.forward_started(self.steps.step, seen=seen, full=self.due)
        if self.due:
            self.open(kept, seen=seen)

    def gradient(self, layer: str) -> None:
        """Take note that a layer's gradient is ready, and let more copies run."""
        if not self.enabled:
            return
        # Not in the rest of the backward whose last update ended the step.
        if self._ended_in < 0 or torch._C._current_graph_task_id() != self._ended_in:
            self._release_more()
        if self.predictor is not None and (last := self.predictor.gradient()) is not None:
            self._pre_fence(last)

    def _release_more(self) -> None:
        self._gradients += 1
        self.ticks += 1  # on a GPU by autograd's own thread
        unkept = self.step_journal is not None and self.buffers is None
        if (self.due or unkept) and not self.steps.updating:
            self._missed_forward("a gradient hook")
        if self.pipeline.window is not None:
            self.pipeline.pace(self.pipeline.schedule.tick)

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """Take RNG states where a loader starts anew, or draws, from step end to forward start."""
        self._look(loader, drawing)
        if (
            isinstance(loader, Prefetched)
            and self.forward_unseen
            and self.boundary_state.steps_ended
        ):
            return  # whether the forward has begun cannot be told
        if not isinstance(loader, Lookahead):  # what draws ahead is followed, and draws at any time
            self.boundary_state.draws.iterating(drawing=drawing, inside=self.inside)
        if self.enabled and not self.inside and not self.steps.updating:
            self._tick()
            with self.stall_timer.of("boundary"), self.lock:
                taken = self.boundary_state.iterating(loader, drawing)
                if taken and self.step_journal is not None and self.buffers is None:
                    self.step_journal.step_ended(self.steps.step)

    def _look(self, loader: Any, drawing: bool) -> None:
        """Note the extras before a draw, or that there is none."""
        ahead = isinstance(loader, Prefetched) or data_loaders.running() is not None
        within = isinstance(loader, Prefetched) and self.inside
        if self.enabled and (within or not (self.inside or self.steps.updating)):
            with self.stall_timer.of("boundary"), self.lock:
                if drawing:
                    self.movement.drawing(loader, ahead=ahead, within=within)
                else:
                    self.movement.drawing_none()

    def drawn(self) -> None:
        """Take note that a batch has been drawn, with or without an error."""
        if self.enabled:
            try:
                with self.stall_timer.of("boundary"), self.lock:
                    self.movement.drawn(self.steps.step)
            except StateError as error:
                self.boundary_state.refuse(error)
                raise

    def drawing_ahead(self, iterator: Lookahead) -> None:
        """Take note that a loader draws a batch ahead of the one that it gives."""
        if self.enabled:
            if self.boundary_state.follows_step_end(iterator):
                self.iterating(iterator, drawing=True)
            with self.stall_timer.of("boundary"), self.lock:
                self.boundary_state.note_draw_ahead(iterator)

    # ---- the instants ----------------------------------------------------------------------

    def mark_begin(self) -> None:
        """Begin an update that the loop marks itself: `handle.before_update()`."""
        self.steps.mark_updates()
        self._stand_at_fence()
        self._begin(Steps.MARK)

    def mark_end(self) -> None:
        """End an update that the loop marks itself: `handle.after_update()`."""
        with self.lock:
            if self.steps.end(Steps.MARK):
                self._step_ended()

    def start(self) -> None:
        """Take the state at attach as that of a step end."""
        with self.lock:
            self._take_step_end()
        self.hooks.arm_forward()

    def _take_step_end(self) -> None:
        if self.step_journal is not None:
            self.step_journal.forget(self.steps.step)
        self.boundary_state.step_ended(self.steps.step)
        if self.step_journal is not None:
            self.step_journal.step_ended(self.steps.step)

    def forget(self) -> None:
        """Forget the last step: nothing of it can be saved any more. Call it under the lock."""
        self.due = False
        self.outcomes.last_step_lost("the state was replaced")
        self.boundary_state.forget()
        self.movement.forget()
        if self.step_journal is not None:
            self.step_journal.forget(self.steps.step)
        if self.device_lag is not None:
            self.device_lag.forget()

    def go_on_from(self, step: int) -> None:
        """Go on from `step`, by whose state the live one has been replaced. Call it under the lock.

        Inside an iteration the boundary state of `step` is not known: the next step is the first to
        be saved.
        """
        self.steps.go_on_from(step)
        self.due_check.go_on_from(step)
        self.forget()
        if not self.inside:
            with self.outcomes.reported():
                self._take_step_end()
            self.hooks.arm_forward()
            # Asked for at the step that ended before: it waits for the next boundary still.
            self.due = bool(self.outcomes.wanted) and self.pipeline.barrier.request(step)

    def check_state(self, collected: CollectedState) -> None:
        """Show that the boundary state can be restored, before training relies on it.

        Raises:
            StateError: its path is named.
        """
        refuse_twins(collected.lives)
        self.boundary_state.encode(collected, self.steps.step, seen=True)

    def fence(self, optimizer: int | None) -> None:
        """Wait, and help, until what `optimizer` (None: any) will change has been copied."""
        if not self.enabled:
            return
        with self.stall_timer.of("fence"), self.lock, self.outcomes.reported():
            if self.due:
                self._missed_forward("the update")
            self.outcomes.fence(optimizer)

    def _stand_at_fence(self) -> None:
        """Pause here while a save is to end the process: the update that comes would be lost."""
        kept = self.step_journal
        # A save waits for the end of an update that has begun, and for a kept boundary state.
        if kept is not None and not self.mixed and kept.step == self.steps.step:
            self.pause.wait_if_paused(fence=True)

    def fenced(self) -> None:
        """Record, with other ranks, that the iteration's first update is about to begin."""
        kept = self.step_journal
        if self.enabled and self.steps.settled and kept is not None and self.predictor is not None:
            with self.stall_timer.of("fence"), self.lock:
                kept.record_fence(self.steps.step + 1)

    # ---- an entry before the fence: other ranks may make the update that this one does not make --

    def _pre_fence(self, complete: bool) -> None:
        """Write the pre-fence journal entry, as all gradients of the iteration seem to have come.

        Not `complete`: one more has come after all, and the entry is voided. A rank that is killed
        from here on has its part in the allreduce, and its peers make the update. On autograd's
        thread.
        """
        with self.lock, self.stall_timer.of("fence"):
            if self.step_journal is not None and self.steps.settled and not self.mixed:
                if complete:
                    self.step_journal.write_pre_fence(self.steps.step + 1)
                else:
                    self.step_journal.void_pre_fence(self.steps.step + 1)

    def iteration_left(self, error: BaseException) -> None:
        """Write or void the pre-fence journal entry when an exception leaves the iteration."""
        kept, here = self.step_journal, threading.get_ident() == self.thread
        if not (here and self.inside) or self.mixed or kept is None or self.predictor is None:
            return
        if self.predictor.is_state_of_fence(error):
            self.fenced()
        else:
            with self.lock:
                kept.void_pre_fence(self.steps.step + 1)

    def thread_stuck(self) -> None:
        """Write or void the pre-fence journal entry when the training thread is stuck.

        Under the lock; any thread. If the training goes on after all, its fence writes what has
        changed.
        """
        kept, frame = self.step_journal, sys._current_frames().get(self.thread)
        if not (self.enabled and self.steps.settled and self.inside) or self.mixed:
            return
        if kept is None or self.predictor is None or frame is None:
            return
        if self.predictor.is_state_of_fence(frame):
            kept.write_pre_fence(self.steps.step + 1)
        else:
            kept.void_pre_fence(self.steps.step + 1)

    def _step_ended(self) -> None:
        """Take step end, and ask whether it gets a snapshot. Called under the lock."""
        if not self.enabled:
            return
        with self.stall_timer.of("step"):
            # Step end first: whatever is raised below, a later snapshot must not find the old one.
            self._gradients, self.buffers = 0, None
            self._ended_in = torch._C._current_graph_task_id()
            with self.outcomes.reported():
                self._take_step_end()
            if self.movement.extras:
                self.movement.step_ended()
            self.hooks.arm_forward()
            self.outcomes.tell_troubles()
            self.outcomes.reporter.surface()
            self.poll()
            if not self._room_made:
                self._make_room()
            if self.is_due(self.steps.step):
                self.due = True
                if self.forward_unseen:
                    self.boundary_state.capture_before_forward(generators=False)
            with self.outcomes.reported():
                self.publisher.step_ended()

    def is_due(self, step: int) -> bool:
        """Ask whether a step gets a snapshot: one that ends now, or that an update begins."""
        counters = self.pipeline.counters
        measured = Measured(
            stalled_s=self.stall_timer.total(),
            stall_s=self.stall_timer.cost(step, counters.captured),
            persist_s=counters.persist_s,
            captured=counters.captured,
            saved_step=counters.last_committed_step,
            in_flight=self.pipeline.window is not None or bool(self.pipeline.in_flight),
        )
        return self.due_check.ask(step, measured, bool(self.outcomes.wanted))

    def _make_room(self) -> None:
        """Plan room for snapshots at the end of the first step: all optimizer state exists then.

        Raises:
            RegionFullError: whatever `on_error` says: attach would have raised it.
        """
        collected = self.inventory.collect()
        at_step, at_forward = self.boundary_state.encode(collected, self.steps.step, seen=True)
        self.pipeline.prepare(collected.lives, len(at_step) + len(at_forward), self.steps.step)
        self._room_made = True

    def open(
        self,
        kept: BoundaryCapture | None = None,
        *,
        flags: int = 0,
        seen: bool = True,
        synchronous: bool = False,
    ) -> None:
        """Open the due snapshot; without a slot or DRAM for it, it is skipped (slips).

        Args:
            kept: the forward start, where it has just been taken already.
            flags: of the record.
            seen: a forward is about to run, so that the RNG states are those of forward start.
            synchronous: copy everything before this returns.
        """
        with self.lock, self.outcomes.reported():
            self.due = False
            step, barrier, outcomes = self.steps.step, self.pipeline.barrier, self.outcomes
            try:
                if self.pipeline.window is not None:
                    self.outcomes.fence()
                self.poll(self.pipeline.lag_wait_s())
                reading = None
                if kept is not None:
                    collected, trees = kept.collected, (kept.step_end_values, kept.forward_values)
                    reading = kept.reading
                else:
                    collected = self.boundary_state.collect()
                    trees = self.boundary_state.trees(collected, step, seen=seen)
                at_step, at_forward = self.boundary_state.encode_trees(*trees)
                snapshot = self.pipeline.open(
                    step, collected, at_step, at_forward, flags=flags, reading=reading
                )
                if isinstance(snapshot, str):
                    outcomes.slipped(step, snapshot)
                    self.due_check.skipped(made_up=barrier.alone)
                    return
                outcomes.slips.note(step, None)
                outcomes.opened(step, self.due_check.epochs.marked)
                barrier.sample(step)
                # What was asked for is copied at once: its future may be waited for on this
                # thread, which then never comes to the fence.
                at_once = outcomes.take_over_wanted(snapshot)
                if at_once or synchronous or snapshot.captured:
                    outcomes.fence()
            except BaseException as error:
                barrier.lost(step, f"failed: {error}", for_good=is_final(error))
                raise

    def _missed_forward(self, where: str) -> None:
        """Open the due snapshot here, with what is still exact: no forward was seen."""
        self.forward_unseen = True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"lightck saw no forward of the model before {where} (compiled loop, CUDA graph,"
                " functional_call?): snapshots open there, with buffers and generators as they were"
                " at the step's end",
                stacklevel=2,
            )
        with self.stall_timer.of("boundary"), self.lock:
            if self.step_journal is not None and self.step_journal.step_end is not None:
                self.boundary_state.forward_missed(self.step_journal.step_end.copies)
            self._window_begins(seen=False)

    # ---- optimizers ------------------------------------------------------------------------

    def _index(self, optimizer: Optimizer) -> int | None:
        """Return the index of one of the job's optimizers, adding it if it is new; else None."""
        if not self.enabled:
            return None
        for i, known in enumerate(self.inventory.optimizers):
            if known is optimizer:
                return i
        self.watched.refresh()
        if not self.watched.owns(optimizer):
            return None
        return self.add_optimizer(optimizer)

    def _tell_of_others(self, optimizer: Optimizer) -> None:
        """Tell, once, that others step and this model's optimizers have not: it may be another."""
        self._others += 1
        if self.enabled and self._others == _OTHERS and not self.due_check.began:
            event(
                "no_step_seen",
                logging.WARNING,
                why=f"{type(optimizer).__name__} has made {_OTHERS} updates, of parameters that the"
                " model given to attach has not, and none of that model's was seen: nothing is"
                " saved. Attach again if the model or its optimizer was made anew (a notebook's"
                " cell); give attach an optimizer over tensors that are in no module",
            )

    def add_optimizer(self, optimizer: Optimizer) -> int:
        """Add an optimizer that was found at its first step."""
        self.inventory.optimizers.append(optimizer)
        self.inventory.invalidate()
        index = self.steps.add(late=not self._gradients)
        self._room_made = False
        if self.inventory.covered():
            self.steps.settle()
        install_pending(self.pending, index, optimizer, self.inventory.names())
        return index

    def _settle(self) -> None:
        """Take note that all optimizers are known: one steps for the second time.

        The step in which they were found has no snapshot.
        """
        self.steps.settle(during_step=True)
        event("skipped", step=self.steps.step, why="the optimizers were found during it")
        self._make_room()

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Take note of commits and aborts. Any thread."""
        self.outcomes.poll(timeout_s)

    def note_progress(self) -> None:
        """Note that training goes on, seen by no hook: a hang counts from here. Any thread."""
        self.ticks += 1

    def _tick(self) -> None:
        self.ticks += 1
        self.thread = threading.get_ident()

    # ---- on request, see `requests` --------------------------------------------------------

    def can_open_now(self) -> bool:
        """Tell whether the live state is that of the last complete step, with no forward since."""
        return not self.mixed and not self.inside and self.boundary_state.step == self.steps.step

    @property
    def mixed(self) -> bool:
        """True if some parameters are updated and others not, so that the state is of no step."""
        return self.steps.updating or self.steps.between_updates

    @property
    def inside(self) -> bool:
        """True if the next iteration's forward has begun: generators and buffers may be its own."""
        return self._gradients > 0 or self.buffers is not None

    def make_due(self) -> bool:
        """Make the last complete step due, if it can be; return whether it is, or was before."""
        if self.due:
            return True
        if not (self.can_open_now() and self.pipeline.barrier.request(self.steps.step)):
            return False
        self.due = True
        if self.forward_unseen:
            self.boundary_state.capture_before_forward(generators=False)
        return True

    def finish_window(self) -> None:
        """Capture what is open; inside an update, drop it."""
        with self.stall_timer.of("request"), self.lock, self.outcomes.reported():
            if self.steps.updating:
                self.pipeline.drop()
            else:
                self.outcomes.fence()
