"""A training for `lightck run`: DDP, a shuffled sampler, dropout, a schedule; says what it sees.

    trainer.py FOLDER REGIONS STEPS [OPTION...]

Each rank appends lines to FOLDER/<rank>.said: its process, then step and loss, bit for bit; at its
end it writes FOLDER/<rank>.state. Options, of which any may be combined:

    policy=N    when snapshots are due (default: every 1000 steps)
    wide        some buckets, larger than what is always copied
    views       gradients as bucket views
    sparse      an embedding with sparse gradients, and SGD
    buffers     BatchNorm
    accumulate  each update of two backwards, the first without communication
    clip        gradients are clipped by their norm
    scaler      the loss is scaled, and the scaler leaves an update out now and then
    objects     objects are gathered and sent in the set-up, and before each step
    many        300 small tensors are sent in the set-up, before its seed
    ranked      a module of its own has read the rank when it was imported
    top         a collective before each step
    helper      the collectives before and behind a step are made by one function, and look alike
    metric      a collective behind each step
    eval        an evaluation with a collective behind every third step
    gather      between forward and backward tensors are gathered on rank 0
    spoil       between forward and backward a large result is changed in place right away
    hidden      the same out of the version counter's sight
    send        before each step rank 0 sends to rank 1
    draws       before each forward each rank draws another number of random numbers
    leaves      when all have left the training rank 1 is killed, once, and the others reduce
    off=WHY     attached with `failure="off"`, with `keep=`, or twice (`off=second`)
    cut=S:RANK  in step S the rank's sockets are shut down, before its last gradient
    early=S:RANK  behind step S the rank ends with status 0, once in all
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightck


def net(options: set[str]) -> nn.Module:
    """The model; wide: some buckets, larger than what is always copied."""
    width = 400 if "wide" in options else 24
    layers: list[nn.Module] = [nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2)]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.Tanh()]
    if "buffers" in options:
        layers.insert(1, nn.BatchNorm1d(width))
    return nn.Sequential(*layers, nn.Linear(width, 2))


class Embedded(nn.Module):
    """Adds a row of a table to what the net is given; the table's gradients are sparse."""

    def __init__(self, options: set[str]) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, 8, sparse=True)
        self.net = net(options - {"sparse"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.table((x[:, 0] * 100).long().abs()))


def given(options: set[str], name: str, default: str = "") -> str:
    """The value of an option `name=value`."""
    return next((o.partition("=")[2] for o in options if o.startswith(f"{name}=")), default)


def drawn_seed(options: set[str]) -> int:
    """A seed of rank 0's, sent to all, as scripts have it."""
    for _ in range(300 if "many" in options else 0):
        dist.broadcast(torch.ones(2), 0)
    drawn = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        drawn.fill_(1234)
    dist.broadcast(drawn, 0)
    seed = int(drawn)
    if "objects" in options:
        named: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(named, {"rank": dist.get_rank(), "of": "set-up" * dist.get_rank()})
        assert [each["rank"] for each in named] == [*range(dist.get_world_size())], named
        told: list[Any] = [{"seed": 4321}, "run"] if dist.get_rank() == 0 else [None, None]
        dist.broadcast_object_list(told, 0)
        seed += told[0]["seed"]
    return seed


def mean(value: torch.Tensor) -> torch.Tensor:
    """The mean over all ranks, as helpers of scripts have it."""
    value = value.reshape(1).clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


@dataclass
class Loop:
    """Does what one rank's loop does beside its minibatches, by its options."""

    folder: Path
    options: set[str]
    model: DistributedDataParallel
    examples: torch.Tensor

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.last = next(self.model.parameters())  # its gradient comes last

    def before(self, step: int) -> None:
        """Do what comes before a forward."""
        if "helper" in self.options:
            flag = mean(torch.tensor(1.0 + step))
            assert float(flag) == 1.0 + step, f"a flag of {float(flag)} before step {step + 1}"
        elif "top" in self.options:
            dist.all_reduce(torch.tensor([float(self.rank)]))
        if "objects" in self.options:
            found: list[Any] = [None] * self.world
            dist.all_gather_object(found, "x" * (step + self.rank))
            assert [len(each) for each in found] == [step + rank for rank in range(self.world)]
        if "send" in self.options:
            if self.rank == 0:
                dist.send(torch.ones(1), 1)
            elif self.rank == 1:
                dist.recv(torch.zeros(1), 0)
        if "draws" in self.options:
            torch.rand(1 + self.rank)
        if given(self.options, "cut") == f"{step + 1}:{self.rank}":
            self.hook = self.last.register_hook(self.cut)

    def cut(self, _: torch.Tensor) -> None:
        """Shut down the sockets, in this backward only."""
        self.hook.remove()
        cut()

    def between(self) -> None:
        """Do what comes between forward and backward."""
        if "gather" in self.options:
            rows = [torch.zeros(1) for _ in range(self.world)] if self.rank == 0 else None
            dist.gather(torch.ones(1), rows)
        if "spoil" in self.options or "hidden" in self.options:
            large = torch.ones(50_000)
            dist.all_reduce(large)
            (large.data if "hidden" in self.options else large).mul_(0.0)

    def behind(self, step: int) -> None:
        """Do what comes behind a step."""
        if "eval" in self.options and step % 3 == 0:
            self.evaluate()
        if given(self.options, "early") == f"{step}:{self.rank}":
            ended = self.folder / "ended"
            if not ended.exists():
                ended.touch()
                os._exit(0)

    def evaluate(self) -> None:
        """Evaluate, with a collective."""
        self.model.eval()
        with torch.no_grad():
            seen = self.model(self.examples).square().mean()
        dist.all_reduce(seen)
        self.model.train()

    def leave(self) -> None:
        """Lose rank 1 when all have closed their handles."""
        killed = self.folder / "killed"
        if self.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def cut() -> None:
    """Shut down this rank's sockets to the others."""
    from lightck.inplace import runtime

    assert runtime.WORKER is not None
    link = runtime.WORKER.communicator._link
    assert link is not None
    link.cut()


def settings(options: set[str]) -> dict[str, Any]:
    """Return what `attach` is given."""
    chosen: dict[str, Any] = {"policy": int(given(options, "policy", "1000"))}
    off = given(options, "off")
    if off == "failure":
        chosen["failure"] = "off"
    if "hang" in options:
        chosen["failure"] = lightck.Failure(hang_exit_s=1.0)
    if off == "keep":
        chosen["keep"] = "every 2 steps"
    return {**chosen, "close_timeout_s": 20}


def iterate(
    loop: Loop, loader: DataLoader[Any], optimizer: Any, scheduler: Any, handle: Any, steps: int
) -> None:
    """Train; each step is said."""
    said = (loop.folder / f"{loop.rank}.said").open("a", buffering=1)
    options, model = loop.options, loop.model
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled="scaler" in options)
    accumulated = 0
    while handle.step < steps:
        for x, y in loader:
            loop.before(handle.step)
            accumulated += 1
            if "accumulate" in options and accumulated % 2:
                with model.no_sync():
                    nn.functional.cross_entropy(model(x), y).backward()
                continue
            loss = nn.functional.cross_entropy(model(x), y)
            loop.between()
            scaler.scale(loss).backward()
            if "clip" in options:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            shown = loss.detach().clone()
            if "helper" in options:
                shown = mean(shown)
            elif "metric" in options:
                dist.all_reduce(shown)
                shown /= loop.world
            print("step", handle.step, float(shown).hex(), file=said)
            loop.behind(handle.step)
            if handle.step >= steps:
                break


def main(folder: Path, regions: Path, steps: int, options: set[str]) -> None:
    """Train, in a process group that there is, and say how it ended."""
    rank = dist.get_rank()
    said = (folder / f"{rank}.said").open("a", buffering=1)
    print("pid", os.getpid(), os.environ.get("LIGHTCK_LIFE", "0"), file=said)
    if "ranked" in options:
        import ranked  # type: ignore[import-not-found] # the test writes it

        assert rank == ranked.RANK, f"rank {rank} is told that it is {ranked.RANK}"
    torch.manual_seed(drawn_seed(options))
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
    model = DistributedDataParallel(
        Embedded(options) if "sparse" in options else net(options),
        gradient_as_bucket_view="views" in options,
        bucket_cap_mb=1 if "wide" in options else 25,
    )
    torch.manual_seed(77 + rank)
    kind: Any = torch.optim.SGD if "sparse" in options else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    sampler = lightck.ResumableSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, 4, sampler=sampler)
    extras = {"scheduler": scheduler, "sampler": sampler}
    info = lightck.restore(model, optimizer, regions, extras=extras)
    if info is not None and info.early and scheduler.last_epoch < info.step:
        scheduler.step()  # the state is of before it
    loop = Loop(folder, options, model, data.tensors[0])
    with lightck.attach(model, optimizer, regions, extras=extras, **settings(options)) as handle:
        iterate(loop, loader, optimizer, scheduler, handle, steps)
        stats = handle.stats()
    if "leaves" in options:
        loop.leave()
    print("recoveries", stats.recoveries, f"{stats.recovering_s:.3f}", file=said)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"{rank}.state")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200)  # before the test that started it gives up
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), {*sys.argv[4:]})
    dist.destroy_process_group()
