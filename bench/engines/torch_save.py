"""Save as most people do: torch.save to a temporary name, then rename."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engines.base import AtOnce, Plan
from bench.work import Training


def write(state: Mapping[str, Any], path: Path, *, sync: bool) -> None:
    """Replace `path` as a whole; with `sync` it survives power loss on return."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    part.replace(path)
    if sync:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make a folder's names survive power loss before this returns."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path, training: Training, *, mapped: bool) -> int:
    """Load what `write` wrote; return the step."""
    found = torch.load(path, mmap=mapped, weights_only=True)
    step: int = found.pop("step")
    training.load(found)
    return step


@dataclass
class TorchSave(AtOnce):
    """The engine.

    Training waits until the file is complete, with `sync` until it is on the disk.
    """

    sync: bool
    mmap: bool

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        super().attach(training, folder, plan)
        self._path = folder / "snapshot.pt"

    def _save(self, step: int) -> None:
        write({"step": step, **self._training.state()}, self._path, sync=self.sync)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        return read(self._path, training, mapped=self.mmap)


def make(sync: bool = False, mmap: bool = False) -> TorchSave:
    """Make the engine; see `bench.engines.make`."""
    return TorchSave(sync, mmap)
