"""The plain way at the medium's speed: training waits for one copy into a mapped file."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.engines.base import Counts, Plan
from bench.work import Training, leaves
from bench.yardstick import SyncCopy


class Blocking:
    """One slot, no checksum, no crash safety: what any engine is up against.

    The copy is the yardstick's own, so that its cost ratio is 1 but for noise.
    """

    spills = False
    interval = 1

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        self._folder = folder / "blocking"
        self._folder.mkdir()
        self._plain: dict[str, Any] = {}
        self._named: dict[str, torch.Tensor] = {}
        for name, value in leaves(training.state()):
            if isinstance(value, torch.Tensor):
                self._named[name] = value
            else:
                self._plain[name] = value
        unique = {value.data_ptr(): value for value in self._named.values()}
        self._places = {pointer: i for i, pointer in enumerate(unique)}
        self._copy = SyncCopy(self._folder, list(unique.values()))
        self._step = self._begun = 0

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self._copy()
        self._step = step
        self._begun += 1

    def before_update(self) -> None:
        """See `Engine`."""

    def drain(self) -> None:
        """See `Engine`."""

    def finish(self) -> Counts:
        """See `Engine`."""
        extents = {
            name: self._copy.offsets[self._places[value.data_ptr()]]
            for name, value in self._named.items()
        }
        (self._folder / "index").write_text(json.dumps({"step": self._step, "at": extents}))
        return Counts(self._begun)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        index = json.loads((self._folder / "index").read_text())
        # A fresh optimizer has no state until it is loaded: zeros of the right kind first.
        state = training.state()
        if not state["optimizer"]["state"]:
            training.compute()
            training.update()
            state = training.state()
        with open(self._folder / "yardstick", "r+b") as file:
            mapping = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        for name, value in leaves(state):
            if isinstance(value, torch.Tensor):
                source = torch.frombuffer(
                    mapping, dtype=value.dtype, count=value.numel(), offset=index["at"][name]
                )
                value.detach().copy_(source.view(value.shape))
        step: int = index["step"]
        return step

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make() -> Blocking:
    """See `bench.engines.make`."""
    return Blocking()
