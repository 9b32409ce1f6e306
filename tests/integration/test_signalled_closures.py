"""Signals to a training that is inside of `optimizer.step(closure)`, with no step ever due."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_signalled_training as signalled
import torch
from test_held_training import SLOW_S, trained
from test_signalled_training import AT, INT, LAST, TERM, USR1, ended

from support import faults
from support.loops import steps_at
from support.processes import Parent
from support.watched import process, stuck

INSIDE = ["forward", "backward"]


class Closed(signalled.Training):
    """The same training, but for where its iterations run."""

    def __init__(self, at: signalled.Phase = lambda phase: None) -> None:
        super().__init__(at)
        self.optimizer._optimizer_step_pre_hooks.clear()  # somebody's: nothing could be saved
        self.optimizer.register_step_post_hook(lambda *_: self._reached("update"))

    def closure(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(6, 8)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def run(self, last: int) -> None:
        while self.step < last:
            loss = self.optimizer.step(self.closure)
            self.step += 1
            self.losses[self.step] = loss.item().hex()
            self._pending()


first_life = partial(signalled.first_life, kind=Closed)
second_life = partial(signalled.second_life, kind=Closed)


@pytest.mark.parametrize("then", [stuck, lambda: time.sleep(600)], ids=["stuck", "sleep"])
@pytest.mark.parametrize("phase", INSIDE)
def test_sigterm_inside_of_a_closure_loses_no_more_than_its_minibatch(
    region_dir: Path, phase: str, then: Callable[[], object]
) -> None:
    with process(first_life(region_dir, TERM, phase, then)) as child:
        assert ended(child) == -TERM
    assert second_life(region_dir) == (AT - 1, False)


@pytest.mark.parametrize("phase", INSIDE)
def test_sigint_inside_of_a_closure_interrupts_when_the_step_is_saved(
    region_dir: Path, phase: str
) -> None:
    code = first_life(region_dir, INT, phase, lambda: time.sleep(600))
    with process(code) as child:
        assert child.receive() == "interrupted"
        assert ended(child) == 0
    assert second_life(region_dir) == (AT - 1, False)


@pytest.mark.parametrize("phase", INSIDE)
def test_sigusr1_inside_of_a_closure_saves_and_sigkill_behind_it_loses_no_more(
    region_dir: Path, phase: str
) -> None:
    def code(parent: Parent) -> Any:
        def reached(now: str) -> None:
            if now == phase:
                os.kill(os.getpid(), USR1)
                parent.pause()  # a signal that comes while this waits does not end it
                os.kill(os.getpid(), signal.SIGKILL)

        def decide(saved: Any) -> None:
            parent.send((saved.reason, saved.step, saved.fresh, saved.early))

        training = Closed(reached)
        training.restore(region_dir)
        training.attach(region_dir, on_failure=decide)
        training.run(LAST)

    with process(code) as child:
        assert child.receive() == ("SIGUSR1", AT - 1, True, False)
        child.let_go()
        assert ended(child) == -signal.SIGKILL
    assert second_life(region_dir) == (AT - 1, False)


def test_a_hang_inside_of_a_closure_is_saved(region_dir: Path) -> None:
    code = first_life(region_dir, 0, "backward", stuck, hang_s=2.0, hang_exit_s=0.0)
    with process(code) as child:
        assert ended(child) == 75
    assert second_life(region_dir) == (AT - 1, False)


def test_sigterm_in_the_update_behind_a_closure_saves_no_mixture(region_dir: Path) -> None:
    with process(first_life(region_dir, TERM, "update", stuck, grace_s=0.3)) as child:
        assert ended(child) == -TERM
    assert second_life(region_dir) == (None, False)


@pytest.mark.parametrize("phase", [*INSIDE, "update"])
def test_every_step_that_was_trained_is_saved_before_sigterm_ends_the_process(
    disk_dir: Path, phase: str
) -> None:
    """Training goes on until its closure has returned, and is held there: see `TrainingPause`."""

    def code(parent: Parent) -> None:
        def reached(now: str) -> None:
            if now == phase:
                faults.delay(faults.SYNC, SLOW_S)
                os.kill(os.getpid(), TERM)

        training = Closed(reached)
        training.optimizer.register_step_post_hook(lambda *_: parent.send(training.step + 1))
        training.restore(disk_dir)
        with training.attach(disk_dir):
            training.run(10**9)

    with process(code) as child:
        told = trained(child)
        assert ended(child) == -TERM
    assert told == list(range(1, told[-1] + 1)) and told[-1] >= AT - 1
    assert steps_at(disk_dir) == told[-1:]
