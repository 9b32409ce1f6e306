"""Signals have owners before, beside and after lightck; forked children have none of it."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightck.failure.signals import Signals
from lightck.failure.watchdog import WATCHDOG, HandleGuard
from lightck.types import Saved
from support.processes import Parent, run
from support.watched import Telling, guard, idle, process, send, silent, state, watched

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


# ---- giving back


def test_everything_is_as_before_after_a_release() -> None:
    def code() -> Any:
        signal.signal(signal.SIGHUP, print)
        before = state()
        first, second = silent(), silent(signals=("SIGHUP", "SIGTERM"))
        for _ in range(3):
            WATCHDOG.watch(first)
            WATCHDOG.watch(second)
            assert state() != before
            WATCHDOG.release(first)
            assert signal.getsignal(INT) is signal.default_int_handler
            assert signal.getsignal(TERM) is not before[0][0]
            WATCHDOG.release(second)
            assert state() == before
        return len(os.listdir("/proc/self/fd"))

    assert run(code) == run(lambda: len(os.listdir("/proc/self/fd")))


def test_a_handler_that_was_installed_since_is_left_alone() -> None:
    def code() -> bool:
        own = silent()
        WATCHDOG.watch(own)
        signal.signal(TERM, print)
        WATCHDOG.release(own)
        return signal.getsignal(TERM) is print and signal.getsignal(USR1) == signal.SIG_DFL

    assert run(code)


def test_a_handler_that_c_code_has_installed_since_is_left_alone(tmp_path: Path) -> None:
    """C's handler stays at a release and in a forked child, though Python still shows lightck's."""
    dump = tmp_path / "dump"

    def code() -> list[int]:
        own = silent()
        WATCHDOG.watch(own)
        with dump.open("w") as file:
            faulthandler.register(USR1, file)

            def dumped() -> int:
                signal.raise_signal(USR1)
                return dump.read_text().count("Current thread")

            found = [run(dumped), dumped()]
            WATCHDOG.release(own)
            return [*found, dumped(), int(signal.getsignal(TERM) == signal.SIG_DFL)]

    assert run(code) == [1, 2, 3, 1]


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_handler_that_others_kept_and_put_back_later_does_what_the_earlier_one_did(
    number: int,
) -> None:
    """`asyncio` and context managers keep handlers and may outlive a handle of lightck's."""

    def code(parent: Parent) -> None:
        own = silent()
        WATCHDOG.watch(own)
        kept = signal.signal(number, signal.SIG_IGN)
        WATCHDOG.release(own)
        signal.signal(number, kept)
        try:
            signal.raise_signal(number)
            parent.send("went on")
        except KeyboardInterrupt:
            parent.send("interrupted")

    with process(code) as child:
        if number == INT:
            assert child.receive() == "interrupted"
        else:
            assert child.join() == -TERM


def test_a_signal_that_came_just_before_the_release_is_answered_first() -> None:
    def code(parent: Parent) -> str:
        own = guard(parent)
        WATCHDOG.watch(own)
        for _ in range(20):
            try:
                signal.raise_signal(INT)
                WATCHDOG.release(own)
                parent.send("released")
                return "lost"
            except KeyboardInterrupt:
                pass  # as it must: the signal came before the release
            WATCHDOG.release(own)  # whoever was interrupted in between
            assert signal.getsignal(INT) is signal.default_int_handler
            WATCHDOG.watch(own)
        return "all came"

    with process(code) as child:
        assert [child.receive() for _ in range(20)] == [("save", "SIGINT")] * 20
        assert child.receive() == "all came"


def test_a_signal_that_nobody_listened_to_any_more_is_raised_when_it_is_given_back() -> None:
    def code() -> str:
        signals = Signals()
        signals.take({INT})
        signal.raise_signal(INT)
        try:
            signals.give_back()
        except KeyboardInterrupt:
            return "interrupted"
        return "lost"

    assert run(code) == "interrupted"


def test_a_release_off_the_main_thread_leaves_the_signals_what_they_were() -> None:
    def code(parent: Parent) -> None:
        signal.signal(signal.SIGHUP, lambda number, frame: parent.send("mine"))
        own = guard(parent, signals=("SIGTERM", "SIGHUP"))
        WATCHDOG.watch(own)
        _release_on_another_thread(own)
        signal.raise_signal(signal.SIGHUP)
        watched(parent, idle)  # another handle finds what is left of the first one

    with process(code) as child:
        assert child.receive() == "mine"
        assert child.receive() == "watched"
        send(child, TERM)
        assert child.receive() == ("save", "SIGTERM")
        assert child.join() == -TERM


def test_a_release_off_the_main_thread_alone_lets_sigterm_end_the_process() -> None:
    with process(lambda parent: _release_elsewhere(parent, idle)) as child:
        assert child.receive() == "released"
        send(child, TERM)
        assert child.join() == -TERM


def test_a_release_off_the_main_thread_lets_sigterm_end_a_process_that_stands_in_c_code() -> None:
    """The shell sends the signal, so that the main thread waits for it in C when it comes."""
    command = b"kill -TERM $PPID; while kill -0 $PPID 2> /dev/null; do sleep 0.1; done"
    with process(lambda parent: _release_elsewhere(parent, lambda: _system(command))) as child:
        assert child.receive() == "released"
        assert child.join() == -TERM


def test_a_release_off_the_main_thread_leaves_nothing_behind_the_next_handle() -> None:
    def code() -> bool:
        before, own = state(), silent()
        WATCHDOG.watch(own)
        _release_on_another_thread(own)
        WATCHDOG.watch(own)
        WATCHDOG.release(own)
        return state() == before

    assert run(code)


def _release_elsewhere(parent: Parent, then: Callable[[], object]) -> None:
    own = guard(parent)
    WATCHDOG.watch(own)
    _release_on_another_thread(own)
    parent.send("released")
    then()


def _release_on_another_thread(own: HandleGuard) -> None:
    elsewhere = threading.Thread(target=WATCHDOG.release, args=(own,))
    elsewhere.start()
    elsewhere.join()


def _system(command: bytes) -> int:
    return int(ctypes.CDLL(None).system(command))


def test_a_release_by_the_users_own_function_does_not_wait_for_itself() -> None:
    def code(parent: Parent) -> None:
        def decide(saved: Saved) -> None:
            WATCHDOG.release(own)
            parent.send("released")

        own = guard(parent, on_failure=decide)
        WATCHDOG.watch(own)
        parent.send("watched")
        idle()

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, TERM)
        assert child.receive() == ("save", "SIGTERM")
        assert child.receive() == "released"
        assert child.join() == -TERM


def test_two_releases_at_once_give_the_signals_back_once() -> None:
    def code(parent: Parent) -> Any:
        before, failed = state(), list[Any]()
        threading.excepthook = failed.append
        saves, goes_on, noticed = threading.Event(), threading.Event(), threading.Event()

        def during() -> None:
            saves.set()
            goes_on.wait()

        first = guard(parent, Telling(parent, during=during), notice=noticed.is_set)
        second = silent()
        WATCHDOG.watch(first)
        WATCHDOG.watch(second)
        noticed.set()
        saves.wait()
        elsewhere = threading.Thread(target=WATCHDOG.release, args=(first,))
        elsewhere.start()
        while first in WATCHDOG._guards:
            time.sleep(0.001)
        WATCHDOG.release(second)  # the last one, while the first release waits for its save
        goes_on.set()
        elsewhere.join()
        for each in {*threading.enumerate()} - {threading.main_thread()}:
            each.join()  # who has saved has said so, and ends
        return state() == before, [str(each.exc_value) for each in failed]

    with process(code) as child:
        assert child.receive() == ("save", "notice")
        assert child.receive() == (True, [])


# ---- other users of signals


def test_an_earlier_wake_up_descriptor_gets_its_bytes() -> None:
    def code(parent: Parent) -> Any:
        mine = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(mine[1])
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # not one of lightck's
        own = guard(parent)
        WATCHDOG.watch(own)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(USR1)
        WATCHDOG.release(own)
        return os.read(mine[0], 100), signal.set_wakeup_fd(-1) == mine[1]

    with process(code) as child:
        assert child.receive() == ("save", "SIGUSR1")
        assert child.receive() == (bytes([signal.SIGHUP, USR1]), True)


def test_a_callback_of_asyncio_from_before_runs_once_after_the_save() -> None:
    def code(parent: Parent) -> None:
        loop = asyncio.new_event_loop()
        loop.add_signal_handler(TERM, parent.send, "callback")
        own = guard(parent)
        WATCHDOG.watch(own)

        async def twice() -> None:
            for _ in range(2):
                signal.raise_signal(TERM)
                await asyncio.to_thread(parent.pause)

        loop.run_until_complete(twice())
        WATCHDOG.release(own)
        signal.raise_signal(TERM)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        parent.send("closed")

    with process(code) as child:
        for _ in range(2):
            assert child.receive() == ("save", "SIGTERM")
            assert child.receive() == "callback"
            child.let_go()
        assert child.receive() == "callback", "given back"
        assert child.receive() == "closed"


def test_signals_are_heard_through_python_when_another_library_takes_the_descriptor() -> None:
    def code(parent: Parent) -> None:
        def loop() -> None:
            running = asyncio.new_event_loop()
            running.add_signal_handler(signal.SIGHUP, parent.send, "loop")
            signal.raise_signal(signal.SIGHUP)
            running.call_soon(lambda: running.call_soon(running.stop))
            running.run_forever()
            for _ in range(3):
                signal.raise_signal(USR1)
                parent.pause()
            signal.raise_signal(TERM)
            idle()

        watched(parent, loop, Telling(parent, says_answered=True))

    with process(code) as child:
        assert child.receive() == "watched"
        assert child.receive() == "loop", "asyncio's own signals reach it"
        for _ in range(3):
            assert child.receive() == ("save", "SIGUSR1")
            assert child.receive() == "answered"
            child.let_go()
        assert child.receive() == ("save", "SIGTERM")
        assert child.join() == -TERM


def test_a_forked_child_inherits_nothing() -> None:
    def code(parent: Parent) -> Any:
        before = state()
        own = guard(parent)
        WATCHDOG.watch(own)

        def in_child() -> Any:
            return state() == (before[0], -1, ["MainThread"])

        same = run(in_child)
        dies = os.fork()
        if not dies:
            signal.raise_signal(TERM)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(dies, 0)[1])
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        WATCHDOG.release(own)  # a save for the child's signal would be sent before the result
        return same, status, held

    with process(code) as child:
        assert child.receive() == (True, -TERM, set())


def test_a_child_forked_off_the_main_thread_inherits_nothing() -> None:
    def code(parent: Parent) -> Any:
        WATCHDOG.watch(guard(parent))
        found: list[Any] = []

        def elsewhere() -> None:
            found.append(run(lambda: [signal.getsignal(n) for n in (TERM, INT, USR1)]))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return found

    with process(code) as child:
        assert child.receive() == [[signal.SIG_DFL, signal.default_int_handler, signal.SIG_DFL]]


def test_a_forked_child_may_be_watched_over_itself() -> None:
    def code(parent: Parent) -> None:
        WATCHDOG.watch(guard(parent))
        if os.fork():
            os.wait()
            return
        own = Telling(parent)
        try:
            watched(parent, lambda: signal.raise_signal(INT) or idle(), own)
        except KeyboardInterrupt:
            parent.send("interrupted")
            os._exit(0)

    with process(code) as child:
        assert child.receive() == "watched"
        assert child.receive() == ("save", "SIGINT")
        assert child.receive() == "interrupted"
        assert child.receive() is None
        assert child.join() == 0


def test_off_the_main_thread_the_user_is_told_once_and_notices_still_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def code(parent: Parent) -> Any:
        import logging

        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightck").addHandler(handler)
        noticed = threading.Event()

        def elsewhere() -> None:
            own = guard(parent, notice=noticed.is_set)
            WATCHDOG.watch(own)
            parent.send([text for text in told if "signals_unheard" in text])
            noticed.set()
            parent.pause()
            WATCHDOG.release(own)

        before = state()[:2]
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return state()[:2] == before

    with process(code) as child:
        (told,) = child.receive()
        assert "main thread" in told and "SIGTERM" in told
        assert child.receive() == ("save", "notice")
        child.let_go()
        assert child.receive() is True


def test_the_first_process_of_a_container_ends_too() -> None:
    """Default actions spare it: with the default it would have gone on for ever."""
    unshare = _pid_namespace()
    if unshare is None:
        pytest.skip("needs the right to make a PID namespace")

    def code(parent: Parent) -> None:
        assert unshare() == 0
        first = os.fork()
        if first:
            send_to = first
            parent.pause()
            os.kill(send_to, TERM)
            parent.send(("ended", os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])))
            return
        assert os.getpid() == 1
        watched(parent, idle)

    with process(code) as child:
        assert child.receive() == "watched"
        child.let_go()
        assert child.receive() == ("save", "SIGTERM")
        assert child.receive() == ("ended", 128 + TERM)


def _pid_namespace() -> Callable[[], int] | None:
    """Makes one for the children that are forked from then on; None where that is not allowed."""
    import ctypes

    def unshare() -> int:
        result: int = ctypes.CDLL(None).unshare(0x20000000)  # CLONE_NEWPID
        return result

    return unshare if run(unshare) == 0 else None
