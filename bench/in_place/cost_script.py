"""One rank of `bench.measures.in_place_cost`: the same steps in place, and over plain gloo."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.inplace import runtime

_LAYERS = 20
_WIDTH = 192  # a layer's gradient is above the 64 KiB that are always copied


class _Trained:
    """A model with as many buckets as layers, over one group."""

    def __init__(self, group: Any) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))
        bucket_mb = _WIDTH * _WIDTH * 4 / (1 << 20)
        self.model = DistributedDataParallel(
            nn.Sequential(*layers), process_group=group, bucket_cap_mb=bucket_mb
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        self._batch = torch.ones(1, _WIDTH)

    def steps(self, count: int) -> tuple[float, float]:
        """Make so many steps; return the seconds of one, and the seconds of CPU on all threads."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.model(self._batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        spent_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return spent_s / count, cpu_s / count


def main() -> None:
    """Measure, and write what was found."""
    asked = json.loads(os.environ["LIGHTCK_BENCH_IN_PLACE_COST"])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ours = _Trained(dist.group.WORLD)
    plain = _Trained(_gloo(rank, world))
    worker = runtime.WORKER
    assert worker is not None
    found: dict[str, list[tuple[float, float]]] = {"lightck": [], "gloo": []}
    never = 1 << 40
    runtime.WORKER = None  # the other model is attached as without `lightck run`
    plainly = lightck.attach(plain.model, plain.optimizer, asked["path"] + ".plain", policy=never)
    runtime.WORKER = worker
    in_place = lightck.attach(ours.model, ours.optimizer, asked["path"], policy=never)
    with plainly, in_place as handle:
        for trained in (ours, plain):
            trained.steps(4)
        kept, before = worker.inputs.copied_bytes, worker.communicator.window.next
        for number in range(asked["blocks"]):
            order = (("lightck", ours), ("gloo", plain))
            for name, trained in order if number % 2 else order[::-1]:
                found[name].append(trained.steps(asked["block"]))
        made = worker.communicator.window.next - before
        wanted = (_LAYERS + 1) * asked["blocks"] * asked["block"]
        assert made == wanted, f"{made} collectives, not {wanted}"
        kept = max(kept, worker.inputs.copied_bytes)
        assert handle.step == 4 + asked["blocks"] * asked["block"]
    if rank == 0:
        Path(asked["told"]).write_text(json.dumps({**found, "kept": kept}))
    dist.destroy_process_group()


def _gloo(rank: int, world: int) -> Any:
    """Return a group that `lightck run` has not replaced."""
    store: Any = dist.distributed_c10d.PrefixStore(
        "plain", dist.distributed_c10d._get_default_store()
    )
    group: Any = dist.ProcessGroup(store, rank, world)
    options = timedelta(seconds=60)
    gloo = dist.ProcessGroupGloo(store, rank, world, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


if __name__ == "__main__":
    main()
