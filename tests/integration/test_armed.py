"""All that `attach` arms unless it is told not to is in nobody's way, wherever it is called."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - what an optimizer would load on first use, in every child

import lightck
from lightck.failure import signals
from support.loops import Loop, adam_loop, attach, steps_at
from support.processes import run

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STEPS = 3


def state() -> list[object]:
    """Return what a process has of signals, and who is told of exceptions."""
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return [
        *(signal.getsignal(number) for number in NUMBERS),
        *(signals.read(number)[:8] for number in NUMBERS),  # the handler
        fd,
        sys.excepthook,
    ]


def train(path: Path) -> None:
    """Attach as it comes, train, close."""
    loop = adam_loop()
    with attach(path, loop) as handle:
        assert handle.config.failure == lightck.Failure()
        loop.run(STEPS)
        handle.wait()


def plainly(path: Path) -> None:
    train(path)


def on_another_thread(path: Path) -> None:
    """Train where handlers cannot be set: everything else works."""
    raised: list[BaseException] = []

    def code() -> None:
        try:
            train(path)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=code)
    thread.start()
    thread.join()
    assert not raised, raised


def inside_an_event_loop(path: Path) -> None:
    """Train as in a notebook: asyncio has the wake-up descriptor, and SIGINT."""
    heard: list[str] = []

    async def cell() -> None:
        running = asyncio.get_running_loop()
        running.add_signal_handler(signal.SIGHUP, heard.append, "before")
        before = state()
        train(path)
        assert state() == before
        running.add_signal_handler(signal.SIGHUP, heard.append, "after")
        signal.raise_signal(signal.SIGHUP)
        while not heard:
            await asyncio.sleep(0)

    asyncio.run(cell())
    assert heard == ["after"]


def beside_faulthandler(path: Path) -> None:
    """Handlers of C code, and somebody's wake-up descriptor."""
    mine = os.pipe2(os.O_NONBLOCK)
    with open(os.devnull, "w") as nothing:
        faulthandler.enable(nothing)
        faulthandler.register(signal.SIGUSR1, nothing)
        signal.set_wakeup_fd(mine[1])
        before = state()
        train(path)
        assert state() == before
        signal.set_wakeup_fd(-1)
        assert faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def twice_at_once(path: Path) -> None:
    """Two handles; the first one goes first."""
    one, other = adam_loop(), adam_loop()
    first = attach(path, one)
    second = attach(path.parent / "other", other)
    one.run(STEPS)
    other.run(STEPS)
    first.close()
    other.run(1)
    second.close()


@pytest.mark.parametrize(
    "code",
    [plainly, on_another_thread, inside_an_event_loop, beside_faulthandler, twice_at_once],
)
def test_everything_is_as_before_and_every_step_was_taken(
    run_dir: Path, code: Callable[[Path], None]
) -> None:
    def there() -> Any:
        before = state()
        code(run_dir)
        names = [each.name for each in threading.enumerate() if each.name.startswith("lightck")]
        return state() == before, names

    assert run(there) == (True, [])
    assert steps_at(run_dir)[-1] == STEPS


@pytest.mark.parametrize("attaches", ["here", "there"])
def test_closing_off_the_main_thread_leaves_no_descriptors(run_dir: Path, attaches: str) -> None:
    """Only the last one's wake-up descriptor stays, which the main thread alone may take away."""

    def there() -> Any:
        before, counts = state(), []
        for i in range(5):
            loop = adam_loop()
            path = run_dir.with_name(f"{attaches}{i}")
            handle = attach(path, loop) if attaches == "here" else None

            def close(handle: Any = handle, loop: Loop = loop, path: Path = path) -> None:
                (handle or attach(path, loop)).detach()

            thread = threading.Thread(target=close)
            thread.start()
            thread.join()
            counts.append(len(os.listdir("/proc/self/fd")))
        forked = run(lambda: state()[:-1] == before[:-1])
        attach(run_dir, adam_loop()).detach()
        counts.append(len(os.listdir("/proc/self/fd")) + (attaches == "here"))
        return len(set(counts)), state() == before, forked

    assert run(there) == (1, True, True)


def test_a_forked_child_gets_nothing_of_it(run_dir: Path) -> None:
    """Signals, the descriptor and the thread are the parent's; so it is for the child's child."""
    before = state()
    loop = adam_loop()

    def child() -> Any:
        return run(lambda: state()[:-1] == before[:-1]), state()[:-1], threading.active_count()

    with attach(run_dir, loop):
        loop.run(1)
        armed = state()
        assert armed != before
        seen = run(child)
        assert state() == armed
    assert seen == (True, before[:-1], 1)  # the hook for exceptions stays, and calls through
