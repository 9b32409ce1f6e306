"""A rank stands still with no snapshot due, ever: another one saves the step whole, and the job
that is started anew goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_peer_death import AT, KIND, NEVER, PHASES, Events, Mortal, go_on, until

import lightck
from support.distributed import ranks

BEFORE = ["forward", "backward"]


class Frozen(Mortal):
    """Stops itself with SIGSTOP at one instant, where its like kills itself."""

    def _die_in(self, phase: str) -> None:
        if phase == self.phase and self.iteration == self.last:
            self.tell(time.monotonic())
            os.kill(os.getpid(), signal.SIGSTOP)


def frozen_life(path: Path, frozen: int, phase: str, **settings: Any) -> Callable[..., Any]:
    """Trains until the rank `frozen` stops; the others tell when it is saved, and then wait."""

    def train(me: ranks.Me) -> Any:
        events = Events()
        job = Frozen(me.rank, KIND, phase if me.rank == frozen else "")
        job.resume(path, 300 + me.rank)
        job.handle = job.attach(path, failure="jit", on_error=lambda error: None, **settings)
        me.send("attached")
        try:
            while True:
                job.iterate()
                me.send(job.iteration)
        except RuntimeError:
            return events.seen

    return train


def saved_whole(path: Path) -> bool:
    """Tell whether a failure region holds a committed step."""
    try:
        return any(each.is_file() for each in path.glob("failure-*.lck")) and any(
            row["step"] >= AT - 1
            for row in lightck.snapshots(path).to_pylist()
            if "failure-" in row["file"]
        )
    except lightck.LightckError:
        return False


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_stands_still_costs_no_step_that_another_has(
    region_dir: Path, phase: str
) -> None:
    """Both are killed then; the job goes on from the newest step that a rank has completed."""
    with ranks.started(2, frozen_life(region_dir, 1, phase, policy=NEVER)) as job:
        until(lambda: saved_whole(region_dir))
        job.kill(0)
        job.kill(1)
    info = go_on(region_dir, 2)
    assert info is not None and info.step == (AT - 1 if phase in BEFORE else AT)
    assert info.early == (phase not in BEFORE)
