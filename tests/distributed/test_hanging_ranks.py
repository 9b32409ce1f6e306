"""A rank hangs where its peers go on without it: they end after it, and have written its share.

No step is ever due. Nobody is taken to hang before the order of events allows it: `watched` says
when, and a rank that waits would do so for hours.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_frozen_ranks import whole_steps
from test_peer_death import AT, KIND, LAST, NEVER, Mortal, go_on, golden, until
from torch import nn
from torch.autograd import Variable

from lightck.failure import watchdog, whole_save
from lightck.failure.watchdog import HANG_STATUS
from lightck.region import location
from lightck.region.native_region import FENCE, FORWARD, STEP_END
from lightck.region.region import open_and_recover
from lightck.types import Failure, Saved
from support import internals
from support.distributed import ranks
from support.distributed.ranks import Gone, Me
from support.distributed.resumed import same, state_of

HOURS_S = 1e5
INSIDE = ["fence", "half", "updated"]
"""The update has begun."""
BEHIND = ["allreduce", "gathered"]
"""All of the rank's gradients have come."""


class Standing(Mortal):
    """Does something else where others die; it is told of `allreduce` and `gathered`, too."""

    def __init__(self, me: Me, phase: str, stand: Callable[[], object]) -> None:
        super().__init__(me.rank, KIND, phase, policy=NEVER)
        self.stand = stand
        self.gathered = partial(self._die_in, "gathered")

    def _die_in(self, phase: str) -> None:
        if phase == "backward":
            # Asked for before DDP asks for its own: it has not waited for its buckets yet.
            engine: Any = Variable._execution_engine
            engine.queue_callback(partial(self._die_in, "allreduce"))
        if phase == self.phase and self.iteration == AT:
            self.stand()


def watched(handle: Any, **settings: float) -> None:
    """Let a rank that stands be taken to hang from now on."""
    guard = internals.guard(handle)
    guard.hang.failure = replace(guard.hang.failure, **{"hang_s": 0.2, "hang_steps": 1, **settings})


def unwatched(guard: Any) -> None:
    guard.hang.failure = replace(guard.hang.failure, hang_s=HOURS_S, hang_steps=1e6)


def rests() -> None:
    while True:
        time.sleep(600)


def life(
    path: Path,
    phases: dict[int, str],
    then: Callable[[Me, Any], object],
    waits: str = "forward",
    **failure: Any,
) -> Callable[[Me], Any]:
    """Some ranks stand in a phase of iteration AT, and `then` says how; the others go ahead, and
    are watched from there on: where DDP waits for buffers, or for gradients. Each tells what it
    saves."""

    def train(me: Me) -> Any:
        watchdog.LINGER_S = HOURS_S  # no order of events hangs on it

        def decide(saved: Saved) -> None:
            me.send((saved.reason, saved.step, saved.fresh))

        job = Standing(me, phases.get(me.rank, ""), lambda: then(me, job.handle))

        def ahead(*_: Any) -> None:  # behind forward start, before DDP waits
            if job.iteration == AT + 1 and me.rank not in phases:
                job.model.broadcast_buffers = waits == "forward"
                watched(job.handle)

        job.model.register_forward_pre_hook(ahead)
        settings = {"hang_s": HOURS_S, "hang_steps": 1e6, "grace_s": HOURS_S, **failure}
        armed = Failure(on_failure=decide, **settings)
        job.resume(path, 300 + me.rank)
        job.handle = job.attach(path, failure=armed, on_error=lambda error: None)
        with job.handle:
            losses = [job.iterate() for _ in range(LAST)]
        return losses, state_of(job)

    return train


def hangs(me: Me, handle: Any) -> None:
    """Hang once the rank is let go."""
    me.pause()
    watched(handle)
    rests()


def held(path: Path, rank: int) -> set[tuple[int, bool]]:
    """Steps of which a rank's region holds a snapshot, and whether each is early."""
    region, recovery = open_and_recover(location.locate(path, rank, create=False))
    region.close()
    return {(each.record.step, each.record.early) for each in recovery.candidates}


def ended(outcomes: list[Any], status: int = HANG_STATUS) -> None:
    """Check that each ended with this status, or by an error of the collective.

    The first one that ends breaks the collective for the others.
    """
    for each in outcomes:
        broken = isinstance(each, RuntimeError)
        assert broken or (isinstance(each, Gone) and f"status {status}" in str(each)), each


def own(job: ranks.Job, rank: int, word: str) -> Any:
    """Wait for what a rank tells of this reason, and pass over what it has told before."""
    while True:
        said = job.receive(rank)
        if said[0] == word:
            return said


@pytest.mark.parametrize(
    ("world", "phases", "waits"),
    [
        *((2, {1: phase}, "backward") for phase in [*BEHIND, *INSIDE]),
        (2, {1: "gathered"}, "forward"),
        (2, {1: "half"}, "forward"),
        (2, {0: "gathered"}, "forward"),
        (2, {0: "half"}, "backward"),
        (3, {1: "gathered"}, "forward"),
        (3, {2: "half"}, "backward"),
        (3, {0: "gathered", 2: "half"}, "forward"),
    ],
)
def test_who_waits_for_a_rank_that_hangs_behind_it_ends_after_it_with_the_step_saved_whole(
    region_dir: Path, world: int, phases: dict[int, str], waits: str
) -> None:
    waiting = [rank for rank in range(world) if rank not in phases]
    train = life(region_dir, phases, hangs, waits, hang_exit_s=0.0)
    with ranks.started(world, train, patience_s=ranks.LONG_S) as job:
        for rank in waiting:  # the time after which they may end has come
            assert own(job, rank, "hang") == ("hang", AT, True)
        job.let_go(*phases)
        outcomes = job.outcomes([*phases, *waiting])
    ended(outcomes)
    assert isinstance(outcomes[0], Gone) or len(phases) > 1, outcomes
    assert whole_steps(region_dir) == {AT}
    info = go_on(region_dir, world)
    assert info is not None and info.step == AT and info.early


def test_what_hangs_in_a_forward_behind_its_gradients_is_not_taken_for_its_fence(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank ran this forward in no iteration before: nobody knows what it would have drawn."""
    # It is to know by itself that it hangs, before the other saves what it has left.
    monkeypatch.setattr(whole_save, "PATIENCE_S", 60.0)

    class Evaluation(nn.Module):
        def forward(self) -> None:
            rests()

    def evaluates(me: Me, handle: Any) -> None:
        watched(handle)
        Evaluation()()

    train = life(region_dir, {1: "gathered"}, evaluates, hang_exit_s=0.0)
    with ranks.started(2, train, patience_s=ranks.LONG_S) as job:
        ended(job.outcomes([1, 0]))
    assert [held(region_dir, rank) for rank in range(2)] == [{(AT, False)}, {(AT - 1, False)}]
    assert go_on(region_dir, 2) is None, "nothing whole is there"


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("phase", ["gathered", "half"])
def test_a_rank_that_hangs_there_ends_at_sigterm_at_once_and_is_finished(
    region_dir: Path, phase: str, noticed: bool
) -> None:
    """The rank may not be known to hang yet: it stands, and a rank of its node is ahead."""

    def stands(me: Me, handle: Any) -> None:
        me.pause()
        watched(handle, **({} if noticed else {"hang_s": HOURS_S}))
        guard = internals.guard(handle)
        until(lambda: guard.hang.has_not_moved(guard.saver.progress()))
        until(lambda: guard.hang.suspected is not None or not noticed)
        me.send(("stands", guard.hang.suspected is not None))
        rests()

    with ranks.started(2, life(region_dir, {1: phase}, stands), patience_s=ranks.LONG_S) as job:
        assert own(job, 0, "hang") == ("hang", AT, True)
        job.let_go(1)
        assert own(job, 1, "stands") == ("stands", noticed)
        os.kill(job.pid(1), signal.SIGTERM)
        (first,) = job.outcomes([1])
        assert isinstance(first, Gone) and f"status {-signal.SIGTERM}" in str(first)
        os.kill(job.pid(0), signal.SIGTERM)
        ended(job.outcomes([0]), -signal.SIGTERM)
    info = go_on(region_dir, 2)
    assert info is not None and info.step == AT and info.early


def goes_on_golden(results: list[Any]) -> None:
    for (losses, state), (wanted, last) in zip(results, golden(2, Mortal), strict=True):
        assert losses == wanted and same(state, last)


def test_a_rank_that_is_only_slow_behind_the_others_is_waited_for_and_nobody_ends(
    region_dir: Path,
) -> None:
    train = life(region_dir, {1: "gathered"}, lambda me, handle: me.pause(), hang_exit_s=0.0)

    def both(me: Me) -> Any:
        def look() -> None:
            guards = watchdog.WATCHDOG._guards
            until(lambda: guards and (guards[0]._exit_in_s or 0.0) < -1.0)
            unwatched(guards[0])
            me.send(("waits",))

        if me.rank == 0:
            threading.Thread(target=look, daemon=True).start()
        return train(me)

    with ranks.started(2, both, patience_s=ranks.LONG_S) as job:
        own(job, 0, "waits")
        job.let_go(1)
        goes_on_golden(job.results())


def test_a_rank_that_evaluates_for_long_is_saved_and_goes_on(region_dir: Path) -> None:
    """The rank that waits in a collective for the evaluating one is saved, too, and goes on."""

    def evaluates(me: Me, handle: Any) -> None:
        watched(handle)
        me.pause()

    train = life(region_dir, {1: "loop"}, evaluates)
    with ranks.started(2, train, patience_s=ranks.LONG_S) as job:
        for rank in range(2):
            assert own(job, rank, "hang") == ("hang", AT, True)
        job.let_go(1)
        goes_on_golden(job.results())


def test_a_deadlock_of_which_every_rank_has_said_its_word_ends_at_once(region_dir: Path) -> None:
    """One waits in a collective of its own, the other in its allreduce."""

    def train(me: Me) -> Any:
        job = Mortal(me.rank, KIND, policy=NEVER)
        failure = Failure(hang_s=HOURS_S, grace_s=HOURS_S, hang_steps=1e6, hang_exit_s=0.0)
        with job.attach(region_dir, failure=failure, on_error=lambda error: None) as handle:
            for _ in range(AT):
                job.iterate()
            watched(handle)
            if me.rank == 1:
                dist.barrier()
            job.iterate()

    with ranks.started(2, train, patience_s=ranks.LONG_S) as job:
        outcomes = job.outcomes()
    ended(outcomes)
    assert any(isinstance(each, Gone) for each in outcomes), outcomes
    assert all({(AT, False), (AT, True)} & held(region_dir, rank) for rank in range(2))


@pytest.mark.parametrize("changes", [False, True])
def test_what_a_rank_left_where_it_hung_gives_way_to_what_it_has_at_its_fence(
    region_dir: Path, changes: bool
) -> None:
    """A hang that ends after all: by habit nothing changes there, now something may. However often
    it was saved there, the journal's entries of the step before stay."""

    def train(me: Me) -> Any:
        watchdog.LINGER_S = HOURS_S

        def stands() -> None:
            watched(job.handle)
            left = partial(job.handle.region.native.read_journal, FENCE)
            until(lambda: (entry := left()) is not None and entry.step == AT)
            unwatched(internals.guard(job.handle))
            checkpointer = internals.checkpointer(job.handle)
            with checkpointer.lock:
                for _ in range(3):
                    checkpointer.thread_stuck()
            if changes:
                job.progress["rank"] = 77
            job.phase, job.stand = "updated", dies

        def dies() -> None:
            me.send(internals.checkpointer(job.handle).predictor._last_gradients)
            kinds = (FORWARD,) if changes else (FORWARD, STEP_END)
            found = [job.handle.region.native.read_journal(kind) for kind in kinds]
            me.send({each and each.step for each in found})
            os.kill(os.getpid(), signal.SIGKILL)

        job = Standing(me, "gathered" if me.rank == 1 else "", stands)
        failure = Failure(hang_s=HOURS_S, grace_s=HOURS_S, hang_steps=1e6)
        job.resume(region_dir, 300 + me.rank)
        job.handle = job.attach(region_dir, failure=failure, on_error=lambda error: None)
        with job.handle:
            while True:
                job.iterate()

    def again(me: Me) -> Any:
        job = Mortal(me.rank, KIND)
        info = job.restore(region_dir)
        return info and info.step, job.progress["rank"]

    with ranks.started(2, train) as job:
        assert job.receive(1) > 0, "its habits are of the gradients of whole iterations"
        assert job.receive(1) == {AT - 1}
        (broken,) = job.outcomes([0])
        assert isinstance(broken, RuntimeError), broken
    with ranks.started(2, again) as job:
        assert job.results() == [(AT, 0), (AT, 77 if changes else 1)]
