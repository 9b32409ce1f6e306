"""Lightning's automatic optimization, by Lightning itself: every iteration runs in a closure.

It draws the batch, calls its optimizer's `step`, and in there forward, zero_grad, backward, the
callbacks before the update, and clipping; what is accumulated is called without a step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.e2e.failing import Broken, Never
from support.e2e.jobs import batch, small_model
from support.e2e.resume import Bed, same_end, same_steps
from support.e2e.trainer import Job, Run

INSIDE = ("forward", "zero_grad", "backward", "clipping")


@pytest.fixture(autouse=True)
def _lightning() -> None:
    pytest.importorskip("lightning", reason="SKIPPED: lightning is not installed")


class Lit(Job):
    """A LightningModule and its Trainer; `at` names step and phase of what ends it."""

    steps = 5

    @property
    def settings(self) -> dict[str, Any]:  # type: ignore[override]
        return {"policy": self.params.get("policy") or Never(), "failure": "jit"}

    def setup(self) -> None:
        import lightning

        job = self

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = small_model()

            def training_step(self, given: Any, i: int) -> Any:
                x, y = batch()
                return F.cross_entropy(self.net(x), y)

            def configure_optimizers(self) -> Any:
                return job.optimizer

        self.models = [Module()]
        options = self.params.get("options", {})
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)]

    def train(self, run: Run) -> None:
        import lightning

        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="lightck")
        self.run = run
        self.setup()
        run.now = run.begin()
        self.arm()
        micro = self.params.get("micro", 1)
        trainer = lightning.Trainer(
            max_steps=run.last - run.now,
            accumulate_grad_batches=micro,
            callbacks=[self.callback(lightning.Callback)],
            gradient_clip_val=0.5,
            **dict.fromkeys(("logger", "enable_checkpointing"), False),
            **dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False),
            accelerator="cpu",
        )
        handle = contextlib.nullcontext() if run.handle is None else run.handle
        try:
            with handle:
                trainer.fit(self.model, [0] * 100)
        except Broken as error:
            run.write(broke=str(error))
            return
        run.finish()

    def callback(self, kind: Any) -> Any:
        job, run = self, self.run

        class Told(kind):  # type: ignore[misc]
            steps = 0

            def on_before_zero_grad(self, *_: Any) -> None:
                job.end("zero_grad")

            def on_before_optimizer_step(self, *_: Any) -> None:
                job.end("clipping")

            def on_train_batch_end(self, trainer: Any, module: Any, told: Any, *_: Any) -> None:
                if trainer.global_step > self.steps:
                    self.steps = trainer.global_step
                    run.now += 1
                    run.done(run.now, told["loss"].detach())

        return Told()

    def arm(self) -> None:
        self.model.net[2].register_forward_hook(lambda *_: self.end("forward"))
        self.model.net[0].weight.register_hook(lambda _: self.end("backward"))

    def end(self, phase: str) -> None:
        """End here, if this is the place."""
        if self.run.mode == "attach" and self.params.get("at") == [self.run.now + 1, phase]:
            if self.params.get("how") == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(600)
            raise Broken(phase)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("phase", INSIDE)
def test_an_exception_inside_of_its_closure_goes_on_bit_for_bit(
    bed: Bed, phase: str, micro: int
) -> None:
    params = {"micro": micro}
    plain = bed.run(Lit, "plain", params=params).check_ended()
    first = bed.run(Lit, "attach", params={**params, "at": [4, phase]}).check_ended()
    assert first.value("broke") == phase
    second = bed.run(Lit, "resume", params=params).check_ended()
    same_steps(first, plain)
    same_end(second, plain)
    assert (second.value("restored"), second.value("early")) == (3, False)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_sigterm_inside_of_its_closure_goes_on_bit_for_bit(bed: Bed, phase: str) -> None:
    params = {"options": {"fused": True}}
    plain = bed.run(Lit, "plain", params=params).check_ended()
    end = {**params, "at": [4, phase], "how": "signal"}
    first = bed.run(Lit, "attach", params=end)
    assert first.status is not None and os.WTERMSIG(first.status) == signal.SIGTERM, first.log
    second = bed.run(Lit, "resume", params=params).check_ended()
    same_steps(first, plain)
    same_end(second, plain)
    assert (second.value("restored"), second.value("early")) == (3, False)


def test_its_snapshots_are_of_every_step_and_what_is_killed_goes_on(bed: Bed) -> None:
    params = {"policy": 1}
    plain = bed.run(Lit, "plain", params=params).check_ended()
    first = bed.run(Lit, "attach", params=params, kill_step=4, kill_where="after").check_killed()
    second = bed.run(Lit, "resume", params=params).check_ended()
    same_steps(first, plain)
    same_end(second, plain)
    assert (second.value("restored"), second.value("early")) == (3, False)
