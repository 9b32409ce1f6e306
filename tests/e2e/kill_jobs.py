"""Training that is killed again and again: at any instant, or inside a chosen phase.

A phase that native code works in is hit by construction: a delay is set at a point inside it, and
the process dies when one of its threads is seen asleep there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import faults
import torch
from jobs import CLASSES, Plain, small_model
from torch.nn import functional as F
from trainer import Run

import lightck
from lightck.region.region import Region

_NANOSLEEP = {"35", "230", "101", "115"}
"""nanosleep and clock_nanosleep, x86-64 and aarch64."""
_DELAY_S = 60.0
_LOOK_S = 0.001

CALLS: dict[str, tuple[str, int, bool]] = {
    "before the payload is verified": ("fetch", 1, False),
    "payload verified": ("fetch", 1, True),
    "live tensors half filled": ("fetch", 2, True),
    "restored": ("carry_on", 1, True),
    "before the timeline begins": ("begin_timeline", 1, False),
    "timeline begun": ("begin_timeline", 1, True),
}
"""Phases of recovery: method of Region, which call, before or after it."""

DELAYS = {
    "creation": faults.ALLOCATE,
    "growth": faults.ALLOCATE,
    "invalidation": faults.INVALIDATE,
    "copying": faults.COPY,
    "payload committed": faults.COMMIT,
    "manifest committed": faults.RECORD,
    "closing": faults.RECORD,
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_delay(point: int) -> None:
    """From now on: the first thread that comes to the point is killed there, and all with it."""
    faults.delay(point, _DELAY_S)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    pause = threading.Event()
    while not any(_asleep(task) for task in os.listdir("/proc/self/task")):
        pause.wait(_LOOK_S)
    die()


def _asleep(task: str) -> bool:
    if int(task) == threading.get_native_id():
        return False
    try:
        with open(f"/proc/self/task/{task}/syscall") as file:
            return file.read().split()[0] in _NANOSLEEP
    except (FileNotFoundError, ProcessLookupError):
        return False


def die_in_call(name: str, count: int, after: bool) -> None:
    """The `count`th call of a method of Region is the last thing that happens."""
    method: Callable[..., Any] = getattr(Region, name)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and not after:
            die()
        result = method(*args, **kwargs)
        if calls[0] == count:
            die()
        return result

    setattr(Region, name, counted)


class Trained(Plain):
    """BatchNorm, dropout, momentum or AdamW, a scheduler, shuffled data, an extra that grows.

    params: `optimizer`, `settings` for attach, and `phase` (with `at`, a step) to die in.
    """

    steps = 60

    def setup(self) -> None:
        self.settings = self.params.get("settings", {})
        self.models = [small_model()]
        parameters = self.model.parameters()
        if self.params.get("optimizer") == "sgd":
            self.optimizers = [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]
        else:
            self.optimizers = [torch.optim.AdamW(parameters, lr=0.01)]
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.log: dict[str, Any] = {"history": []}
        self.order = torch.Generator().manual_seed(11)
        self.extras = {"scheduler": scheduler, "log": self.log, "order": self.order}
        data = torch.Generator().manual_seed(12)
        self.x = torch.randn(64, 6, generator=data)
        self.y = torch.randint(0, CLASSES, (64,), generator=data)

    def step(self, t: int, run: Run) -> Any:
        if t == self.params.get("at") and self.params["phase"] in DELAYS and run.handle:
            self.arm("growth" if self.params["phase"] == "growth" else "")
        chosen = torch.randperm(64, generator=self.order)[:12]
        loss = F.cross_entropy(self.model(self.x[chosen]), self.y[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.extras["scheduler"].step()
        if t % 6 == 0:  # soon the region is too small
            self.log["history"].append(torch.rand(60_000))
        return loss.detach()

    def arm(self, phase: str) -> None:
        """Die at the delay of the job's phase, `phase` being the place that this is called from."""
        wanted = self.params.get("phase")
        if wanted in ("creation", "closing", "growth"):
            if wanted == phase:
                die_in_delay(DELAYS[wanted])
        elif wanted in DELAYS:
            die_in_delay(DELAYS[wanted])

    def restore(self, run: Run) -> lightck.RestoreInfo | None:
        if self.params.get("phase") in CALLS:
            die_in_call(*CALLS[self.params["phase"]])
        return super().restore(run)

    def attach(self, run: Run) -> lightck.Handle:
        if self.params.get("phase") == "creation":
            self.arm("creation")
        return super().attach(run)

    def finished(self, run: Run) -> None:
        if self.params.get("phase") == "closing":
            self.arm("closing")


class Racing(Trained):
    """One of several trainers that want the same region."""

    steps = 40

    def train(self, run: Run) -> None:
        try:
            super().train(run)
        except (lightck.RegionBusyError, lightck.UnrestoredError) as error:
            run.write(lost=type(error).__name__, why=str(error))

    def attach(self, run: Run) -> lightck.Handle:
        handle = super().attach(run)
        run.write(owned=time.monotonic_ns())
        return handle
