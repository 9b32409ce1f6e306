"""CheckFreq (FAST'21) for a training on a GPU: its snapshot is a copy in spare GPU memory.

Own implementation, and a generous one. The copy on the GPU runs on the compute stream, so that
neither forward nor update waits for the training thread; from there a thread moves it to pinned
memory over a stream of its own, under whatever the training does next, and writes it with
torch.save and fsync. One checkpoint in flight. The published code copies with `.cpu()`, to
memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.engines.base import Counts, Plan, single_rank
from bench.engines.torch_save import read, write
from bench.work import State, Training, leaves, with_leaves


class CheckFreqDevice:
    """On a CPU it does the same, with copies that block."""

    spills = True
    interval = 1

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("checkfreq-device", training)
        self._training, self._path = training, folder / "snapshot.pt"
        self._gpu = training.work.device != "cpu"
        self._stream: Any = torch.cuda.Stream() if self._gpu else None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkfreq")
        self._persist: Future[None] | None = None
        self._pinned: dict[str, torch.Tensor] = {}
        self._complete = 0

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self.drain()
        state = self._on_device()
        taken = torch.cuda.current_stream().record_event() if self._gpu else None
        self._persist = self._background.submit(self._write, step, state, taken)

    def _on_device(self) -> State:
        """A copy beside the live state, made behind what the stream has to do."""
        state = self._training.state()
        found = dict(leaves(state))
        made: dict[int, torch.Tensor] = {}  # tied weights once
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                if value.data_ptr() not in made:
                    made[value.data_ptr()] = value.detach().clone()
                found[name] = made[value.data_ptr()]
        return with_leaves(state, found)  # type: ignore[no-any-return]

    def _write(self, step: int, state: State, taken: Any) -> None:
        write({"step": step, **self._at_host(state, taken)}, self._path, sync=True)
        self._complete += 1

    def _at_host(self, state: State, taken: Any) -> State:
        """The copy in pinned memory, which is kept for the next one."""
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
        """The copy on the GPU stands before the update in the same stream."""

    def drain(self) -> None:
        """See `Engine`."""
        if self._persist is not None:
            self._persist.result()
            self._persist = None

    def finish(self) -> Counts:
        """See `Engine`."""
        self.drain()
        self._background.shutdown()
        self._pinned.clear()
        del self._training
        return Counts(self._complete)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        return read(self._path, training, mapped=False)

    def written(self) -> int:
        """See `Engine`."""
        return self._path.stat().st_size

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make() -> CheckFreqDevice:
    """See `bench.engines.make`."""
    return CheckFreqDevice()
