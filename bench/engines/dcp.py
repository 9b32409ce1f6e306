"""Call torch.distributed.checkpoint.async_save as its documentation shows it, on every rank."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from bench.engines.base import InTurn, Plan
from bench.errors import BenchError
from bench.work import Training


def state_of(step: int, training: Training) -> dict[str, Any]:
    """Return what is saved, in the layout that torch's own functions give it."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"step": torch.tensor(step), "model": model, "optimizer": optimizer}


def read(folder: Path, training: Training, group: dist.ProcessGroup | None = None) -> int:
    """Load a checkpoint into a training; return its step."""
    state = state_of(-1, training)
    load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


@dataclass
class Dcp(InTurn):
    """The DCP engine: staging blocks, writing goes on in the background."""

    checkpointer: str

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        super().attach(training, folder, plan)
        self._rank = training.rank
        if training.world == 1:
            # async_save needs a CPU backend, and its process variant a group to copy.
            dist.init_process_group(
                "gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1
            )
        # Its collectives run on a thread beside the training's, and need a group of their own.
        self._group = dist.new_group(backend="gloo") if training.world > 1 else None

    def _started(self, step: int) -> Any:
        state = state_of(step, self._training)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of overwriting the older folder
            saved = async_save(
                state,
                checkpoint_id=self._target(),
                process_group=self._group,
                async_checkpointer_type=AsyncCheckpointerType(self.checkpointer),
            )
        if not isinstance(saved, Future):
            raise BenchError(f"async_save gave {type(saved).__name__}, expected a Future")
        return saved

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        return read(self._target(), training, self._group)

    def written(self) -> int:
        """See `Engine`."""
        files = self._target().glob(f"__{self._rank}_*.distcp")
        return sum(file.stat().st_size for file in files)


def make(checkpointer: str = "thread") -> Dcp:
    """Make the engine; see `bench.engines.make`."""
    return Dcp(checkpointer)
