"""A rank that waits in a real collective for a peer that never comes, seen from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightck.failure.hang import CollectivePosition, HangWatch, current_collective
from lightck.failure.watchdog import HANG_STATUS, WATCHDOG, HandleGuard
from lightck.types import Failure, Saved
from support.distributed import ranks
from support.distributed.ranks import Gone, Me
from support.savers import LoneSaver


def barrier() -> None:
    dist.barrier()


def all_reduce() -> None:
    dist.all_reduce(torch.ones(3))


def objects() -> None:
    dist.all_gather_object([None, None], {"step": 1})


def functional() -> None:
    import torch.distributed._functional_collectives as functional

    functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))


def backward() -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()


def constructed() -> None:
    DistributedDataParallel(nn.Linear(4, 4))


def looked(
    code: Callable[[], object], found: Callable[[CollectivePosition | None], bool]
) -> Callable[[Me], Any]:
    """Rank 0 runs the code and is looked at until what is seen is as wanted; rank 1 never comes."""

    def run(me: Me) -> Any:
        if me.rank == 1:
            if code is backward:
                DistributedDataParallel(nn.Linear(4, 4))  # up to there they need each other
            me.pause()
            return None
        main = threading.get_ident()

        def look() -> None:
            while True:
                place = current_collective(main)
                if found(place):
                    me.send(place)
                    return
                time.sleep(0.001)

        threading.Thread(target=look, daemon=True).start()
        code()
        raise AssertionError("the collective ended without its peer")

    return run


@pytest.mark.parametrize("code", [barrier, all_reduce, objects, functional, backward, constructed])
def test_a_thread_that_waits_for_a_peer_is_seen_inside_the_collective(
    code: Callable[[], None],
) -> None:
    line = f"called from {__file__}:{code.__code__.co_firstlineno + _line_of(code)}"
    marks: list[tuple[int, ...]] = []

    def stands_there(place: CollectivePosition | None) -> bool:
        """Seen at the same place many times: it is not passing through."""
        there = place is not None and place.text.endswith(line)
        if place is None or not there or (marks and marks[-1] != place.mark):
            marks.clear()
        if place is not None and there:
            marks.append(place.mark)
        return len(marks) > 200

    with ranks.started(2, looked(code, stands_there)) as job:
        assert job.receive(0).text.endswith(line)


def _line_of(code: Callable[[], None]) -> int:
    """The line of the call within the function, which is its last one."""
    lines = [line for _, _, line in code.__code__.co_lines() if line is not None]
    return max(lines) - code.__code__.co_firstlineno


def test_a_thread_that_computes_is_in_no_collective() -> None:
    """A thread in a wrapped model is in none, either: DDP's own forward is on the stack then."""

    class Slow(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            inside.set()
            go_on.wait()
            return super().forward(input)

    inside, go_on = threading.Event(), threading.Event()

    def run(me: Me) -> Any:
        model = DistributedDataParallel(Slow(4, 4))
        found: list[CollectivePosition | None] = []
        main = threading.get_ident()

        def look() -> None:
            inside.wait()
            found.append(current_collective(main))
            go_on.set()

        thread = threading.Thread(target=look)
        thread.start()
        model(torch.ones(2, 4))
        thread.join()
        return found

    with ranks.started(2, run) as job:
        assert job.results() == [[None], [None]]


def test_a_thread_that_has_ended_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert current_collective(thread.ident) is None


def test_marks_differ_between_two_collectives_and_not_within_one() -> None:
    def run(me: Me) -> Any:
        if me.rank == 1:
            me.pause()
            dist.barrier()
            me.pause()
            return None
        main = threading.get_ident()
        places: list[CollectivePosition] = []

        def look() -> None:
            for _ in range(2):
                stood: list[CollectivePosition] = []
                while len(stood) < 100:
                    place = current_collective(main)
                    if place is None or (places and place.mark == places[-1].mark):
                        stood.clear()
                    else:
                        stood = (
                            [*stood, place] if stood and stood[-1].mark == place.mark else [place]
                        )
                    time.sleep(0.001)
                places.append(stood[-1])
                me.send(place.text)

        threading.Thread(target=look, daemon=True).start()
        dist.barrier()
        dist.all_reduce(torch.ones(3))
        return None

    with ranks.started(2, run) as job:
        assert job.receive(0).startswith("barrier")
        job.let_go(1)
        assert job.receive(0).startswith("all_reduce")


# ---- the watchdog over it


@dataclass
class Moving(LoneSaver):
    """A `JitSaver` over a loop that moves when the test says so."""

    me: Me
    step: int = 0
    updating: bool = False
    inside: bool = False
    ticks: int = 0
    step_s: float | None = 0.01
    thread: int = field(default_factory=threading.get_ident)

    def progress(self) -> Moving:
        return self

    def save(self, reason: str, deadline: float) -> Saved:
        self.me.send((reason, self.step))
        return Saved(reason, self.step, fresh=True)


def watched(me: Me, **settings: Any) -> HandleGuard:
    guard = HandleGuard(
        Moving(me), HangWatch.of_world(Failure(signals=(), **settings), 2), _raises, 2
    )
    WATCHDOG.watch(guard)
    return guard


def _raises(error: Exception) -> None:
    raise error


def test_a_hang_in_a_barrier_is_saved_and_the_process_left_alone() -> None:
    def run(me: Me) -> Any:
        if me.rank == 1:
            me.pause()
            dist.barrier()
            return None
        guard = watched(me)
        dist.barrier()
        guard.saver.step = 1  # type: ignore[attr-defined]
        while guard.hang.suspected is not None:
            time.sleep(0.01)
        WATCHDOG.release(guard)
        return "went on"

    with ranks.started(2, run) as job:
        assert job.receive(0) == ("hang", 0)
        job.let_go(1)
        assert job.outcomes([0]) == ["went on"]


def test_a_hang_ends_the_process_where_that_is_wanted() -> None:
    def run(me: Me) -> Any:
        if me.rank == 1:
            me.pause()
            return None
        watched(me, hang_exit_s=0.0)
        dist.barrier()
        return None

    with ranks.started(2, run) as job:
        assert job.receive(0) == ("hang", 0)
        (ended,) = job.outcomes([0])
        assert isinstance(ended, Gone) and f"status {HANG_STATUS}" in str(ended)


def test_the_user_may_decide_against_the_end_of_a_hanging_process() -> None:
    def run(me: Me) -> Any:
        if me.rank == 1:
            me.pause()
            return None

        def decide(saved: Saved) -> bool:
            me.send("asked")
            return True

        guard = watched(me, hang_exit_s=0.0, on_failure=decide)
        looks = threading.Event()

        def look() -> None:
            while guard.hang_save is None or not guard.hang_save.done.is_set():
                time.sleep(0.01)
            for _ in range(3):  # looks of the watchdog at a hang that goes on
                seen = guard.hang._looked_s
                while guard.hang._looked_s == seen:
                    time.sleep(0.01)
            me.send(guard._exit_in_s)
            looks.set()

        threading.Thread(target=look, daemon=True).start()
        dist.barrier()
        return None

    with ranks.started(2, run) as job:
        assert job.receive(0) == ("hang", 0)
        assert job.receive(0) == "asked"
        assert job.receive(0) is None
