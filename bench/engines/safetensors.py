"""safetensors.torch.save_file while training waits: the state flattened, renamed when complete.

A file holds tensors under names and strings beside them: nested names are joined with dots, numbers
of the optimizer's groups go into the strings as JSON, tied weights are stored under one name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.engines.base import Counts, Plan, single_rank
from bench.engines.torch_save import sync_folder
from bench.work import Training, leaves, with_leaves


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name, each memory once; and strings: numbers, and which names are the same."""
    found: dict[str, torch.Tensor] = {}
    numbers: dict[str, object] = {}
    same: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in leaves(state):
        if not isinstance(value, torch.Tensor):
            numbers[name] = value
        elif value.data_ptr() in first:
            same[name] = first[value.data_ptr()]
        else:
            first[value.data_ptr()] = name
            found[name] = value.contiguous()
    return found, {"numbers": json.dumps(numbers), "same": json.dumps(same)}


@dataclass
class Safetensors:
    """Training waits until the file is complete; `sync`: until it is on the disk."""

    sync: bool
    spills = False
    interval = 1

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("safetensors", training)
        self._training, self._path = training, folder / "snapshot.safetensors"
        self._begun = 0

    def begin(self, step: int) -> None:
        """See `Engine`."""
        part = self._path.with_suffix(".part")
        found, strings = _split(self._training.state())
        save_file(found, part, {"step": str(step), **strings})
        if self.sync:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        part.replace(self._path)
        if self.sync:
            sync_folder(self._path.parent)
        self._begun += 1

    def before_update(self) -> None:
        """See `Engine`."""

    def drain(self) -> None:
        """See `Engine`."""

    def finish(self) -> Counts:
        """See `Engine`."""
        del self._training
        return Counts(self._begun)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        training.need_optimizer_state()
        with safe_open(self._path, "pt") as file:
            strings = file.metadata()
            values: dict[str, object] = json.loads(strings["numbers"])
            values.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        for name, other in json.loads(strings["same"]).items():
            values[name] = values[other]
        training.load(with_leaves(training.state(), values))
        return int(strings["step"])

    def written(self) -> int:
        """See `Engine`."""
        return self._path.stat().st_size

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make(sync: bool = False) -> Safetensors:
    """See `bench.engines.make`."""
    return Safetensors(sync)
