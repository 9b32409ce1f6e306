"""Trainings for torchrun and `lightck run` that use more of torch.distributed than DDP does.

    others.py KIND FOLDER STEPS [DEATH]

KIND: `fsdp` (fully_shard), `objects` (object collectives around DDP), `compiled` (torch.compile of
a DDP model), `powersgd` and `nested` (comm hooks that make collectives in callbacks of others'
futures, torch's with a state, and one without), `groups` (behind each step one of them reduces in a
group of some ranks), `two` (two models, each with an update in each step), `join` (in the first
half rank 1 has fewer inputs than rank 0, in the second it is the other way round), `threads` (a
second thread reduces in a group of its own), `between` (rank 0 tells the restored step to all),
`unrestored` (attached without a restore), `teacher` (what FOLDER/../teacher has is restored first,
and its outputs are the targets). Each rank appends its losses and results to FOLDER/<rank>.said.
With DEATH, rank 1 kills itself once, in the last model's forward behind that step. Lightck is
attached then, and with `join`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightck


def made(kind: str) -> Any:
    """Return the model."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    if kind == "fsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if kind == "two":
        return nn.ModuleList(
            [DistributedDataParallel(net), DistributedDataParallel(nn.Linear(8, 1))]
        )
    wrapped = DistributedDataParallel(net)
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if kind == "nested":
        wrapped.register_comm_hook(None, averaged_in_callback)
    return torch.compile(wrapped, backend="aot_eager") if kind == "compiled" else wrapped


def averaged_in_callback(_, bucket):  # type: ignore[no-untyped-def] # DDP checks annotations
    """Reduce, and reduce once more when that is there."""

    def again(future):  # type: ignore[no-untyped-def]
        means = future.value()[0].div_(dist.get_world_size() ** 2)
        work = dist.all_reduce(means, async_op=True)
        return work.get_future().then(lambda each: each.value()[0]).wait()

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


class Reducing:
    """Reduces on a thread of its own, in a group of its own, while the training reduces."""

    def __init__(self) -> None:
        self._group, self._found = dist.new_group(), list[float]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for i in range(100):
            one = torch.full((64,), float(i))
            dist.all_reduce(one, group=self._group)
            self._found.append(float(one[0]))
            time.sleep(0.001 * dist.get_rank())

    def results(self) -> list[float]:
        """Return what all reductions gave, once the last has."""
        self._thread.join()
        return self._found


def taught(folder: Path) -> nn.Module:
    """Return the teacher."""
    teacher = nn.Linear(8, 1).requires_grad_(False)
    info = lightck.restore(teacher, path=folder.parent / "teacher")
    assert info is not None and info.step == 6, info
    return teacher


def exchanged(step: int) -> str:
    """Return what a round of object collectives gives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "step": step})
    sent = [f"of rank {rank}", step] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(world)] if not rank else None)
    return f"{gathered} {sent} {mine}"


def main(kind: str, folder: Path, steps: int, death: int | None) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = folder / f"{rank}.said"
    first = not path.exists()
    said = path.open("a", buffering=1)
    print("pid", os.getpid(), file=said)
    some = dist.new_group([0, 1]) if kind == "groups" else None
    model = made(kind)
    parts = [*model] if kind == "two" else [model]
    # Behind a join the ranks' parameters are the same again, but not what AdamW has of them.
    made_of: Any = torch.optim.SGD if kind == "join" else torch.optim.AdamW
    optimizers = [made_of(each.parameters(), lr=0.01) for each in parts]
    run: Any = nullcontext()
    teacher = taught(folder) if kind == "teacher" else None
    other = Reducing() if kind == "threads" else None
    if death is not None or kind == "join":
        if kind != "unrestored":
            lightck.restore(model, optimizers, folder / "regions")
        if kind == "between":
            dist.broadcast(torch.tensor([death]), 0)
        own = {"policy": 1000 if kind == "join" else "auto", "overwrite": kind == "unrestored"}
        run = lightck.attach(model, optimizers, folder / "regions", **own)
    with run as handle:
        step = 0 if handle is None else handle.step
        uneven = ExitStack()
        while step < steps:
            if kind == "join" and step in (0, 2 if rank else steps - 2):
                uneven.close()  # waits for the other rank
                uneven.enter_context(model.join())
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(4, 8, generator=generator)
            for part, optimizer in zip(parts, optimizers, strict=True):
                if part is not parts[0]:
                    dist.barrier()  # all are behind the first update then
                if step == death and rank == 1 and first and part is parts[-1]:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = (part(x) - (teacher(x) if teacher else 0)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            more = exchanged(step) if kind == "objects" else ""
            if kind == "groups" and rank < 2:
                shared = loss.detach().clone()
                dist.all_reduce(shared, group=some)
                more = float(shared).hex()
            print("step", step, float(loss.detach()).hex(), more, file=said)
        uneven.close()
    if other is not None:
        print("step", "reduced", *other.results(), file=said)
    dist.barrier()  # no rank leaves while another still receives
    dist.destroy_process_group()
    # Torch 2.13 may hang at the exit: DDP's reducer is freed under Python's lock, joins gloo's
    # thread, and that one waits for the lock.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    last = int(sys.argv[4]) if len(sys.argv) > 4 else None
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), last)
