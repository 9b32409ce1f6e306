"""Fault injection at the phases of a training loop, between the hooks and the checkpointer."""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from lightck.config import Config
from lightck.data.lookahead import Lookahead
from lightck.failure.fault_plan import FaultPlan, process_faults
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import Listener, is_weight, untraced
from lightck.region.native_region import RECORD_JIT
from lightck.region.region import open_and_recover
from lightck.state import rng
from lightck.types import Failure

_SLOWEST = 4096  # bytes per second


def with_faults(listener: Listener, checkpointer: Checkpointer, config: Config) -> Listener:
    """Put the planned faults between the hooks of a handle and its checkpointer."""
    return Injector(listener, checkpointer, process_faults(), config)


@dataclass(eq=False)
class Injector:
    """A `Listener` that injects faults where the plan has them, and passes every call on.

    Where the loop marks its updates there are no faults at fence, commit, update and between.
    """

    listener: Listener
    checkpointer: Checkpointer
    plan: FaultPlan
    config: Config
    _calls: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of module forwards in this iteration, and in the one before."""
    _ticks: list[int] = field(default_factory=lambda: [0, 0])
    """Numbers of gradient hooks in this iteration, and in the one before."""
    _over: threading.Event = field(default_factory=threading.Event)
    """Set if what lasts is to end at once."""

    def __post_init__(self) -> None:
        """Report where the process begins, and hook events that the checkpointer is not told of."""
        checkpointer, failure = self.checkpointer, self.config.failure
        at = checkpointer.pipeline.region.place
        self.plan.events.write(
            "attaching",
            step=checkpointer.steps.step,
            world=checkpointer.pipeline.region.world,
            generators={name: _digest(state) for name, state in rng.capture().items()},
            ends_hangs=isinstance(failure, Failure) and failure.hang_exit_s is not None,
            path=at.path,
            file=at.file,
        )
        self._kinds = {"slow": self._slow, "full": self._full, "corrupt": self._corrupt}
        self._open = checkpointer.pipeline.open
        checkpointer.pipeline.open = self._open_with_faults  # type: ignore[method-assign]
        # These hooks stay for the process's life: it was started for chaos.
        register_module_forward_pre_hook(untraced(self._module_runs))

    # ---- the listener ----------------------------------------------------------------------

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Inject faults at the fence, before and after what the checkpointer does there."""
        self._reach("fence")
        self.listener.update_begins(optimizer, frame, unseen=unseen)
        self._reach("commit")

    def update_ends(self, optimizer: Optimizer) -> None:
        """Inject faults when the parameters have changed, and when the step is complete."""
        self._reach("update")
        before = self.checkpointer.steps.step
        if self._end_step(lambda: self.listener.update_ends(optimizer)):
            self._reach("between", of=before + 1)

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Pass the call on."""
        self._end_step(lambda: self.listener.update_skipped(optimizer))

    def mark_begin(self) -> None:
        """Pass the call on."""
        self.listener.mark_begin()

    def mark_end(self) -> None:
        """Pass the call on."""
        self._end_step(self.listener.mark_end)

    def _end_step(self, end: Callable[[], None]) -> bool:
        """Pass the call on, tell of the step that it has ended, and return whether it has."""
        before = self.checkpointer.steps.step
        end()
        if self.checkpointer.steps.step == before:
            return False
        self._calls, self._ticks = [0, self._calls[0]], [0, self._ticks[0]]
        self.plan.events.write("step", step=self.checkpointer.steps.step)
        return True

    def forward(self, training: bool) -> None:
        """Pass the call on; faults in the forward are injected by `_module_runs`."""
        self.listener.forward(training)

    def evaluation(self) -> None:
        """Pass the call on."""
        self.listener.evaluation()

    def gradient(self, layer: str) -> None:
        """Note a layer's gradient, and inject faults in the backward's middle.

        The first gradient of a backward queues a callback for its end.
        """
        self.listener.gradient(layer)
        if not self._ticks[0]:
            self._reach("forward")  # a single or compiled module has no middle of its forward
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._backward_ends)
        self._ticks[0] += 1
        if self._ticks[0] > self._ticks[1] // 2:
            self._reach("backward")

    def _backward_ends(self) -> None:
        """Inject faults when every gradient has come, before DDP waits for its buckets.

        This callback is queued before DDP queues its own.
        """
        self._reach("allreduce")

    def iterating(self, loader: Any, drawing: bool = False) -> None:
        """Pass the call on."""
        self.listener.iterating(loader, drawing)

    def drawn(self) -> None:
        """Pass the call on."""
        self.listener.drawn()

    def drawing_ahead(self, iterator: Lookahead) -> None:
        """Pass the call on."""
        self.listener.drawing_ahead(iterator)

    def _module_runs(self, module: nn.Module, args: Any) -> None:
        checkpointer = self.checkpointer
        if is_weight(module) or not checkpointer.enabled or not checkpointer.watched.holds(module):
            return
        if torch.is_grad_enabled() and module.training:
            self._calls[0] += 1
            # At the outermost module's call the checkpointer has not seen the forward yet.
            if self._calls[0] > max(1, self._calls[1] // 2):
                self._reach("forward")
        elif not torch.is_grad_enabled() and not self._calls[0] and not checkpointer.steps.updating:
            self._reach("evaluation", of=checkpointer.steps.step)

    def _open_with_faults(self, *arguments: Any, flags: int = 0, **more: Any) -> Any:
        """Open a snapshot; inject faults in a save, before its copies and its commit."""
        opened = self._open(*arguments, flags=flags, **more)
        if flags & RECORD_JIT and not isinstance(opened, str):
            self._reach("save", of=self.checkpointer.steps.step)
        return opened

    # ---- the faults ------------------------------------------------------------------------

    def _reach(self, phase: str, of: int | None = None) -> None:
        if self.checkpointer.enabled:
            complete = self.checkpointer.steps.step
            self.plan.reach(phase, complete + 1 if of is None else of, complete, self._kinds)

    def _slow(self) -> None:
        """Slow the medium down, by the limit that `write_limit` sets."""
        pipeline, hold_s = self.checkpointer.pipeline, self.plan.hold_s
        pipeline.pool.limit(max(_SLOWEST, int(pipeline.region.slot_bytes / hold_s)))

        def undo() -> None:
            if self.checkpointer.enabled:  # else there is no pool any more
                pipeline.pool.limit(self.config.write_limit)

        self._undo_later(undo)

    def _full(self) -> None:
        """Let files grow no more, as on a full medium; Python ignores SIGXFSZ."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = self.checkpointer.pipeline.region.info.size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        self._undo_later(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))

    def _corrupt(self) -> None:
        """Corrupt the newest snapshot, then kill the process, as if it decayed between lives."""
        if not self.checkpointer.steps.updating:
            self.checkpointer.fence(None)
        self.checkpointer.poll(
            None
        )  # snapshots under way are committed first, so that two are whole
        self.plan.events.write("flipped", **flip_bit(self.checkpointer))
        self.plan.kill()

    def _undo_later(self, undo: Callable[[], object]) -> None:
        # On a thread of its own: the training may stand in what the fault holds up.
        def work() -> None:
            self._over.wait(self.plan.hold_s)
            undo()

        threading.Thread(target=work, name="lightck-fault", daemon=True).start()


def _digest(state: Any) -> str:
    """Return a digest of the state of a random generator."""
    shown = state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
    return hashlib.blake2b(shown, digest_size=8).hexdigest()


def flip_bit(checkpointer: Checkpointer) -> dict[str, Any]:
    """Flip a bit of the largest tensor in the newest snapshot of this rank's region.

    Returns:
        The step, tensor and offset; or why nothing was flipped.
    """
    region, recovery = open_and_recover(checkpointer.pipeline.region.place)
    try:
        if not region.place.is_plain or len(recovery.candidates) < 2:
            steps = [each.record.step for each in recovery.candidates]
            return {"why": f"{region.place.file} is no file with two snapshots, steps {steps}"}
        newest = max(recovery.candidates, key=lambda each: each.record.sequence)
        largest = int(newest.layout.lengths.argmax())
        offset = int(newest.layout.offsets[largest] + newest.layout.lengths[largest] // 2)
        with region.place.file.open("r+b", buffering=0) as file:
            (byte,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte ^ 0x10]), offset)
        name = newest.layout.entries[largest].name
        return {"step": newest.record.step, "tensor": name, "offset": offset}
    finally:
        region.close()
