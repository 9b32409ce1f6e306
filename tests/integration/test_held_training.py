"""While a signal that ends the process is saved for, nothing is trained that nobody would save."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_signalled_training import AT, LAST, NEVER, PHASES, Training, golden, second_life

import lightck
from lightck.loop.checkpointer import TrainingPause
from lightck.types import Failure, Saved
from support import faults
from support.loops import steps_at
from support.processes import Child, Parent
from support.watched import process

TERM = signal.SIGTERM
SLOW_S = 0.2  # of every sync: hundreds of steps would fit into a commit


class Telling(Training):
    """Tells the parent of every step that has ended."""

    def __init__(self, parent: Parent, at: Callable[[str], object]) -> None:
        super().__init__(at)
        self.optimizer.register_step_post_hook(lambda *_: parent.send(self.step + 1))


def life(path: Path, phase: str, last: int = 10**9, **failure: Any) -> Callable[[Parent], Any]:
    """Sends itself SIGTERM in one phase, and trains on."""

    def code(parent: Parent) -> Any:
        def reached(now: str) -> None:
            if now == phase:
                faults.delay(faults.SYNC, SLOW_S)
                os.kill(os.getpid(), TERM)

        training = Telling(parent, reached)
        training.restore(path)
        with training.attach(path, **failure) as handle:
            training.run(last)
            handle.detach()
        return training.state()

    return code


def trained(child: Child) -> list[Any]:
    """Return what the child tells until it ends."""
    told = []
    with pytest.raises(AssertionError, match="without a word"):
        while True:
            told.append(child.receive())
    return told


@pytest.mark.parametrize("phase", [*PHASES, "update"])
def test_every_step_that_was_trained_is_saved_before_sigterm_ends_the_process(
    disk_dir: Path, phase: str
) -> None:
    with process(life(disk_dir, phase)) as child:
        told = trained(child)
        assert child.join() == -TERM
    assert told == list(range(1, told[-1] + 1)) and told[-1] >= AT - 1
    assert steps_at(disk_dir) == told[-1:]
    if told[-1] < LAST:
        assert second_life(disk_dir)[0] == told[-1]


def test_a_training_that_the_user_lets_go_on_is_let_go(disk_dir: Path) -> None:
    held: list[Saved] = []

    def decide(saved: Saved) -> bool:
        held.append(saved)
        return True

    with process(life(disk_dir, "backward", LAST, on_failure=decide, grace_s=1e4)) as child:
        assert [child.receive() for _ in range(LAST)] == list(range(1, LAST + 1))
        assert child.receive() == golden()[1]
        assert child.join() == 0


def test_between_two_optimizers_of_a_step_nothing_is_held(disk_dir: Path) -> None:
    """The save waits for the second one."""

    def code(parent: Parent) -> None:
        training = Training()
        first = torch.optim.SGD(training.model[:2].parameters(), 0.1)
        second = torch.optim.SGD(training.model[3].parameters(), 0.1)
        both, failure = [first, second], Failure(grace_s=10.0)
        with lightck.attach(
            training.model, both, disk_dir, policy=NEVER, failure=failure
        ) as handle:
            while True:
                training.model(torch.randn(6, 8)).square().mean().backward()
                first.step()
                if handle.step == AT - 1:
                    faults.delay(faults.SYNC, SLOW_S)
                    os.kill(os.getpid(), TERM)
                    time.sleep(0.05)  # the watchdog has heard of it
                second.step()
                parent.send(handle.step)

    with process(code) as child:
        told = trained(child)
        assert child.join() == -TERM
    assert steps_at(disk_dir) == told[-1:]


def test_what_is_held_is_let_go_at_the_end_and_at_the_deadline_and_nowhere_else() -> None:
    hold = TrainingPause()
    hold.here(fence=True)
    hold.here(fence=False)
    hold.begin(time.monotonic() + 0.05, at_fence=True)
    hold.here(fence=False)
    hold.here(fence=True)
    assert time.monotonic() >= hold.until_s
    hold.begin(time.monotonic() + 600.0, at_fence=False)
    hold.here(fence=True)
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (hold.here(fence=False), passed.set()))
    thread.start()
    assert not passed.wait(0.1)
    hold.end()
    thread.join(30.0)
    assert passed.is_set()
