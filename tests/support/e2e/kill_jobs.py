"""Training that is killed again and again: at any instant, or inside a chosen phase.

A phase that native code works in is hit by construction: a delay is set at a point inside it, and
the process dies when one of its threads is seen asleep there.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import lightck
from lightck.region.region import Continuation, Region
from support import faults
from support.e2e.jobs import CLASSES, Plain, small_model
from support.e2e.trainer import Run

_NANOSLEEP = {"35", "230", "101", "115"}
"""nanosleep and clock_nanosleep, x86-64 and aarch64."""
_DELAY_S = 60.0
_LOOK_S = 0.001

CALLS: dict[str, tuple[str, int, bool]] = {
    "before the payload is verified": ("fetch", 1, False),
    "payload verified": ("fetch", 1, True),
    "live tensors half filled": ("fetch", 2, True),
    "restored": ("mark_continued", 1, True),
    "before the timeline begins": ("begin_timeline", 1, False),
    "timeline begun": ("begin_timeline", 1, True),
}
"""Phases of recovery: method of Region or Continuation, which call, before or after it."""

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
    """Let the first thread that comes to the point from now on be killed there, and all with it."""
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
    """The `count`th call of a method of Region or Continuation is the last thing that happens."""
    owner = Region if hasattr(Region, name) else Continuation
    method: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and not after:
            die()
        result = method(*args, **kwargs)
        if calls[0] == count:
            die()
        return result

    setattr(owner, name, counted)


class Trained(Plain):
    """BatchNorm, dropout, momentum or AdamW, a scheduler, shuffled data, an extra that grows.

    params: `optimizer`, `settings` for attach, and `phase` (with `at`, a step) to die in; or
    `held_at`, the step from which on no commit gets anywhere.
    """

    steps = 60

    def setup(self) -> None:
        self.settings = self.params.get("settings", {})
        self.models = [small_model()]
        parameters = self.model.parameters()
        if self.params.get("optimizer") == "sgd":
            self.optimizers = [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]
        elif self.params.get("optimizer") == "streamed":
            self.optimizers = [lightck.optim.AdamW(parameters, lr=0.01)]
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
        if t == self.params.get("held_at") and run.handle:
            run.handle.wait()  # every slot but one is free then: the next snapshot cannot slip
            faults.delay(faults.COMMIT, _DELAY_S)  # longer than it lives
        chosen = torch.randperm(64, generator=self.order)[:12]
        # Drawn before the forward, dropout in it: the generator must be right at both instants.
        x = self.x[chosen] + 0.1 * torch.randn(12, 6)
        loss = F.cross_entropy(self.model(x), self.y[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.extras["scheduler"].step()
        if t % 6 == 0:  # soon the region is too small
            # Not drawn: after a restore to the end of this update nobody would draw it again.
            self.log["history"].append(torch.arange(60_000) + loss.detach())
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
    """One of two trainers that want the same region at once; chance decides which of them gets it.

    The owner holds the region until the other one has been told. After `lead` more steps it asks to
    be killed, and trains on until that happens. The other one kills it, takes over with the model
    it has, and dies by itself `lead` steps later, if training is not over before.

    params: `hears` and `says`, two pipes, crossed between the two; `lead`.
    """

    steps = 40
    leave: Callable[[], None] = staticmethod(die)
    """The trainer does this when `lead` steps are done."""

    def train(self, run: Run) -> None:
        if run.mode == "plain":
            super().train(run)
            return
        self.setup()
        self.meet()
        try:
            begin = run.begin()
        except lightck.RegionBusyError as error:
            run.write(lost=str(error))
            self.outlive(self.owner_that_was_told())
            begin = run.begin()
        else:
            run.write(owner=os.getpid())
            self.say(f"owner {os.getpid()}")
            self.hear("lost")
            self.leave = self.ask_to_be_killed
        for t in range(begin + 1, run.last + 1):
            if t > begin + self.params["lead"]:
                self.leave()
            run.now = t
            run.done(t, self.step(t, run))
        run.finish()

    def meet(self) -> None:
        """Neither goes on before both are here. From now on each knows when the other is gone."""
        names = (self.params["hears"], self.params["says"])
        order = ((0, "r"), (1, "w")) if names[0] < names[1] else ((1, "w"), (0, "r"))
        found = {i: open(names[i], how, buffering=1) for i, how in order}  # noqa: SIM115
        self.hears, self.says = found[0], found[1]

    def say(self, text: str) -> None:
        print(text, file=self.says)

    def hear(self, expected: str) -> str:
        """Return what follows `expected` in the other's next line."""
        line = self.hears.readline()
        assert line.startswith(expected), f"heard {line!r} instead of {expected!r}"
        return line.removeprefix(expected).strip()

    def owner_that_was_told(self) -> int:
        """Descriptor of the owner's process, which holds the region for as long as this takes."""
        owner = os.pidfd_open(int(self.hear("owner")))
        self.say("lost")
        return owner

    def outlive(self, owner: int) -> None:
        """Kill the owner and wait until it is gone: a process's locks go before its end is seen."""
        self.hear("kill me")
        signal.pidfd_send_signal(owner, signal.SIGKILL)
        select.select([owner], [], [])
        os.close(owner)

    def ask_to_be_killed(self) -> None:
        self.leave = lambda: None
        self.say("kill me")

    def finished(self, run: Run) -> None:
        """The owner does not come to an end of its own."""
        if self.leave is not die:
            self.leave()
            self.hear("nothing: killed while it waits here")
