"""A train function of Ray Train on two workers, which Ray starts again whenever one is killed.

The kills of a chain are all within one `fit`: each life of the group dies at the next place.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import numpy as np
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightck
from lightck.pipeline import at_once
from support.integrations import probe
from support.integrations.probe import Data, Net, here, tell

EPOCHS = 3


def prepared(kills: list[str]) -> int:
    """Prepare a worker: who it is, where it dies, what it draws; return its rank."""
    rank: int = ray.train.get_context().get_world_rank()
    vars(probe)["RANK"] = rank  # it may be imported before Ray has set the environment
    at_once.MOST_BYTES = -1
    torch.set_num_threads(1)
    died = probe._OUT / "died"
    lives = died.read_text().splitlines() if died.exists() else []
    if probe.ON and rank == 1 and len(lives) < len(kills):
        vars(probe)["_KILL"] = kills[len(lives)]
    return rank


def at(place: str, handle: Any) -> None:
    """Die if this is the place, once it is written down."""
    if place == probe._KILL:
        with open(probe._OUT / "died", "a") as file:
            file.write(place + "\n")
    here(place, handle)


def train(config: dict[str, Any]) -> None:
    """Train on one worker; `config` has the places of the kills."""
    rank = prepared(config["kills"])
    torch.manual_seed(3)
    net = Net()
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Data(augment=True)
    sampler = lightck.ResumableSampler(data, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7 + rank)
    run: Any = None
    saved: list[str] = []

    def noted(name: str, fields: dict[str, Any]) -> None:
        if name in ("saved", "signals_unheard"):
            saved.append(fields.get("reason", name))
            probe.note(name, fields.get("reason"))

    if probe.ON:
        import lightck.integrations.ray as ours

        ours.POLL_S = 0.02
        extras = {"data": sampler}
        run = ours.attach(model, optimizer, probe.PATH, extras=extras, on_event=noted)
        probe.note("restored", run.info and run.info.step)
    handle = run.handle if run else None
    for epoch in range(sampler.epoch, EPOCHS):
        for x, y in loader:
            index = epoch * 6 + (sampler.consumed - 1) // 8
            tell(f"batch {index}", [x, y])
            loss = F.cross_entropy(model(x), y)
            at(f"forward {index}", handle)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tell(f"loss {index}", loss)
            if index == 15:
                announce()
        net.eval()
        for i in range(2):
            at(f"validation {epoch}.{i}", handle)
            with torch.no_grad():
                tell(f"validation {epoch}.{i}", net(torch.full((2, 8), 0.1 * i)).sum())
        net.train()
        (run.report if run else ray.train.report)({"epoch": epoch})
    if run:
        wait_for(lambda: "notice" in saved)
        run.close()
    probe.end(net)


def wait_for(come: Any) -> None:
    """Wait until it has come, for a while."""
    end = time.monotonic() + 20
    while not come() and time.monotonic() < end:
        time.sleep(0.01)


def announce() -> None:
    """Do what Ray's controller does on every worker when a node is to end."""
    from ray.train import PreemptionInfo
    from ray.train.v2._internal.execution.context import get_train_context

    info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"node": [1]})
    get_train_context().preemption_context.preemption_info = info


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=True)
    folder = str(probe._OUT / f"ray-{probe.ON}")
    result = TorchTrainer(
        train,
        train_loop_config={"kills": json.loads(os.environ.get("KILLS", "[]"))},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=9)),
    ).fit()
    ray.shutdown()
    sys.stdout.flush()
    os._exit(0 if result.error is None else 1)
