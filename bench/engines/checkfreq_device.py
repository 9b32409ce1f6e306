"""CheckFreq (FAST'21) for a training on a GPU: its snapshot is a copy in spare GPU memory.

This is our own, generous implementation. The copy on the GPU runs on the compute stream, so that
neither forward nor update waits for the training thread; from there a thread moves it to pinned
memory over a stream of its own, while the training goes on, and writes it with
torch.save and fsync. One checkpoint in flight. The published code copies with `.cpu()`, to
memory that is not pinned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.engines.base import Counts, Plan, single_rank
from bench.engines.checkfreq import CheckFreq
from bench.engines.torch_save import write
from bench.work import State, Training, leaves, with_leaves


class CheckFreqDevice(CheckFreq):
    """The engine on a GPU; on a CPU it does the same, with copies that block."""

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("checkfreq-device", training)
        super().attach(training, folder, plan)
        self._gpu = training.work.device != "cpu"
        self._stream: Any = torch.cuda.Stream() if self._gpu else None
        self._pinned: dict[str, torch.Tensor] = {}

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self.drain()
        state = self._on_device()
        taken = torch.cuda.current_stream().record_event() if self._gpu else None
        self._persist = self._background.submit(self._move, step, state, taken)

    def _on_device(self) -> State:
        """Return a copy beside the live state, queued after the stream's present work."""
        state = self._training.state()
        found = dict(leaves(state))
        made: dict[int, torch.Tensor] = {}  # tied weights are copied once
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                if value.data_ptr() not in made:
                    made[value.data_ptr()] = value.detach().clone()
                found[name] = made[value.data_ptr()]
        return with_leaves(state, found)  # type: ignore[no-any-return]

    def _move(self, step: int, state: State, taken: Any) -> None:
        write({"step": step, **self._at_host(state, taken)}, self._path, sync=True)
        self._complete += 1

    def _at_host(self, state: State, taken: Any) -> State:
        """Return the copy in pinned memory, which is kept for the next one."""
        if not self._gpu:
            return state
        found = dict(leaves(state))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(taken)
            for name, value in found.items():
                if isinstance(value, torch.Tensor):
                    if name not in self._pinned:
                        self._pinned[name] = torch.empty_like(value, device="cpu", pin_memory=True)
                    found[name] = self._pinned[name].copy_(value, non_blocking=True)
        self._stream.synchronize()
        return with_leaves(state, found)  # type: ignore[no-any-return]

    def before_update(self) -> None:
        """Return at once: the copy on the GPU precedes the update in the same stream."""

    def finish(self) -> Counts:
        """See `Engine`."""
        counts = super().finish()
        self._pinned.clear()
        return counts


def make() -> CheckFreqDevice:
    """Make the engine; see `bench.engines.make`."""
    return CheckFreqDevice(profiled=False, budget=0.0)
