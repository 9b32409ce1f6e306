"""torchrun starts this in a test: it trains to the end, and says every loss in a file per rank.

Arguments: folder for files, path of the regions, steps in all; then, one for each life of the job,
`RANK:STEP` at which a rank kills itself, `RANK:STEP:agent` at which it kills torchrun, or
`RANK:STEP:stands` behind which it stands still.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lightck
from support.distributed.resumed import state_of
from support.distributed.training import Training


def main(folder: Path, region: Path, last: int, deaths: list[str]) -> None:
    rank, life = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    who, when, *how = deaths[life].split(":") if life < len(deaths) else ("none", "")
    training = Training(rank)
    extras = {"data": training.data}
    lightck.restore(training.model, training.optimizer, region, extras=extras)
    handle = training.attach(region, extras=extras)
    with handle, (folder / f"{rank}.said").open("a") as said:
        print(life, "pid", os.getpid(), file=said, flush=True)
        for step in range(handle.step + 1, last + 1):
            training.optimizer.zero_grad()
            loss = training.model(training.batch()).square().mean()
            loss.backward()
            training.optimizer.step()
            print(life, step, loss.item().hex(), file=said, flush=True)
            if [who, when] != [str(rank), str(step)]:
                continue
            while "stands" in how:
                time.sleep(600)
            os.kill(os.getppid() if "agent" in how else os.getpid(), signal.SIGKILL)
    torch.save(state_of(training), folder / f"{rank}.state")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    dist.destroy_process_group()
