"""Code in another process, forked: torch is loaded already, so it costs milliseconds."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from support import preload


def fork() -> int:
    """`os.fork`, without the warning of newer Pythons that threads are running."""
    preload.everything()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        # The parent's OpenMP threads are not here: a parallel region would wait for them for ever.
        torch.set_num_threads(1)
    return pid


@dataclass
class Child:
    """A running child."""

    pid: int
    _read: int
    _write: int

    def receive(self) -> Any:
        """The next value that the child sent; its exception, raised, if that ended it."""
        head = b""
        while len(head) < 8:
            more = os.read(self._read, 8 - len(head))
            assert more, "the child ended without a word"
            head += more
        data = b""
        while len(data) < int.from_bytes(head, "little"):
            data += os.read(self._read, int.from_bytes(head, "little") - len(data))
        value = pickle.loads(data)
        if isinstance(value, BaseException):
            raise value
        return value

    def let_go(self) -> None:
        """Let a child go on that waits in `pause`."""
        os.write(self._write, b".")

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP; returns when it has stopped, which may be after it has run on for a while."""
        os.kill(self.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def go_on(self) -> None:
        """Let it go on, by SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def join(self) -> int:
        """Wait for its end; the status, negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._read)
        os.close(self._write)
        return os.waitstatus_to_exitcode(status)


@dataclass
class Parent:
    """The child's code talks to its parent through this."""

    _write: int
    _read: int

    def send(self, value: Any) -> None:
        """Give a value to `Child.receive`."""
        data = pickle.dumps(value)
        os.write(self._write, len(data).to_bytes(8, "little") + data)

    def pause(self) -> None:
        """Wait for `Child.let_go`, or for ever."""
        os.read(self._read, 1)


def start(code: Callable[[Parent], Any]) -> Child:
    """Run `code` in a child; what it returns or raises is the last value it sends."""
    up, down = os.pipe(), os.pipe()
    pid = fork()
    if pid:
        os.close(up[1])
        os.close(down[0])
        return Child(pid, up[0], down[1])
    status = 1
    try:
        os.close(up[0])
        os.close(down[1])
        parent = Parent(up[1], down[0])
        try:
            parent.send(code(parent))
            status = 0
        except BaseException as error:  # noqa: BLE001
            traceback.print_exc()
            parent.send(error)
        sys.stderr.flush()
    finally:
        while True:  # an interrupt that comes here must not run what the parent would run next
            with suppress(KeyboardInterrupt):
                os._exit(status)


def run(code: Callable[[], Any], *, user: int | None = None) -> Any:
    """Run `code` in a child, as another user if one is given; what it returns, or raises."""

    def as_user(parent: Parent) -> Any:
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        return code()

    child = start(as_user)
    try:
        return child.receive()
    finally:
        child.join()


@contextmanager
def closed_output() -> Iterator[TextIO]:
    """Give a file to print to whose reader is gone, as in `command | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        yield output
