"""The training loop when its optimizer's update may write the snapshot itself (`lightck.optim`).

The policy is asked as the update begins, not when it has ended. Of a loop with one such optimizer a
due step's update streams; everything else of a snapshot keeps its instant: I2 (the two instants).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from lightck.events import event
from lightck.loop.checkpointer import Checkpointer
from lightck.optim.optimizers import SGD, Adam, AdamW, NativeOptimizer
from lightck.pipeline.placement import dram_rate
from lightck.pipeline.streamed import StreamPipeline

_NATIVE: dict[type[Optimizer], type[NativeOptimizer]] = {
    kind.torch_class: kind for kind in (AdamW, Adam, SGD)
}
_WORTH_TELLING_BYTES = 64 << 20
"""Smaller states are copied in less time than the telling is read."""
_SAMPLE_BYTES = 4 << 20


@dataclass(eq=False, kw_only=True)
class StreamCheckpointer(Checkpointer):
    """The checkpointer of a loop whose optimizer may be one of lightck's own."""

    pipeline: StreamPipeline
    _early_error: Exception | None = None
    """Error that was raised before an update, which is made first."""

    def update_begins(
        self, optimizer: Optimizer, frame: FrameType | None = None, *, unseen: bool = False
    ) -> None:
        """Fence an update, and let it write the snapshot of the step that it makes, if due."""
        super().update_begins(optimizer, frame, unseen=unseen)
        self.pipeline.watch.settle()
        stream_into: Any = getattr(optimizer, "stream_into", None)
        if stream_into is None or unseen or not self._may_stream(optimizer):
            return
        step = self.steps.step + 1
        try:
            with self.stall_timer.of("fence"), self.lock, self.outcomes.reported():
                self.poll()  # a commit gives a slot back
                if self._is_due(step):
                    stream_into(partial(self.pipeline.stream, step))
        except Exception as error:  # noqa: BLE001 - raised here it would cost the update
            self._early_error = error

    def update_ends(self, optimizer: Optimizer) -> None:
        """Take note that an update has ended; raise what asking for it too early has raised."""
        super().update_ends(optimizer)
        error, self._early_error = self._early_error, None
        if error is not None:
            raise error

    def _make_room(self) -> None:
        super()._make_room()
        self._tell_of_streaming()

    def _tell_of_streaming(self) -> None:
        """Tell once that another class of optimizer would write the snapshots in its update."""
        optimizers, plan = self.inventory.optimizers, self.pipeline.copy_plan
        native = _NATIVE.get(type(optimizers[0])) if len(optimizers) == 1 else None
        written = [live for live in plan.lives if live.holders and live.alias_of is None]
        if native is None or not self.pipeline.may_stream:
            return
        types = native.state_keys.types
        if any(live.local.dtype not in types or not live.local.is_cpu for live in written):
            return
        size = sum(live.local.nbytes for live in written)
        if size >= _WORTH_TELLING_BYTES:
            event(
                "could_stream",
                logging.INFO,
                optimizer=f"torch.optim.{type(optimizers[0]).__name__}",
                use=f"lightck.optim.{native.__name__}",
                copy_s=round(size / dram_rate(_SAMPLE_BYTES), 4),
                why="its update writes the snapshot for a fifth to a half of the copy's time;"
                " the results are those of fused=True",
            )

    def _may_stream(self, optimizer: Optimizer) -> bool:
        """Tell whether this update alone makes the next step, and forwards are seen."""
        alone = len(self.inventory.optimizers) == 1 and self.inventory.optimizers[0] is optimizer
        ready = self.enabled and self._room_made and self.steps.settled and not self.steps.marked
        return alone and ready and not (self.due or self.forward_unseen)

    def _is_due(self, step: int) -> bool:
        """Ask whether `step`, whose update has yet to begin, gets a snapshot that it may write."""
        return self.is_due(step) and not self.outcomes.synchronous

    def forward(self, training: bool) -> None:
        """Take forward start, up to which the watch tells what was written behind the update."""
        if training:
            self.pipeline.watch.end()
        else:
            self.evaluation()
        super().forward(training)

    def evaluation(self) -> None:
        """End the watch, which would slow an evaluation down: all bytes are compared then."""
        if self.enabled and not self.steps.updating:
            self.pipeline.watch.interrupt()
