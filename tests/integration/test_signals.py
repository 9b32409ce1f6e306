"""Real signals to real processes: what is saved, and where the process goes from there.

Every process is forked and ends, or says so, by itself: nothing here waits for a time.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lightck.failure.hang import HangWatch
from lightck.failure.watchdog import HANG_STATUS, WATCHDOG, HandleGuard, SaveTask
from lightck.types import Failure, Saved
from support.processes import Child, Parent
from support.watched import (
    Still,
    Telling,
    arrive,
    guard,
    idle,
    on_main,
    process,
    says_no_more,
    send,
    stuck,
    watched,
)

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


def saves_and_ends(child: Child) -> None:
    """SIGTERM: saved for, and then the child's end."""
    send(child, TERM)
    assert child.receive() == ("save", "SIGTERM")
    assert child.join() == -TERM


# ---- where the process goes


@pytest.mark.parametrize("main_thread", [idle, stuck, lambda: time.sleep(600)])
def test_sigterm_saves_and_then_ends_the_process_by_sigterm(main_thread: Any) -> None:
    with process(lambda parent: watched(parent, main_thread)) as child:
        assert child.receive() == "watched"
        saves_and_ends(child)


def test_sigint_saves_and_then_raises_in_the_main_thread() -> None:
    def code(parent: Parent) -> str:
        try:
            watched(parent, lambda: time.sleep(600))
        except KeyboardInterrupt:
            return f"interrupted, main thread: {on_main()}"
        return "slept on"

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, INT)
        assert child.receive() == ("save", "SIGINT")
        assert child.receive() == "interrupted, main thread: True"
        assert child.join() == 0


def test_sigusr1_saves_each_time_and_goes_on() -> None:
    with process(lambda p: watched(p, idle, Telling(p, says_answered=True))) as child:
        assert child.receive() == "watched"
        for _ in range(3):
            send(child, USR1)
            assert child.receive() == ("save", "SIGUSR1")
            assert child.receive() == "answered"
        saves_and_ends(child)


def test_a_handler_of_before_runs_on_the_main_thread_after_the_save() -> None:
    def code(parent: Parent) -> None:
        def mine(number: int, frame: FrameType | None) -> None:
            parent.send(("mine", number, frame is not None, on_main()))

        signal.signal(TERM, mine)
        watched(parent, idle, Telling(parent, says_answered=True))

    with process(code) as child:
        assert child.receive() == "watched"
        for _ in range(3):
            send(child, TERM)
            assert child.receive() == ("save", "SIGTERM")
            said = [child.receive(), child.receive()]
            assert set(said) == {"answered", ("mine", TERM, True, True)}


def test_a_handler_of_after_attach_runs_at_once_and_the_state_is_saved() -> None:
    def code(parent: Parent) -> None:
        def later() -> None:
            signal.signal(TERM, lambda number, frame: parent.send("later"))
            parent.send("installed")
            idle()

        watched(parent, later, Telling(parent, says_answered=True))

    with process(code) as child:
        assert [child.receive(), child.receive()] == ["watched", "installed"]
        for _ in range(3):
            send(child, TERM)
            said = [child.receive() for _ in range(3)]
            assert set(said) == {"later", ("save", "SIGTERM"), "answered"}


def test_a_handler_of_after_attach_that_calls_the_one_it_found_reaches_the_first() -> None:
    def code(parent: Parent) -> None:
        def later() -> None:
            found = signal.getsignal(TERM)

            def chaining(number: int, frame: FrameType | None) -> None:
                parent.send("later")
                assert callable(found)
                found(number, frame)

            signal.signal(TERM, chaining)
            parent.send("installed")
            idle()

        signal.signal(TERM, lambda number, frame: parent.send("first"))
        watched(parent, later, Telling(parent, says_answered=True))

    with process(code) as child:
        assert [child.receive(), child.receive()] == ["watched", "installed"]
        for _ in range(3):
            send(child, TERM)
            said = [child.receive() for _ in range(4)]
            assert set(said) == {"later", "first", ("save", "SIGTERM"), "answered"}
            assert said.index("later") < said.index("first")


def chains_late(parent: Parent, pauses: bool) -> None:
    """Install a handler that calls the one it found, perhaps when it is let go."""
    found = signal.getsignal(TERM)

    def chaining(number: int, frame: FrameType | None) -> None:
        if pauses:
            parent.pause()
        assert callable(found)
        found(number, frame)

    signal.signal(TERM, chaining)
    parent.send("installed")
    idle()


@pytest.mark.parametrize("pauses", [False, True], ids=["at once", "when the signal is answered"])
def test_a_handler_of_after_attach_that_calls_the_one_it_found_reaches_the_default(
    pauses: bool,
) -> None:
    def code(parent: Parent) -> None:
        rescue = Telling(parent, says_answered=pauses)
        watched(parent, lambda: chains_late(parent, pauses), rescue)

    with process(code) as child:
        assert [child.receive(), child.receive()] == ["watched", "installed"]
        send(child, TERM)
        assert child.receive() == ("save", "SIGTERM")
        if pauses:
            assert child.receive() == "answered"
            child.let_go()
        assert says_no_more(child), "nothing is saved twice"
        assert child.join() == -TERM


@pytest.mark.parametrize("pauses", [False, True], ids=["at once", "when the signal is answered"])
def test_a_chain_to_the_default_ends_nothing_that_the_user_wants_to_go_on(pauses: bool) -> None:
    def code(parent: Parent) -> None:
        rescue = Telling(parent, says_answered=True)
        then = lambda: chains_late(parent, pauses)  # noqa: E731
        watched(parent, then, rescue, on_failure=lambda saved: True)

    with process(code) as child:
        assert [child.receive(), child.receive()] == ["watched", "installed"]
        for _ in range(2):
            send(child, TERM)
            assert [child.receive(), child.receive()] == [("save", "SIGTERM"), "answered"]
            if pauses:
                child.let_go()


def test_signals_that_were_ignored_are_ignored_again_after_the_save() -> None:
    def code(parent: Parent) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        rescue = Telling(parent, says_answered=True)
        watched(parent, idle, rescue, signals=("SIGHUP", "SIGTERM"))

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, signal.SIGHUP)
        assert child.receive() == ("save", "SIGHUP")
        assert child.receive() == "answered"
        send(child, TERM)
        assert child.receive() == ("save", "SIGTERM")


def test_a_handler_of_c_code_runs_after_the_save(tmp_path: Path) -> None:
    dump = tmp_path / "dump"

    def code(parent: Parent) -> None:
        with dump.open("w") as file:
            faulthandler.register(USR1, file, all_threads=True)
            # The main thread is stuck: such a handler does not need it.
            watched(parent, stuck, Telling(parent, says_answered=True))

    with process(code) as child:
        assert child.receive() == "watched"
        for _ in range(2):  # ours is there again afterwards
            send(child, USR1)
            assert child.receive() == ("save", "SIGUSR1")
            assert child.receive() == "answered"
        saves_and_ends(child)
    assert dump.read_text().count("Thread") >= 2


def test_the_user_may_decide_that_nothing_has_come() -> None:
    def code(parent: Parent) -> None:
        def decide(saved: Saved) -> bool:
            parent.send((saved.reason, saved.step, saved.fresh, on_main()))
            return saved.reason != "SIGINT"

        try:
            watched(parent, idle, Telling(parent, says_answered=True), on_failure=decide)
        except KeyboardInterrupt:
            parent.send("interrupted")
            parent.pause()

    with process(code) as child:
        assert child.receive() == "watched"
        for _ in range(2):
            send(child, TERM)
            assert child.receive() == ("save", "SIGTERM")
            assert child.receive() == ("SIGTERM", 7, True, False)
            assert child.receive() == "answered"
        send(child, INT)
        assert child.receive() == ("save", "SIGINT")
        assert child.receive() == ("SIGINT", 7, True, False)
        assert {child.receive(), child.receive()} == {"answered", "interrupted"}
        child.let_go()


def test_an_error_of_the_users_function_is_told_and_changes_nothing() -> None:
    def code(parent: Parent) -> None:
        watched(parent, idle, on_failure=lambda saved: 1 / 0)

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, TERM)
        assert child.receive() == ("save", "SIGTERM")
        kind, text = child.receive()
        assert kind == "error" and "SIGTERM" in text and "ZeroDivisionError" in text
        assert child.join() == -TERM


def test_a_process_that_was_stopped_is_not_ended_for_a_hang_at_once() -> None:
    """Stopped for longer than a hanging process lives: looks count, not the clock."""
    exit_s, look_s = 1.0, 0.05

    def code(parent: Parent) -> None:
        class Moving(Telling):
            seen = Still(step_s=0.001)

            def progress(self) -> Still:
                parent.send("look")
                return self.seen

        own = guard(parent, Moving(parent), hang_s=0.1, hang_exit_s=exit_s)
        own.hang.period_s = look_s
        WATCHDOG.watch(own)
        own.hang._steps.append(0.001)  # otherwise nothing tells how long a step takes
        stuck()

    with process(code) as child:
        while child.receive() != ("save", "hang"):
            pass
        for _ in range(5):  # by then it is being counted
            assert child.receive() == "look"
        child.stop()
        time.sleep(1.5 * exit_s)
        child.go_on()
        looks = 0
        with pytest.raises(AssertionError, match="without a word"):
            while True:
                looks += child.receive() == "look"
        assert child.join() == HANG_STATUS
        assert looks >= exit_s / (2 * look_s) - 5  # each counts for two at most


# ---- several at once


@pytest.mark.parametrize(
    ("first", "others"),
    [(USR1, [TERM]), (INT, [TERM]), (TERM, [TERM]), (USR1, [INT, TERM]), (TERM, [INT])],
)
def test_signals_that_come_while_one_is_saved_for_share_its_save_and_the_most_final_wins(
    first: int, others: list[int]
) -> None:
    def code(parent: Parent) -> None:
        rescue = Telling(parent, during=lambda: [arrive(each) for each in others])
        try:
            watched(parent, idle, rescue)
        except KeyboardInterrupt:
            parent.send("interrupted")

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, first)
        assert child.receive() == ("save", signal.Signals(first).name)
        assert says_no_more(child), "not saved again, not interrupted"
        assert child.join() == -TERM


def test_sigint_twice_is_one_save_and_one_interrupt() -> None:
    def code(parent: Parent) -> str:
        rescue = Telling(parent)
        rescue.during = lambda: arrive(INT)
        own = guard(parent, rescue, on_failure=lambda saved: parent.send("asked"))
        WATCHDOG.watch(own)
        parent.send("watched")
        interrupts = 0
        while not interrupts:
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                interrupts += 1
        WATCHDOG.release(own)  # whatever else was on its way has come by then
        return f"{interrupts} interrupt"

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, INT)
        assert child.receive() == ("save", "SIGINT")
        assert child.receive() == "asked"
        assert child.receive() == "1 interrupt"


def test_what_could_not_be_saved_for_one_signal_is_tried_again_for_the_next() -> None:
    def code(parent: Parent) -> None:
        rescue = Telling(parent, fresh=False)

        def meanwhile() -> None:
            rescue.during, rescue.fresh = lambda: None, False
            arrive(TERM)

        rescue.during = meanwhile
        watched(parent, idle, rescue)

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, USR1)
        assert child.receive() == ("save", "SIGUSR1")
        assert child.receive() == ("save", "SIGTERM")
        assert child.join() == -TERM


def test_a_save_that_hangs_keeps_sigterm_no_longer_than_the_grace_period() -> None:
    def code(parent: Parent) -> None:
        watched(parent, stuck, Telling(parent, during=threading.Event().wait), grace_s=3.0)

    with process(code) as child:
        assert child.receive() == "watched"
        saves_and_ends(child)


def test_a_log_that_hangs_keeps_sigterm_no_longer_than_the_grace_period() -> None:
    """A log hangs, for one, when nobody reads the pipe behind stderr any more."""

    def code(parent: Parent) -> None:
        handler = logging.Handler()
        handler.emit = lambda record: threading.Event().wait()  # type: ignore[method-assign,assignment]
        logging.getLogger("lightck").addHandler(handler)
        watched(parent, stuck, grace_s=3.0)

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, TERM)
        assert child.receive() == ("save", "SIGTERM"), "saved first, told then"
        assert child.join() == -TERM


@pytest.mark.parametrize("ask", [threading.Event().wait, lambda: 1 / 0])
def test_a_notice_that_blocks_or_fails_keeps_no_signal_waiting(ask: Any) -> None:
    def code(parent: Parent) -> None:
        hang = HangWatch.of_world(Failure(notice=ask), 1)
        own = HandleGuard(Telling(parent), hang, lambda error: None)
        WATCHDOG.watch(own)
        parent.send("watched")
        stuck()

    with process(code) as child:
        assert child.receive() == "watched"
        saves_and_ends(child)


def test_sigterm_during_a_save_for_a_notice_waits_for_that_one_only() -> None:
    def code(parent: Parent) -> None:
        waiting, waits = threading.Event(), SaveTask.wait

        def wait(self: SaveTask, deadline_s: float) -> bool:
            waiting.set()
            return waits(self, deadline_s)

        def meanwhile() -> None:
            os.kill(os.getpid(), TERM)
            waiting.wait()  # the watchdog has heard of it

        SaveTask.wait = wait  # type: ignore[method-assign]
        rescue = Telling(parent, during=meanwhile)
        watched(parent, stuck, rescue, notice=lambda: True)

    with process(code) as child:
        assert {child.receive(), child.receive()} == {"watched", ("save", "notice")}
        assert says_no_more(child), "nothing is saved twice"
        assert child.join() == -TERM


def test_two_handles_are_both_saved_and_the_process_ends_once() -> None:
    def code(parent: Parent) -> None:
        WATCHDOG.watch(guard(parent, Telling(parent, says_answered=True)))
        watched(parent, idle, signals=("SIGTERM", "SIGHUP"))

    with process(code) as child:
        assert child.receive() == "watched"
        send(child, signal.SIGUSR1)
        assert child.receive() == ("save", "SIGUSR1"), "only one of them wants to hear of this"
        assert child.receive() == "answered"
        send(child, TERM)
        assert [child.receive(), child.receive()] == [("save", "SIGTERM")] * 2
        assert child.join() == -TERM
