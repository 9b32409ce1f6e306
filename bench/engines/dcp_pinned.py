"""Call torch.distributed.checkpoint.async_save with its asynchronous stager and pinned memory.

The stager copies over a stream of its own, which waits for nothing. It is started when the compute
stream has done the last update (otherwise the restored state differs), and the next update waits
for its end, as the documentation asks. One stager serves all saves: memory is pinned once.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from bench.engines.base import Counts, InTurn, Plan, single_rank
from bench.engines.dcp import read, state_of
from bench.errors import BenchError
from bench.work import Training


class DcpPinned(InTurn):
    """The DCP engine whose staging goes on during the training, too."""

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("dcp-pinned", training)
        super().attach(training, folder, plan)
        if not dist.is_initialized():  # async_save needs a CPU backend
            store = f"file://{folder / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        gpu = training.work.device != "cpu"
        # It warns of overwriting the older of the two folders; its threads do so, too.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        # Shared memory is needed for its background process only.
        self._stager = DefaultStager(StagingOptions(gpu, False, True, gpu))
        self._stream = torch.cuda.current_stream() if gpu else None
        self._staged: Future[Any] | None = None

    def _started(self, step: int) -> Any:
        state = state_of(step, self._training)
        if self._stream is not None:
            self._stream.synchronize()
        # The forward does not wait for the stager, and changes BatchNorm's buffers.
        for name, tensor in self._training.buffers().items():
            state["model"][name] = tensor.clone()
        saved = async_save(state, checkpoint_id=self._target(), async_stager=self._stager)
        if not isinstance(saved, AsyncSaveResponse):
            raise BenchError(f"async_save gave {type(saved).__name__}, not an AsyncSaveResponse")
        self._staged = saved.staging_completion
        return saved.upload_completion

    def before_update(self) -> None:
        """Wait for the stager: the update would change what is still being staged."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def finish(self) -> Counts:
        """See `Engine`."""
        counts = super().finish()
        self._stager.close()
        return counts

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        return read(self._target(), training)


def make() -> DcpPinned:
    """Make the engine; see `bench.engines.make`."""
    return DcpPinned()
