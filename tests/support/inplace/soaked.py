"""A training for `lightck run` that goes on until it is told to end; it can be cut, and measured.

    soaked.py FOLDER REGIONS [OPTION...]

Each life of each rank reads one-letter orders from the pipe FOLDER/<pid>.orders, on a thread of
its own, so that they come at any moment: `c` shuts one of the link's connections, `m` appends what
the process holds to FOLDER/<rank>.said. All stop at the step in FOLDER/stop. Options: `slow` (small
waits in every phase, so that a random moment meets each), `metric` (a collective behind each step).
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightck
from lightck.inplace import runtime

WAIT_S = 0.004
HANG_EXIT_S = 3.0
"""A rank that stands for so long is replaced."""


def held() -> tuple[int, int, int]:
    """Return this process's threads, descriptors and resident kilobytes."""
    status = Path("/proc/self/status").read_text()
    threads, rss_kib = (
        int(status.partition(f"\n{name}:")[2].split()[0]) for name in ("Threads", "VmRSS")
    )
    return threads, len(os.listdir("/proc/self/fd")), rss_kib


def cut_one() -> int:
    """Shut one connection of this rank's link, as a network would; return how many were shut.

    lightck is told nothing.
    """
    worker = runtime.WORKER
    link: Any = worker.communicator._link if worker is not None else None
    if link is None:
        return 0
    connections = []
    for fd, name in list(link._descriptors.items()):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") != name:
                continue
            found = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.close()
        else:
            connections.append(found)
    chosen = random.sample(connections, min(1, len(connections)))
    for each in connections:
        if each in chosen:
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    return len(chosen)


def obey(pipe: Path, said: Any) -> None:
    """Read orders for as long as the process lives."""
    descriptor = os.open(pipe, os.O_RDWR)  # writing, too: so it never comes to an end
    while True:
        for order in os.read(descriptor, 64).decode():
            if order == "c":
                print("cut", cut_one(), file=said)
            else:
                print("held", runtime.stats()[0], *held(), file=said)


def stop_at(folder: Path) -> float:
    """Return the last step, as far as it is known."""
    try:
        return int((folder / "stop").read_text())
    except (OSError, ValueError):
        return float("inf")


def main(folder: Path, regions: Path, options: set[str]) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    said = (folder / f"{rank}.said").open("a", buffering=1)
    pipe = folder / f"{os.getpid()}.orders"
    os.mkfifo(pipe)
    threading.Thread(target=obey, args=(pipe, said), daemon=True).start()
    print("pid", os.getpid(), os.environ.get("LIGHTCK_LIFE", "0"), file=said)
    moments = random.Random(os.getpid())

    def wait() -> None:
        if "slow" in options:
            time.sleep(moments.random() * WAIT_S)

    torch.manual_seed(5)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
    net = nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Dropout(0.2), nn.Linear(200, 2))
    model = DistributedDataParallel(net)
    torch.manual_seed(77 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    sampler = lightck.ResumableSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, 4, sampler=sampler)
    extras = {"sampler": sampler}
    lightck.restore(model, optimizer, regions, extras=extras)
    with lightck.attach(
        model, optimizer, regions, extras=extras, close_timeout_s=60,
        failure=lightck.Failure(hang_exit_s=HANG_EXIT_S),
    ) as handle:  # fmt: skip
        while handle.step < stop_at(folder):
            for x, y in loader:
                wait()
                loss = nn.functional.cross_entropy(model(x), y)
                wait()
                loss.backward()
                wait()
                optimizer.step()
                optimizer.zero_grad()
                shown = loss.detach().clone()
                if "metric" in options:
                    dist.all_reduce(shown)
                    shown /= world
                wait()
                print("step", handle.step, float(shown).hex(), file=said)
                if handle.step >= stop_at(folder):
                    break
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"{rank}.state")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), {*sys.argv[3:]})
