"""torchsnapshot: Snapshot.async_take as its documentation shows it.

It returns when all is in host memory, and writes behind the training. Two folders in turn, so that
one is whole at any time; the older is removed first, for its files get new names every time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.engines.base import Counts, Plan, folder_bytes, single_rank
from bench.work import Training

_PACKAGE: Any = import_module("torchsnapshot")  # by name: mypy need not have it


def _state(training: Training, step: int) -> dict[str, Any]:
    progress = _PACKAGE.StateDict(step=step)
    return {"model": training.plain, "optimizer": training.optimizer, "progress": progress}


@dataclass
class TorchSnapshot:
    """One snapshot in flight: the next one waits for it."""

    spills = True
    interval = 1

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("torchsnapshot", training)
        self._training, self._folder = training, folder
        self._running: Any = None
        self._begun = self._complete = 0

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self.drain()
        self._begun += 1
        shutil.rmtree(self._target(), ignore_errors=True)
        state = _state(self._training, step)
        self._running = _PACKAGE.Snapshot.async_take(path=str(self._target()), app_state=state)

    def _target(self) -> Path:
        return self._folder / f"snapshot-{self._begun % 2}"

    def before_update(self) -> None:
        """All was in host memory when async_take returned."""

    def drain(self) -> None:
        """See `Engine`."""
        if self._running is not None:
            self._running.wait()
            self._running = None
            self._complete += 1

    def finish(self) -> Counts:
        """See `Engine`."""
        self.drain()
        del self._training
        return Counts(self._complete)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        training.need_optimizer_state()  # it restores into what is there
        state = _state(training, -1)
        _PACKAGE.Snapshot(str(self._target())).restore(state)
        step: int = state["progress"]["step"]
        return step

    def written(self) -> int:
        """See `Engine`."""
        return folder_bytes(self._target())

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make() -> TorchSnapshot:
    """See `bench.engines.make`."""
    return TorchSnapshot()
