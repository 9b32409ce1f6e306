"""A failure on one rank is saved on all, though the others hang in a collective by then."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from test_peer_death import AT, KIND, NEVER, Events, Mortal, go_on

from lightck.types import Failure
from support.distributed import ranks
from support.proof import record

LONG_S = 100.0


class Failing(Mortal):
    """Raises where others kill themselves."""

    def _die_in(self, phase: str) -> None:
        if phase == self.phase and self.iteration == AT:
            raise ValueError("no such file")


def say_what_is_saved(me: ranks.Me, events: Events) -> None:
    deadline = time.monotonic() + LONG_S
    while not events.of("saved"):
        assert time.monotonic() < deadline, events.seen
        time.sleep(0.005)
    me.send((events.of("saved")[-1], time.monotonic()))


@pytest.mark.parametrize("how", ["exception", "signal"])
def test_the_last_complete_step_is_saved_of_one_instant_that_all_ranks_have(
    region_dir: Path, how: str
) -> None:
    """No error of gloo tells the other: the failing rank's connections stay.

    At the exception both are inside an iteration. At the signal the one has not begun it: the
    whole snapshot has both instants, and the job goes on from the early one.
    """
    early = how == "signal"

    def train(me: ranks.Me) -> None:
        events = Events()
        job = Failing(me.rank, KIND, "forward" if me.rank else "")
        failure = Failure(hang_steps=1e6)  # another reason, which might come first
        handle = job.attach(region_dir, failure=failure, policy=NEVER, on_error=lambda error: None)
        tell = threading.Thread(target=say_what_is_saved, args=(me, events), daemon=True)
        tell.start()
        while job.iteration < AT - 1:
            job.iterate()
        try:
            if early and me.rank:
                os.kill(os.getpid(), signal.SIGUSR1)
                me.pause()
            job.iterate()
        except ValueError as error:
            handle.snapshot_now(type(error).__name__)
            me.pause()

    with ranks.started(2, train) as job:
        (theirs, then), (ours, now) = job.receive(1), job.receive(0)
    assert theirs["reason"] == ("SIGUSR1" if early else "ValueError")
    assert ours["reason"] == f"rank 1: {theirs['reason']}"
    assert all(each["fresh"] and each["step"] == AT - 1 for each in (theirs, ours))
    record(f"failing_together_{how}", {"other_rank_saved_after_s": round(now - then, 3)})
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT - 1 and info.early == early
