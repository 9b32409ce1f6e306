"""The same training in one function that NVIDIA's resiliency extension enters again: in-process.

The number of its rank comes on standard input. Nobody replaces a rank that is lost: the world is
smaller from then on. The extension's own abort asks for a CUDA back end, so that this one drops
gloo's group; its intervals are set to 0.2 s, from 1 s. Model, optimizer and step live outside of
the function, in the survivors' memory.
"""

import os
import sys
import time
from datetime import timedelta
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.abort import Abort  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel

from bench.in_place.common import Asked, Marks, Script
from bench.in_place.supervise import dies_with_parent

_INTERVAL = timedelta(seconds=0.2)


class _DropGroup(Abort):  # type: ignore[misc]
    def __call__(self, state: Any) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


class _Job:
    """All that outlives the function on a survivor."""

    def __init__(self, asked: Asked, rank: int, marks: Marks) -> None:
        self.script = Script(asked, rank, marks)
        parameters = self.script.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self.step = 0
        port = int(os.environ["MASTER_PORT"]) + 1
        torch_store: Any = dist
        self.store = torch_store.TCPStore(
            "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False
        )

    def train(self, wrapper: Any) -> None:
        """Train with the ranks that there are."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.distributed_c10d.PrefixStore(f"entered/{wrapper.iteration}", self.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        self.optimizer.zero_grad()
        model = DistributedDataParallel(self.script.model)
        self.script.marks.mark("attached")
        while self.script.goes_on(self.step):
            loss = model(self.script.batch(self.step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.script.ended(self.step, loss)


def main() -> None:
    """Train until the measuring process has had enough."""
    dies_with_parent()
    rank = int(sys.stdin.readline())
    began_s = time.monotonic()
    asked = Asked.from_environment()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(asked.world), "MASTER_ADDR": "127.0.0.1"}
    marks = Marks(asked.folder, str(rank))
    marks.mark("began", at=began_s)
    job = _Job(asked, rank, marks)

    @inprocess.Wrapper(
        abort=_DropGroup(),
        monitor_thread_interval=_INTERVAL,
        monitor_process_interval=_INTERVAL,
        heartbeat_interval=_INTERVAL,
        progress_watchdog_interval=_INTERVAL,
        last_call_wait=_INTERVAL,
        heartbeat_timeout=timedelta(seconds=10),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
    )  # type: ignore[untyped-decorator]
    def entered(call_wrapper: inprocess.CallWrapper = None) -> None:
        job.train(call_wrapper)

    entered()


if __name__ == "__main__":
    main()
