"""A training for `lightck run` over gloo or NCCL, whose rank 1 is killed once.

gpu_ranks.py FOLDER BACKEND KILL_AT

Each rank appends to FOLDER/<rank>.said its process, and each step with its loss, bit for bit.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck

STEPS = 9


def main(folder: Path, backend: str, kill_at: int) -> None:
    """Train."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    said = (folder / f"{rank}.said").open("a", buffering=1)
    print("pid", os.getpid(), file=said)
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lightck.restore(model, optimizer, folder / "regions")
    killed = folder / "killed"
    with lightck.attach(model, optimizer, folder / "regions", policy=1) as handle:
        while handle.step < STEPS:
            batch = torch.Generator().manual_seed(100 * handle.step + rank)
            loss = model(torch.randn(4, 8, generator=batch).to(device)).square().mean()
            if handle.step == kill_at and rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("step", handle.step, loss.item().hex(), file=said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
