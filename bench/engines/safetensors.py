"""Save with safetensors.torch.save_file while training waits: flattened, renamed when complete.

A file holds tensors by name and strings beside them: nested names are joined with dots, numbers
of the optimizer's groups become JSON strings, tied weights are stored under one name.
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

from bench.engines.base import AtOnce, Plan, single_rank
from bench.engines.torch_save import sync_folder
from bench.work import Training, leaves, with_leaves


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors by name, each memory once, and strings for numbers and for equal names."""
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
class Safetensors(AtOnce):
    """The engine.

    Training waits until the file is complete, with `sync` until it is on the disk.
    """

    sync: bool

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("safetensors", training)
        super().attach(training, folder, plan)
        self._path = folder / "snapshot.safetensors"

    def _save(self, step: int) -> None:
        part = self._path.with_suffix(".part")
        found, strings = _split(self._training.state())
        save_file(found, part, {"step": str(step), **strings})
        if self.sync:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        part.replace(self._path)
        if self.sync:
            sync_folder(self._path.parent)

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


def make(sync: bool = False) -> Safetensors:
    """Make the engine; see `bench.engines.make`."""
    return Safetensors(sync)
