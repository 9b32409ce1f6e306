"""The same training as one replica group of torchft: its Manager, DDP, Optimizer and loop.

The number of its rank comes on standard input. As many replicas as ranks are needed for a step, so
that no step is made by fewer: the survivors wait for the one that is missing.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.in_place.common import Asked, Marks, Script
from bench.in_place.supervise import dies_with_parent


def _manager(script: Script, optimizer: torch.optim.Optimizer) -> Any:
    from torchft import Manager, ProcessGroupGloo

    def load(state: Any) -> None:
        script.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {
            "model": script.model.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        min_replica_size=script.asked.world,
        replica_id=f"rank{script.rank}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        init_sync=False,
    )
    vars(manager)["store_that_lives_as_long"] = store
    return manager


def main() -> None:
    """Train until the measuring process has had enough."""
    from torchft import DistributedDataParallel, Optimizer

    dies_with_parent()
    rank = int(sys.stdin.readline())
    began_s = time.monotonic()
    asked = Asked.from_environment()
    marks = Marks(asked.folder, str(rank))
    marks.mark("began", at=began_s)
    script = Script(asked, rank, marks)
    adamw = torch.optim.AdamW(script.model.parameters(), lr=1e-4, fused=True)
    manager = _manager(script, adamw)
    model, optimizer = DistributedDataParallel(manager, script.model), Optimizer(manager, adamw)
    marks.mark("built")
    marks.mark("attached")
    while script.goes_on(manager.current_step()):
        step = manager.current_step()
        optimizer.zero_grad()
        loss = model(script.batch(step))
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            script.ended(manager.current_step(), loss)
        else:
            marks.mark("again", step=step)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
