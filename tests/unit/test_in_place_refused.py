"""Collectives that are open when recovery in place ends raise: nobody goes on with half a sum."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightck.errors import CoordinationError
from lightck.inplace.communicator import Communicator
from lightck.inplace.group import Group
from lightck.inplace.inputs import Inputs

WHY = "no rank is left"


def open_work() -> tuple[Communicator, Any]:
    """Return a communicator without connections, and a reduction that waits for some."""
    communicator = Communicator(0, 2)
    work = Group(communicator, Inputs(2)).allreduce([torch.ones(3)])
    assert not work.is_completed()
    return communicator, work


def test_who_waits_in_a_collective_is_told_why_all_are_restarted() -> None:
    communicator, work = open_work()
    communicator.end(WHY)
    with pytest.raises(CoordinationError, match=WHY):
        work.wait()


def test_a_collective_that_fails_by_itself_is_not_made_for_ever() -> None:
    communicator = Communicator(0, 2)
    communicator.keep(recovers=True)
    work = Group(communicator, Inputs(2)).allreduce([torch.ones(3)])
    link = Link(SimpleNamespace(allreduce=_refuse))
    with pytest.raises(CoordinationError, match=r"allreduce SUM.* 10 times: Invalid scalar type"):
        for _ in range(20):
            communicator.resume(link)
            communicator.interrupt()
    assert not work.is_completed()


def _refuse(*_: Any) -> None:
    raise RuntimeError("Invalid scalar type")


def test_who_looks_at_its_value_or_future_is_told_too() -> None:
    communicator, work = open_work()
    communicator.end(WHY)
    assert work.is_completed()
    for look in (work.result, work.get_future().wait, work.get_future().value):
        with pytest.raises(CoordinationError, match=WHY):
            look()


def test_a_later_collective_is_told_as_well() -> None:
    communicator, _ = open_work()
    communicator.end(WHY)
    with pytest.raises(CoordinationError, match=WHY):
        Group(communicator, Inputs(2)).allreduce([torch.ones(3)]).wait()


def _gloo() -> Any:
    gloo: Any = dist.ProcessGroupGloo
    return gloo(dist.HashStore(), 0, 1, timedelta(seconds=30))


def _hook(group, bucket):  # type: ignore[no-untyped-def] # DDP checks annotations
    """Do what users' hooks do: go on from the future."""
    given: torch.futures.Future[Any] = group.allreduce([bucket.buffer()]).get_future()
    return given.then(lambda future: future.value()[0])


def _only_waiting(group, bucket):  # type: ignore[no-untyped-def] # as above
    """Wait, and look at no value."""
    group.allreduce([bucket.buffer()]).get_future().wait()
    return _hook(group, bucket)


@pytest.mark.parametrize("hook", [None, _hook, _only_waiting])
def test_ddp_s_backward_raises_the_reason_and_takes_no_value_for_its_bucket(hook: Any) -> None:
    communicator = Communicator(0, 1)
    communicator.resume(Link(_gloo()))
    group = Group(communicator, Inputs(1))
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    if hook is not None:
        model.register_comm_hook(group, hook)
    loss = model(torch.ones(1, 2)).sum()
    communicator.interrupt()
    ending = threading.Timer(0.2, communicator.end, [WHY])
    ending.start()
    with pytest.raises((RuntimeError, CoordinationError), match=WHY):
        loss.backward()
    ending.join()


def _twice(group: Group, begun: threading.Event) -> torch.futures.Future[Any]:
    """Reduce, and reduce the result in a callback that waits for it."""

    def again(future: torch.futures.Future[Any]) -> Any:
        inner = group.allreduce(future.value()).get_future()
        begun.set()
        return inner.then(lambda each: each.value()[0]).wait()

    work = group.allreduce([torch.ones(3)])
    given: torch.futures.Future[Any] = work.get_future()
    return given.then(again)


def _ended(run: Any, *arguments: Any) -> None:
    """Run on a thread that may hang, and wait for its end."""
    thread = threading.Thread(target=run, args=arguments, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_collective_in_a_callback_comes_to_its_end_and_none_is_made_again_from_then_on() -> None:
    communicator = Communicator(0, 1)
    communicator.resume(Link(_gloo()))
    communicator.interrupt()
    outer = _twice(Group(communicator, Inputs(1)), threading.Event())
    communicator.resume(Link(_gloo()))  # not before the callback is there
    _ended(outer.wait)
    assert outer.value().tolist() == [1, 1, 1]
    assert "a callback of a collective's future" in communicator.unfit
    communicator.interrupt()
    with pytest.raises(CoordinationError, match="a callback of a collective's future"):
        communicator.resume(Link(_gloo()))
    communicator.end(WHY)


def test_a_given_result_whose_callback_waits_for_a_collective_does_not_hold_the_recovery() -> None:
    communicator, begun = Communicator(0, 1), threading.Event()
    outer = _twice(Group(communicator, Inputs(1)), begun)
    (first,) = communicator.window.unfinished()
    _ended(communicator.give, first.number, first.form, [torch.ones(3)])
    assert begun.wait(60)
    with pytest.raises(CoordinationError, match="a callback of a collective's future"):
        communicator.resume(Link(_gloo()))
    communicator.end(WHY)
    with pytest.raises(RuntimeError, match=WHY):
        outer.wait()


@dataclass
class Link:
    """Connections of one rank to nobody."""

    backend: Any

    def cut(self) -> None:
        """Nothing is under way."""
