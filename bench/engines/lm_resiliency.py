"""lm-resiliency (GEMINI): its InMemoryCheckpointManager, driven at the steps that are due.

`enable_resiliency` saves every so many steps by itself, with the same manager. On a CPU
the copy into the manager's memory blocks; there is no stream to run it on.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.engines.base import Counts, Plan, folder_bytes, single_rank
from bench.errors import BenchError
from bench.work import Training

_PACKAGE: Any = import_module("lm_resiliency.checkpointing")  # by name: mypy needs no stubs


@dataclass
class LmResiliency:
    """The engine; with `flush` each snapshot also goes to its node-local files.

    Without, it is lost with the process. (It also flushes on SIGTERM and at exit, which is not
    measured.)
    """

    flush: bool
    spills: bool = field(init=False)
    interval: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        """Set whether writing goes on in the background."""
        self.spills = self.flush

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("lm-resiliency", training)
        self._training, self._folder = training, folder / "lm-resiliency"
        self._manager = self._made()
        self._begun = self._step = 0

    def _made(self) -> Any:
        config = _PACKAGE.InMemoryCkptConfig(
            interval=1, disk_flush_interval=0, disk_folder=str(self._folder), run_id="bench"
        )
        return _PACKAGE.InMemoryCheckpointManager(config)

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self.drain()
        self._begun += 1
        self._step = step
        self._manager.save({**self._training.state(), "step": step}, step)
        if self.flush:
            self._manager.maybe_wait()
            self._manager.flush_to_disk(step)  # copies once more, then a thread writes
            for old in self._kept()[:-2]:
                shutil.rmtree(old)  # it keeps all of them, and this is memory

    def _kept(self) -> list[Path]:
        """Return the folders of snapshots, oldest first."""
        found = self._folder.glob("**/step-*")
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def before_update(self) -> None:
        """Return at once: the copy was complete when `save` returned."""

    def drain(self) -> None:
        """See `Engine`."""
        self._manager.maybe_wait()
        self._manager._disk.wait()  # nothing public waits for the files alone

    def finish(self) -> Counts:
        """See `Engine`."""
        self.drain()
        self._manager.close()
        del self._training
        return Counts(self._begun)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        manager = self._made() if self.flush else self._manager  # a new one's memory is empty
        try:
            found = manager.load()
        finally:
            if self.flush:
                manager.close()
        if found is None:
            raise BenchError(f"lm-resiliency found nothing at {self._folder}")
        state, step = found
        training.load({"model": state["model"], "optimizer": state["optimizer"]})
        return int(step)

    def written(self) -> int:
        """See `Engine`."""
        return folder_bytes(self._kept()[-1]) if self.flush else 0

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make(flush: bool = False) -> LmResiliency:
    """Make the engine; see `bench.engines.make`."""
    return LmResiliency(flush)
