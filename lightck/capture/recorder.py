"""The training loop as lightck sees it: steps end, forwards begin, updates come; snapshots follow.

Implements I1-I5 over the pipeline. Runs on the training thread; `poll` may also run on a waiter's
thread, so one lock guards what both touch (the list of persisting snapshots and the slots).
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.capture.due import Due
from lightck.capture.hooks import Watched
from lightck.capture.instants import Instants
from lightck.capture.pipeline import Flight, Pipeline, Slip, torn_error
from lightck.capture.stall import Stalls
from lightck.capture.state import Collected, Inventory
from lightck.capture.steps import Steps
from lightck.errors import (
    LightckError,
    PreviousPersistError,
    RegionBusyError,
    RegionIOError,
    TornSnapshotError,
)
from lightck.events import event
from lightck.region.native import RECORD_EARLY


@dataclass(eq=False)
class Recorder:
    """Listens to one training loop and keeps its snapshots coming."""

    inventory: Inventory
    instants: Instants
    pipeline: Pipeline
    steps: Steps
    cadence: Due
    watched: Watched
    report: Callable[[LightckError], None]
    """Gives a background error to the user, as `on_error` says."""
    settled: bool
    """All optimizers of the job are known."""
    on_found: Callable[[int, Optimizer], None]
    """Called before the first step of an optimizer that was found by itself."""
    surface: Callable[[], None] = lambda: None
    """Raise an error that a waiter's thread came across, if the user wants errors raised."""
    arm: Callable[[bool], None] = lambda on: None
    """Report the next forwards, or stop."""
    on_step: Callable[[], None] = lambda: None
    """Called when a step has ended and its due snapshot is decided."""
    stalls: Stalls = field(default_factory=Stalls)
    enabled: bool = True
    """False in forked children and after detach."""
    due: bool = False
    """The last complete step gets a snapshot, not opened yet."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    wanted: list[Future[int]] = field(default_factory=list)
    """`snapshot()` calls that wait for the next boundary."""
    _gradients: int = 0
    """Gradient hooks since the last step ended: inside an iteration when > 0."""
    _ended_in: int = -1
    """The backward inside which the last step ended, with optimizers that step there."""
    latched: bool = False
    """The region takes no more snapshots, and the user knows."""
    _room_made: bool = False
    _synchronous: bool = False
    """The last snapshot was torn: the next one is copied at once."""
    _torn_once: set[str] = field(default_factory=set)
    _forward_unseen: bool = True
    """The last forward ran where no hook can see it (a compiled loop, a CUDA graph), or none has
    run yet: buffers are taken at the step's end, in case the next one goes unseen, too."""
    _warned: bool = False
    _slip: Slip | None = None  # of the last snapshot that slipped
    _buffers: list[int] | None = None
    """Version counters of the buffers when this iteration's forward began; None before it."""

    # ---- hooks -----------------------------------------------------------------------------

    def update_begins(self, optimizer: Optimizer) -> None:
        """The fence: copies of what this optimizer changes leave before it goes on."""
        index = self._index(optimizer)
        if index is None:
            return
        if not self.settled and self.steps.counts[index] > self.steps.step:
            self._settle()
        self.steps.begin(index)
        self.fence(index)

    def update_ends(self, optimizer: Optimizer) -> None:
        """A step may be complete."""
        index = self._index(optimizer)
        if index is not None and self.steps.end(index):
            self._step_ended()

    def update_skipped(self, optimizer: Optimizer) -> None:
        """The gradient scaler left the update out: the step counts all the same."""
        index = self._index(optimizer)
        if index is not None and self.steps.skipped(index):
            self._step_ended()

    def forward(self, training: bool) -> None:
        """(b) for a forward with gradients; one without gives RNG and buffers, once."""
        if not self.enabled or self.steps.updating:
            return
        with self.stalls.of("boundary"):
            if training:
                self._forward_unseen = False
                self._buffers = [buffer._version for buffer in self.inventory.buffers()]
                self.instants.forward_seen()
                self.arm(False)
                if self.due:
                    self._open()
            elif self.due:
                self.instants.before_forward(generators=True)

    def gradient(self) -> None:
        """A layer's gradient is ready."""
        if self._ended_in >= 0 and torch._C._current_graph_task_id() == self._ended_in:
            return  # the rest of the backward whose last update ended the step
        self._gradients += 1
        if not self.enabled:
            return
        if self.due and not self.steps.updating:
            self._missed_forward("a gradient hook")
        self.pipeline.tick()

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """A loader starts anew, or draws, between (a) and (b): RNG is that just before."""
        if self.enabled and not self._gradients and not self.steps.updating:
            with self.stalls.of("boundary"):
                self.instants.iterating(loader, drawing)

    # ---- the instants ----------------------------------------------------------------------

    def mark_begin(self) -> None:
        """`handle.before_update()`: the loop marks its updates itself."""
        self.steps.marked = True
        self.settled = True
        self.steps.begin(Steps.MARK)
        self.fence(None)

    def mark_end(self) -> None:
        """`handle.after_update()`."""
        if self.steps.end(Steps.MARK):
            self._step_ended()

    def start(self) -> None:
        """Take (a) for the state as it is at attach."""
        self.instants.step_ended()
        self.arm(True)

    def check_state(self, collected: Collected) -> None:
        """Show that the boundary state comes back, before training relies on it.

        Raises:
            StateError: its path is named.
        """
        self.instants.encode(collected, self.steps.step, seen=True)

    def fence(self, optimizer: int | None) -> None:
        """Wait, helping, until the copies have left what `optimizer` (None: anyone) changes."""
        if not self.enabled:
            return
        with self.stalls.of("fence"), self.lock, self._reported():
            if self.due:
                self._missed_forward("the update")
            self.pipeline.fence(optimizer)

    def _step_ended(self) -> None:
        if not self.enabled:
            return
        with self.stalls.of("step"):
            # (a) first: whatever is raised below, a later snapshot must not find the last step's.
            self._gradients, self._buffers = 0, None
            self._ended_in = torch._C._current_graph_task_id()
            with self._reported():
                self.instants.step_ended()
            self.arm(True)
            self.surface()
            self.poll()
            if not self._room_made:
                self._make_room()
            counters = self.pipeline.counters
            cost = self.stalls.total() / counters.captured if counters.captured else None
            if self.cadence.ask(self.steps.step, cost, counters.persist_s, bool(self.wanted)):
                self.due = True
                if self._forward_unseen:
                    self.instants.before_forward(generators=False)
            with self._reported():
                self.on_step()

    def _make_room(self) -> None:
        """At the end of the first step all optimizer state exists: too little space is known now.

        Raises:
            RegionFullError: whatever `on_error` says: attach would have raised it.
        """
        collected = self.inventory.collect()
        at_step, at_forward = self.instants.encode(collected, self.steps.step, seen=True)
        self.pipeline.prepare(collected.lives, len(at_step) + len(at_forward))
        self._room_made = True

    def _open(self, *, flags: int = 0, seen: bool = True, synchronous: bool = False) -> None:
        """Open the due snapshot; without a slot or the DRAM for it, it slips to a later step.

        `seen`: a forward is about to run, so that the RNG states are those of (b).
        """
        with self.lock, self._reported():
            self.due = False
            if self.pipeline.window is not None:
                self.pipeline.fence(None)
            self.poll()
            step = self.steps.step
            collected = self.instants.collect()
            at_step, at_forward = self.instants.encode(collected, step, seen=seen)
            flight = self.pipeline.open(step, collected, at_step, at_forward, flags=flags)
            if isinstance(flight, Slip):
                self._slipped(step, flight)
                return
            # What was asked for is copied at once: its future may be waited for on this thread,
            # which then never comes to the fence.
            if self._synchronous or synchronous or self.wanted:
                self._synchronous = False
                flight.futures, self.wanted = self.wanted, []
                self.pipeline.fence(None)

    def _slipped(self, step: int, why: Slip) -> None:
        self._slip = why
        self.pipeline.counters.slipped += 1
        self.cadence.overdue = True
        event("slipped", step=step, why=why)
        if self.pipeline.trace is not None:
            self.pipeline.trace.lost_snapshot("slipped", step, why)

    def _missed_forward(self, where: str) -> None:
        """No forward was seen: open here, with what is still exact."""
        self._forward_unseen = True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"lightck saw no forward of the model before {where} (compiled loop, CUDA graph?):"
                " snapshots open there, with buffers and generators as they were at the step's end",
                stacklevel=2,
            )
        with self.stalls.of("boundary"):
            self._open(seen=False)

    # ---- optimizers ------------------------------------------------------------------------

    def _index(self, optimizer: Optimizer) -> int | None:
        """Index of one of the job's optimizers; one that is new is taken in."""
        if not self.enabled:
            return None
        for i, known in enumerate(self.inventory.optimizers):
            if known is optimizer:
                return i
        self.watched.refresh()
        if not self.watched.owns(optimizer):
            return None
        return self.add_optimizer(optimizer)

    def add_optimizer(self, optimizer: Optimizer) -> int:
        """Take in an optimizer found at its first step."""
        self.inventory.optimizers.append(optimizer)
        self.inventory.invalidate()
        index = self.steps.add(late=not self._gradients)
        self._room_made = False
        self.settled = self.settled or self.inventory.covered()
        self.steps.settled = self.settled
        self.on_found(index, optimizer)
        return index

    def _settle(self) -> None:
        """An optimizer steps for the second time: whatever steps in this job has stepped."""
        self.settled = self.steps.settled = True
        self.steps.step += 1
        event("skipped", step=self.steps.step, why="the optimizers were found during it")
        self._make_room()

    # ---- results ---------------------------------------------------------------------------

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Take note of commits; errors go to `report`."""
        with self.lock, self._reported():
            for flight in self.pipeline.poll(timeout_s):
                event("committed", step=flight.step, survives=self.pipeline.region.survives)
                for future in flight.futures:
                    future.set_result(flight.step)

    def torn(self, flight: Flight, names: Sequence[str]) -> None:
        """The pipeline dropped a snapshot (I5): the next due one is copied at once."""
        step = flight.step
        self._synchronous = True
        new = [name for name in names if name not in self._torn_once]
        if len(new) < len(names):
            self.inventory.always_sync.update(self._torn_once.intersection(names))
            self.inventory.invalidate()
        self._torn_once.update(new)
        flight.fail(torn_error(names, step))
        if new:
            self.report(torn_error(new, step))

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Report errors; what follows from a latched region is counted, not told again."""
        try:
            yield
        except TornSnapshotError:
            raise  # reported where it was found
        except LightckError as error:
            if isinstance(error, PreviousPersistError) and not self.latched:
                self.poll(1.0)  # what latched the region is about to be known: told first
            self.pipeline.counters.failed += 1
            self.fail_wanted(error)
            if self.latched and isinstance(error, RegionIOError | PreviousPersistError):
                event("skipped", logging.DEBUG, step=self.steps.step, why=error)
                return
            if isinstance(error, RegionIOError | PreviousPersistError):
                self.latched = True  # for good, whatever else fails
            self.report(error)

    def fail_wanted(self, error: LightckError) -> None:
        """No snapshot will come for those who wait for one that is not open yet."""
        for future in self.wanted:
            future.set_exception(error)
        self.wanted = []

    # ---- on request ------------------------------------------------------------------------

    def can_open_now(self) -> bool:
        """The state is that of the last complete step, and no micro-batch has been seen since."""
        mixed = self.steps.updating or self.steps.between_updates
        return not mixed and not self._inside_iteration

    @property
    def _inside_iteration(self) -> bool:
        """The next iteration's forward has begun: generators and buffers may be its own."""
        return self._gradients > 0 or self._buffers is not None

    def open_now(self) -> None:
        """Declare (b) reached and copy the state of the last complete step at once.

        The generators are taken as they stand: what is drawn next comes after the snapshot.
        Waits for a slot if every one is persisting: the caller asked for it.
        """
        with self.stalls.of("request"), self.lock:
            if self.pipeline.window is not None:
                with self._reported():
                    self.pipeline.fence(None)
            if self.pipeline.busy:
                self.poll(None)
            self.instants.generators_stand()
            self._open(seen=False, synchronous=True)

    def finish_window(self) -> None:
        """Capture what is open; outside an update only."""
        with self.stalls.of("request"), self.lock, self._reported():
            if self.steps.updating:
                self.pipeline.drop()
            else:
                self.pipeline.fence(None)

    def finish_last_step(self) -> None:
        """Make sure the last complete step has a snapshot, due or not, if it can have one."""
        self.finish_window()
        counters = self.pipeline.counters
        if counters.last_captured_step == self.steps.step or not self.cadence.began:
            return
        if self.steps.updating or self.steps.between_updates:
            event("skipped", step=self.steps.step, why="an update is half done")
            return
        slipped = counters.slipped
        now = [buffer._version for buffer in self.inventory.buffers()]
        if not self._inside_iteration:
            self.open_now()
        elif (self._buffers or []) == now:
            self.poll(None)
            self._open(flags=RECORD_EARLY, seen=False, synchronous=True)
        else:
            event("skipped", step=self.steps.step, why="a forward has changed the buffers")
        if counters.slipped > slipped:
            ask = " (is a reader holding one?)" if self._slip is Slip.SLOTS else ""
            text = f"step {self.steps.step}, the last one, has no snapshot: {self._slip}{ask}"
            self.report(RegionBusyError(text))

    def open_early(self) -> None:
        """Copy the due snapshot now: (b) is still to come, so it is marked early (I2)."""
        if self.due and self.can_open_now():
            with self.stalls.of("request"):
                self._open(flags=RECORD_EARLY, seen=False, synchronous=True)
