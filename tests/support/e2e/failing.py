"""A training that fails where it is told to, in a process that ends by that exception."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional as F

import lightck
from lightck.loop.hooks import layers
from support.e2e.jobs import batch, small_model
from support.e2e.trainer import Job, Run

PHASES = (
    "data",  # before the next batch is drawn
    "drawn",  # behind it
    "forward",
    "backward",
    "micro-batches",  # between them
    "updated",  # the step is complete, what the loop does about it is not
    "evaluation",
    "update",  # inside it
)


class Broken(Exception):
    """The training fails with this exception."""


class Never:
    """A policy by which no step is ever due."""

    def due(self, moment: Any) -> bool:
        """Say that no step is due."""
        return False


class Failing(Job):
    """Dropout, BatchNorm, a schedule, a GradScaler, micro-batches; `at` names step and phase.

    What is to be done between two steps is derived from the step's number, so that a loop that was
    restored before it does it.
    """

    steps = 6

    @property
    def settings(self) -> dict[str, Any]:  # type: ignore[override]
        policy = self.params.get("policy")
        return {"policy": policy or Never(), "failure": "jit", **self.params.get("settings", {})}

    def setup(self) -> None:
        self.models = [small_model()]
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01)]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda t: 0.9**t)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.seen = {"batches": 0}  # a position, like the generator's
        self.extras = {
            "schedule": self.schedule,
            "scaler": self.scaler,
            "seen": lightck.at_step(self.seen),
        }

    def train(self, run: Run) -> None:
        """The loop, with the engine around it."""
        self.run = run
        self.setup()
        begin = run.begin()
        self.arm()
        handle = contextlib.nullcontext() if run.handle is None else run.handle
        try:
            with handle:
                for t in range(begin + 1, run.last + 1):
                    run.now = t
                    run.done(t, self.step(t, run))
        except Broken as error:
            run.write(broke=str(error))
            return
        run.finish()

    def fail(self, phase: str) -> None:
        """Fail here, if this is the place."""
        if self.run.mode == "attach" and self.params.get("at") == [self.run.now, phase]:
            raise Broken(phase)

    def arm(self) -> None:
        """Hooks for the places inside."""
        self.model[2].register_forward_hook(
            lambda module, *_: self.fail("forward") if module.training else None
        )
        parameters = [parameter for _, parameter in layers(self.model)]
        parameters[-1].register_post_accumulate_grad_hook(lambda _: self.fail("backward"))
        # Behind the update, and before the engine knows of it: everything has changed.
        self.optimizer.register_step_post_hook(lambda *_: self.fail("update"))

    def step(self, t: int, run: Run) -> Any:
        while self.schedule.last_epoch < t - 1:
            self.schedule.step()
        self.fail("data")
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(2):
            x, y = batch()
            self.seen["batches"] += 1
            self.fail("drawn")
            loss = F.cross_entropy(self.model(x), y) / 2
            self.scaler.scale(loss).backward()
            total += loss.detach()
            if micro == 0:
                self.fail("micro-batches")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.fail("updated")
        self.evaluate()
        return total

    def evaluate(self) -> None:
        """Draws nothing, changes nothing."""
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, 6))
            self.fail("evaluation")
        self.model.train()


class FailingClosed(Failing):
    """The same as Lightning has it: a closure does forward, zero_grad and backward.

    That of a micro-batch that no step takes is called by itself; the optimizer calls the last one.
    """

    def setup(self) -> None:
        super().setup()
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)  # else Lightning passes no closure
        self.extras["scaler"] = self.scaler

    def step(self, t: int, run: Run) -> Any:
        while self.schedule.last_epoch < t - 1:
            self.schedule.step()
        self.fail("data")
        total = torch.zeros(())
        for micro in range(2):
            x, y = batch()
            self.seen["batches"] += 1
            self.fail("drawn")

            def closure(x: Any = x, y: Any = y, micro: int = micro) -> Any:
                loss = F.cross_entropy(self.model(x), y) / 2
                if micro == 0:
                    self.optimizer.zero_grad()
                loss.backward()
                return loss.detach()

            total += self.scaler.step(self.optimizer, closure) if micro else closure()
            if micro == 0:
                self.fail("micro-batches")
        self.fail("updated")
        self.evaluate()
        return total
