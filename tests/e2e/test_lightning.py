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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightck
from support import processes
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


def _fit(path: Path, stop: int | None = None, **settings: Any) -> list[list[int]]:
    """Fit a new model for two epochs over six samples; return the batches that it got."""
    import lightning

    from lightck.integrations.lightning import LightckCallback

    got: list[list[int]] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, given: Any, i: int) -> Any:
            if self.global_step + 1 == stop:
                raise Broken("here")
            got.append(given.tolist())
            return self.net(given.float().unsqueeze(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    sampler = lightck.ResumableSampler(range(6), seed=3)
    loader: Any = DataLoader(range(6), 2, sampler=sampler)  # type: ignore[arg-type]
    callback = LightckCallback(path, **({"data": sampler} if settings.get("data") else {}))
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[callback], logger=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    with contextlib.suppress(Broken), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), loader)
    return got


@pytest.mark.parametrize("data", [False, True])
def test_a_resumed_fit_goes_on_with_the_next_batch(region_dir: Path, data: bool) -> None:
    def both() -> tuple[Any, Any, Any]:
        whole = _fit(region_dir / "whole")
        first = _fit(region_dir / "run", stop=5, data=data)
        return whole, first, _fit(region_dir / "run", data=data)

    whole, first, rest = processes.run(both)
    assert len(whole) == 6 and first == whole[:4]
    assert rest == whole[-len(rest) :] and len(rest) in (2, 3)  # the fourth was saved early


def test_fits_leave_no_handler_behind_however_many_there_are(region_dir: Path) -> None:
    def fits() -> list[bool]:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        for i in range(4):
            _fit(region_dir / str(i), stop=3 if i == 2 else None)
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        return [one is other or one == other for one, other in zip(before, after, strict=True)]

    assert processes.run(fits) == [True, True]


def test_a_fit_with_nothing_to_train_leaves_no_handler_behind(region_dir: Path) -> None:
    def fits() -> bool:
        before = signal.getsignal(signal.SIGTERM)
        for _ in range(3):
            _fit(region_dir / "run")
        return signal.getsignal(signal.SIGTERM) is before

    assert processes.run(fits)
