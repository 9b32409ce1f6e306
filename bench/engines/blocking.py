"""Checkpoint the plain way at the medium's speed.

Training waits for one copy into a mapped file.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import torch

from bench.engines.base import AtOnce, Counts, Plan
from bench.work import Training, part, share, tensors
from bench.yardstick import SyncCopy


class Blocking(AtOnce):
    """One slot without checksum or crash safety: the cost that any engine is compared with.

    The copy is the yardstick's own, so that its cost ratio is 1 but for noise. With several ranks
    each copies its share, all of them at the same time.
    """

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        super().attach(training, folder, plan)
        self._root, self._world = folder / "blocking", training.world
        self._folder = self._root / str(training.rank)
        self._folder.mkdir(parents=True)
        live = tensors(training.state())
        self._parts = share(live, training.rank, training.world)
        self._copy = SyncCopy(self._folder, [part(live[i], b, e) for i, b, e in self._parts])
        self._step = 0

    def _save(self, step: int) -> None:
        self._copy()
        self._step = step

    def finish(self) -> Counts:
        """See `Engine`."""
        places = list(zip(self._parts, self._copy.offsets, strict=True))
        (self._folder / "index").write_text(json.dumps({"step": self._step, "parts": places}))
        return super().finish()

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        training.need_optimizer_state()
        live = tensors(training.state())
        steps = {self._read(self._root / str(rank), live) for rank in range(self._world)}
        return min(steps)

    def _read(self, folder: Path, live: list[torch.Tensor]) -> int:
        """Restore one rank's share; return the step that it is of."""
        index = json.loads((folder / "index").read_text())
        with open(folder / "yardstick", "r+b") as file:
            mapping = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        for (i, begin, end), offset in index["parts"]:
            source = torch.frombuffer(mapping, dtype=torch.uint8, count=end - begin, offset=offset)
            part(live[i], begin, end).copy_(source)
        step: int = index["step"]
        return step

    def written(self) -> int:
        """See `Engine`."""
        return self._copy.bytes


def make() -> Blocking:
    """Make the engine; see `bench.engines.make`."""
    return Blocking()
