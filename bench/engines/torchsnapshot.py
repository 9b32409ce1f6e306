"""torchsnapshot: its Snapshot.async_take as the documentation shows it.

It returns when all is in host memory, and writes in the background. The older of its two folders
is emptied before it is used again: its files get new names every time.
"""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.engines.base import InTurn, Plan, single_rank
from bench.work import Training

_PACKAGE: Any = import_module("torchsnapshot")  # by name: mypy needs no stubs


def _state(training: Training, step: int) -> dict[str, Any]:
    progress = _PACKAGE.StateDict(step=step)
    return {"model": training.plain, "optimizer": training.optimizer, "progress": progress}


class TorchSnapshot(InTurn):
    """The torchsnapshot engine; all is in host memory when `begin` returns."""

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("torchsnapshot", training)
        super().attach(training, folder, plan)

    def _started(self, step: int) -> Any:
        shutil.rmtree(self._target(), ignore_errors=True)
        state = _state(self._training, step)
        return _PACKAGE.Snapshot.async_take(path=str(self._target()), app_state=state)

    def _wait(self, running: Any) -> None:
        running.wait()

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        training.need_optimizer_state()  # it restores into existing tensors
        state = _state(training, -1)
        _PACKAGE.Snapshot(str(self._target())).restore(state)
        step: int = state["progress"]["step"]
        return step


def make() -> TorchSnapshot:
    """Make the engine; see `bench.engines.make`."""
    return TorchSnapshot()
