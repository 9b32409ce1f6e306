"""torch_checkpointing (meta-pytorch): its CheckpointManager with the asynchronous saver.

A thread stages into shared memory during the next forward and backward, the update waits at the
manager's lock, a process of its own writes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.engines.base import Counts, InTurn, Plan, single_rank
from bench.errors import BenchError
from bench.work import Training

# By name: mypy needs no stubs.
CheckpointManager: Any = import_module("torch_checkpointing.checkpoint_manager").CheckpointManager
_FILES = "torch_checkpointing.storage.filesystem"
LocalFileSystemStorageConfig: Any = import_module(_FILES).LocalFileSystemStorageConfig


@dataclass
class TorchCheckpointing(InTurn):
    """The engine; with `direct`, its default, it writes with O_DIRECT."""

    direct: bool

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("torch_checkpointing", training)
        super().attach(training, folder, plan)
        self._waits = bool(training.buffers())
        self._manager = CheckpointManager(self._config(CheckpointManager.Config.with_async_save()))

    def _config(self, config: Any) -> Any:
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=self.direct)
        return config

    def _started(self, step: int) -> Any:
        shutil.rmtree(self._target(), ignore_errors=True)  # the older one; it replaces none itself
        state = {**self._training.state(), "step": step}
        saved = self._manager.save(str(self._target()), state)
        if saved is None:
            raise BenchError("torch_checkpointing saved at once, expected a Future")
        if self._waits:  # its lock is for updates; a forward that changes buffers needs it as well
            self.before_update()
        return saved

    def before_update(self) -> None:
        """Wait for the manager's lock: `save` takes it, and it is free once all is staged."""
        with self._manager.lock():
            pass

    def finish(self) -> Counts:
        """See `Engine`."""
        counts = super().finish()
        self._manager.close()
        return counts

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        training.need_optimizer_state()
        manager = CheckpointManager(self._config(CheckpointManager.Config.with_sync_save()))
        found = manager.load(str(self._target()), into={**training.state(), "step": -1})
        training.load({"model": found["model"], "optimizer": found["optimizer"]})
        manager.close()
        step: int = found["step"]
        return step


def make(direct: bool = True) -> TorchCheckpointing:
    """Make the engine; see `bench.engines.make`."""
    return TorchCheckpointing(direct)
