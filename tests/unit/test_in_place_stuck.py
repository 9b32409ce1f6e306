"""Connections that break: works that never end, as gloo leaves them, and what is cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightck.errors import CoordinationError
from lightck.inplace.communicator import Communicator
from lightck.inplace.generations import Generation, Generations
from lightck.inplace.link import Link
from lightck.inplace.operations import Operation, State
from lightck.inplace.plan import Description, Plan
from lightck.inplace.recovery import InPlaceRecovery, _Newer, _Recovering
from support.inplace.simulated import Store, Work


class Failed(Work):
    """A work that has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.future.set_exception(RuntimeError("Connection closed by peer"))


def linked(*works: Work) -> Communicator:
    """Return a communicator whose collectives have these works, one after the other."""
    given = iter(works)
    communicator = Communicator(0, 2)
    link: Any = SimpleNamespace(
        backend=SimpleNamespace(allreduce=lambda _: next(given)), cut=lambda: None
    )
    communicator.resume(link)
    return communicator


def begun(communicator: Communicator) -> Operation:
    tensor = torch.ones(3)
    form = Description("allreduce SUM", (("float32", (3,)),))
    return communicator.run(form, [tensor], lambda backend: backend.allreduce([tensor]))


def come(holds: Any, seconds: float = 60.0) -> bool:
    end_s = time.monotonic() + seconds
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.01)
    return bool(holds())


@pytest.mark.parametrize("apart", [False, True])
def test_an_error_behind_a_collective_that_never_ends_is_noticed(apart: bool) -> None:
    stuck = Work()
    communicator = linked(stuck, Failed())
    first = begun(communicator)
    if apart:  # not in one look at what was begun
        assert come(communicator._begun.empty)
    second = begun(communicator)
    assert come(lambda: communicator.suspicion)
    assert (first.state, second.state) == (State.FLYING, State.FAILED)
    communicator.interrupt()
    assert not communicator.has_drained(), "its tensors are still gloo's"
    stuck.future.set_result(None)
    assert come(communicator.has_drained)
    communicator.end("the test is over")


def test_who_waits_for_a_collective_that_never_ends_is_told_why_all_are_restarted() -> None:
    communicator = linked(Work())
    operation = begun(communicator)
    told: list[str] = []

    def wait() -> None:
        try:
            communicator.wait(operation)
        except CoordinationError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    communicator.end("it does not drain")
    thread.join(60.0)
    assert told == ["recovery in place: it does not drain"]


def test_a_result_that_is_being_given_is_not_waited_for_in_a_newer_generation() -> None:
    """The link is kept: to free it waits for gloo's threads, and one of them waits for ever."""
    stuck, asked = Work(), threading.Event()

    def broadcast(*_: Any) -> Work:
        asked.set()
        return stuck

    link: Any = SimpleNamespace(backend=SimpleNamespace(broadcast=broadcast), cut=lambda: None)
    store: Any = Store()
    generations = Generations(store)
    recovery = InPlaceRecovery(Communicator(0, 2), generations, generations, lambda _: link)
    form = Description("broadcast from 1", (("float32", (3,)),))
    plan = Plan(None, 0, {4: 1}, {4: form}, (), ())
    state = _Recovering(recovery, Generation(1), time.monotonic() + 250.0)
    newer = threading.Thread(
        target=lambda: asked.wait() and setattr(recovery, "_newest", Generation(2))
    )
    newer.start()
    with pytest.raises(_Newer):
        recovery._connect(Generation(1), plan, state)
    assert recovery._left == [link]
    newer.join()


def test_an_end_that_comes_as_the_time_is_over_is_no_failure() -> None:
    class Late(Work):
        def wait(self, timeout: timedelta | None = None) -> None:
            if not self.future.done():
                self.future.set_result(None)
                raise RuntimeError("Operation timed out!")

    communicator = linked(Late())
    operation = begun(communicator)
    communicator.wait(operation)
    assert operation.state is State.COMPLETE
    assert not communicator.suspicion
    communicator.end("the test is over")


def test_a_cut_ends_connections_and_no_pipe_that_another_thread_has_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []

        def gloo(*_: Any) -> None:
            server = socket.create_server(("127.0.0.1", 0))
            sockets.extend([server, socket.create_connection(server.getsockname())])
            sockets.extend([server.accept()[0], *socket.socketpair()])
            for each in sockets:
                opened.enter_context(each)
                each.settimeout(60.0)

        monkeypatch.setattr(dist, "ProcessGroupGloo", gloo)
        store = SimpleNamespace(set_timeout=lambda _: None)
        Link(store, 0, 2, timedelta(seconds=60)).cut()
        _, _, accepted, one, other = sockets
        assert accepted.recv(1) == b"", "cut"
        one.send(b".")
        assert other.recv(1) == b"."
