"""Recovery in place commits the iterations of its training, and notes recoveries in the trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightck.failure.hang import CollectivePosition, HangWatch, LoopProgress
from lightck.inplace import runtime
from lightck.inplace.generations import Generation, Generations
from lightck.inplace.training import HandleTraining, InPlaceListener
from lightck.loop.checkpointer import Checkpointer
from lightck.tracing.perfetto import document
from lightck.tracing.trace import Trace, now_ns
from lightck.types import Failure


class _Communicator:
    def __init__(self) -> None:
        self.commits: list[int] = []

    def commit(self, step: int) -> None:
        self.commits.append(step)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_an_optimizer_of_another_training_commits_nothing() -> None:
    ours, other, told = _optimizer(), _optimizer(), []
    checkpointer = SimpleNamespace(
        inventory=SimpleNamespace(optimizers=[ours]),
        watched=SimpleNamespace(refresh=lambda: None, owns=lambda optimizer: False),
        steps=SimpleNamespace(step=4, between_updates=False, updating=False),
    )
    rescue: Any = SimpleNamespace(checkpointer=checkpointer)
    passed_on: Any = SimpleNamespace(
        update_begins=lambda optimizer, frame, unseen: told.append(optimizer)
    )
    communicator: Any = _Communicator()
    listener = InPlaceListener(passed_on, communicator, HandleTraining(rescue))
    listener.update_begins(other)
    assert communicator.commits == []
    listener.update_begins(ours)
    assert communicator.commits == [5]
    assert told == [other, ours]


def test_a_hang_is_counted_anew_behind_a_recovery() -> None:
    """The survivor is in the same collective, and the new rank has its minibatch to compute."""
    watch = HangWatch(Failure(hang_steps=3), period_s=1.0)
    checkpointer: Any = SimpleNamespace(ticks=7, pipeline=SimpleNamespace(trace=None))
    checkpointer.note_progress = lambda: Checkpointer.note_progress(checkpointer)
    rescue: Any = SimpleNamespace(checkpointer=checkpointer, rejoined=lambda rank: None)
    position = CollectivePosition("allreduce, train.py:3", ())

    def look(now_s: float) -> bool:
        progress = LoopProgress(4, False, True, checkpointer.ticks, 0.1, 1)
        watch.observe(now_s, progress, position)
        return watch.suspected is not None

    assert [look(now_s) for now_s in range(4)][-1]
    HandleTraining(rescue).recovered([1], now_ns())
    assert not look(4.0)


def test_who_is_new_in_a_generation_is_not_silent_for_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "_VOTE_S", 0.0)
    ended: list[tuple[int, int]] = []
    generation, looks = Generation(number=3), runtime._VOTES
    votes = SimpleNamespace(
        wait_for_others=lambda rank, world: (generation, [1, 2]),
        ask_end=lambda rank, life: ended.append((rank, life)),
    )
    communicator: Any = SimpleNamespace(rank=0, world=3)
    anything: Any = None
    worker = runtime.Worker(communicator, anything, anything, cast(Generations, votes), {})
    for look in range(looks + 3):
        worker._end()
        assert bool(ended) is (look + 1 >= looks)
    ended.clear()
    generation = Generation(number=4)
    for look in range(looks):
        worker._end()
        assert bool(ended) is (look + 1 == looks)


def test_a_trace_has_each_recovery_on_a_track_of_its_own_with_who_was_replaced() -> None:
    trace, rejoined = Trace({"rank": 0}, step=7), []
    pipeline = SimpleNamespace(trace=trace)
    checkpointer = SimpleNamespace(pipeline=pipeline, note_progress=lambda: None)
    rescue: Any = SimpleNamespace(checkpointer=checkpointer, rejoined=rejoined.append)
    began_ns = now_ns()
    HandleTraining(rescue).recovered([1, 2], began_ns)
    HandleTraining(rescue).recovered([], began_ns)
    events = document(trace.recorded())["traceEvents"]
    track = next(each["tid"] for each in events if each["args"].get("name") == "recovery in place")
    shown = [each for each in events if each["ph"] == "X"]
    assert {each["tid"] for each in shown} == {track}
    assert sorted((each["name"], each["args"]["step"]) for each in shown) == [
        ("connections made anew", 7),
        ("rank 1, 2 replaced", 7),
    ]
    assert min(each["ts"] for each in shown) == began_ns / 1e3
    assert rejoined == [1, 2]
