"""Recovery in place commits the iterations of its training, and notes recoveries in the trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightck.inplace.training import HandleTraining, InPlaceListener
from lightck.tracing.perfetto import document
from lightck.tracing.trace import Trace, now_ns


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


def test_a_trace_has_each_recovery_on_a_track_of_its_own_with_who_was_replaced() -> None:
    trace, rejoined = Trace({"rank": 0}, step=7), []
    checkpointer = SimpleNamespace(pipeline=SimpleNamespace(trace=trace))
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
