"""Two replica groups of torchft, one process each, with its manager, DDP, optimizer, lighthouse.

The harness' ranks are the groups. With the parameter `heal` one process is all: it starts the
groups, and group 1 again once it has died, while group 0 goes on.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import lightck
from support.integrations import probe
from support.integrations.probe import ON, PARAMS, Data, Net, here, tell

HEAL = PARAMS.get("heal", False)
STEPS = 30 if HEAL else 14
OUT = Path(os.environ["PROBE_OUT"])


def together(place: str, handle: Any) -> None:
    """Die at a place in both groups at once, each with the step before it committed."""
    if place == os.environ.get("PROBE_KILL"):
        if handle is not None:
            handle.wait(timeout=20)
        (OUT / f"{place}.{probe.RANK}").touch()
        while not all((OUT / f"{place}.{group}").exists() for group in (0, 1)):
            time.sleep(0.01)
    here(place)


def made(model: nn.Module, optimizer: Any, group: int, least: int) -> Manager:
    """Make the manager of a group, whose peers heal model and optimizer."""

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        probe.note("healed", manager.current_step())

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=10)), min_replica_size=least,
        load_state_dict=load, replica_id=f"group{group}_",
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1,
        timeout=datetime.timedelta(seconds=20), init_sync=False,
    )  # fmt: skip
    manager.store_that_lives_as_long = store
    return manager


def train(group: int) -> None:
    """Train as one replica group."""
    torch.manual_seed(3)
    model = Net() if not HEAL else nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = made(model, adamw, group, least=1 if HEAL else 2)
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    data = Data(augment=not HEAL)
    sampler = lightck.ResumableSampler(data, seed=1, rank=group, world=2)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(7 + group)
    np.random.seed(group)
    random.seed(group)
    handle = None
    if ON:
        from lightck.integrations.torchft import attach

        run = attach(manager, replicated, optimizer, probe.PATH, group=group,
                     extras={"data": sampler})  # fmt: skip
        handle = run.handle
        probe.note("restored", run.info and run.info.step)
    while manager.current_step() < STEPS:
        for x, y in loader:
            step = manager.current_step()
            optimizer.zero_grad()
            loss = F.cross_entropy(replicated(x), y)
            together(f"forward {step}", handle)
            if HEAL and group == 1 and step == 5 and handle is not None and run.info is None:
                handle.wait(timeout=20)
                os.kill(os.getpid(), 9)
            loss.backward()
            optimizer.step()
            if not HEAL:
                tell(f"batch {step}", [x, y])
                tell(f"loss {step}", loss)
            else:
                time.sleep(0.2)
            if handle is not None:
                assert handle.step == manager.current_step(), (handle.step, manager.current_step())
            if group == 0 and step == 9:
                (OUT / "gone on").touch()
            if manager.current_step() >= STEPS:
                break
    if ON:
        run.close()
        probe.note("newest", max(lightck.snapshots(f"{probe.PATH}/replica-{group}")["step"]
                                 .to_pylist()))  # fmt: skip
    probe.end(model)
    manager.shutdown(wait=False)
    os._exit(0)


def start(group: int) -> int:
    """Fork a group."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            vars(probe)["RANK"] = group
            train(group)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    return pid


group = int(os.environ.pop("RANK", "0"))
os.environ.pop("WORLD_SIZE", None)
port = os.environ.get("MASTER_PORT") or str(29000 + os.getpid() % 900)
os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
lighthouse: Any = None
if HEAL:
    pid = os.fork()
    if pid == 0:  # threads of its own, which must not be forked
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # ends with its parent
        lighthouse = LighthouseServer(
            bind=f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=2000, quorum_tick_ms=50,
            heartbeat_timeout_ms=2000,
        )  # fmt: skip
        time.sleep(1000)
    children = {start(each): each for each in (0, 1)}
    while children:
        pid, status = os.wait()
        which = children.pop(pid)
        print("group", which, "ended with", status, flush=True)
        if which == 1 and os.WIFSIGNALED(status):
            while not (OUT / "gone on").exists():
                time.sleep(0.02)
            children[start(1)] = 1
        elif status != 0:
            os._exit(1)
    os._exit(0)
if group == 0:
    lighthouse = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=2, join_timeout_ms=60_000,
                                  quorum_tick_ms=50, heartbeat_timeout_ms=5000)  # fmt: skip
train(group)
