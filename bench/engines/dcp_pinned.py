"""torch.distributed.checkpoint.async_save with its asynchronous stager and pinned memory.

The stager copies over a stream of its own, which waits for nothing: it is started when the compute
stream has done the last update (without that what is restored differs), and the next update waits
for its end, as the documentation asks. One stager serves all saves: memory is pinned once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from bench.engines.base import Counts, Plan, folder_bytes, single_rank
from bench.errors import BenchError
from bench.work import Training


def _state(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


class DcpPinned:
    """Two folders in turn, so that a whole checkpoint is there at any time."""

    spills = True
    interval = 1

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("dcp-pinned", training)
        self._training, self._folder = training, folder
        if not dist.is_initialized():  # async_save wants a CPU backend
            store = f"file://{folder / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        gpu = training.work.device != "cpu"
        # Of the older of the two folders; its threads say so, too.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        # Shared memory is for its background process only.
        self._stager = DefaultStager(StagingOptions(gpu, False, True, gpu))
        self._stream = torch.cuda.current_stream() if gpu else None
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None
        self._begun = self._complete = 0

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self.drain()
        self._begun += 1
        state = {"step": torch.tensor(step), **_state(self._training)}
        if self._stream is not None:
            self._stream.synchronize()
        # The forward does not wait for the stager, and it changes BatchNorm's buffers.
        for name, tensor in self._training.buffers().items():
            state["model"][name] = tensor.clone()
        saved = async_save(state, checkpoint_id=self._target(), async_stager=self._stager)
        if not isinstance(saved, AsyncSaveResponse):
            raise BenchError(f"async_save gave {type(saved).__name__}, not an AsyncSaveResponse")
        self._staged, self._written = saved.staging_completion, saved.upload_completion

    def _target(self) -> Path:
        return self._folder / f"checkpoint-{self._begun % 2}"

    def before_update(self) -> None:
        """The update would change what is still being staged."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def drain(self) -> None:
        """See `Engine`."""
        if self._written is not None:
            self._written.result()
            self._staged = self._written = None
            self._complete += 1

    def finish(self) -> Counts:
        """See `Engine`."""
        self.drain()
        self._stager.close()
        del self._training
        return Counts(self._complete)

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        state = {"step": torch.tensor(-1), **_state(training)}
        load(state, checkpoint_id=self._target())
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(state["step"])

    def written(self) -> int:
        """See `Engine`."""
        return folder_bytes(self._target())

    def stalls(self) -> Mapping[str, float]:
        """See `Engine`."""
        return {}


def make() -> DcpPinned:
    """See `bench.engines.make`."""
    return DcpPinned()
