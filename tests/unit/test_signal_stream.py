"""The bytes in the wake-up pipe tell of signals: written by hand, in every order that occurs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from unittest import mock

import pytest

from lightck.failure import signals as disposition
from lightck.failure.signals import Outcome, Signals

NUMBER = signal.SIGUSR1
LAST = signal.SIGRTMAX
TRIP, CALL, PASSED, CHAINED = (lambda n, k=k: bytes([(64 * k + n) % 256]) for k in range(4))
WAKE = bytes([signal.SIGKILL])


@pytest.fixture
def signals() -> Iterator[Signals]:
    taken = Signals()
    taken.take({NUMBER, LAST})
    yield taken
    taken.give_back()


def heard(signals: Signals, *parts: bytes) -> list[int]:
    """Return the signals that have come, asked for after each part is written."""
    found = []
    for part in parts:
        os.write(signals._write, part)
        found += signals.wait(0.0)
    return found


@pytest.mark.parametrize("number", [1, NUMBER, LAST])
def test_every_number_and_kind_has_a_byte_of_its_own(number: int) -> None:
    every = [kind(n)[0] for kind in (TRIP, CALL, PASSED, CHAINED) for n in range(1, 65)]
    assert len(set(every)) == 4 * 64
    written: list[bytes] = []
    signals = Signals()
    with mock.patch("os.write", lambda fd, data: written.append(data)):
        for kind in range(1, 4):
            signals._say(kind, number)
        signals.wake()
    signals.give_back()
    assert written == [CALL(number), PASSED(number), CHAINED(number), WAKE]


@pytest.mark.parametrize("number", [NUMBER, LAST])
def test_a_signal_is_heard_once_however_its_bytes_come(signals: Signals, number: int) -> None:
    trip, call = TRIP(number), CALL(number)
    assert heard(signals, trip, call) == [number]
    assert heard(signals, trip + call) == [number]
    assert heard(signals, trip + trip + call) == [number], "Python calls once for both"
    assert heard(signals, trip, trip, call) == [number, number], "the second came later"


def test_a_call_without_a_trip_is_a_signal_whose_byte_went_elsewhere(signals: Signals) -> None:
    with mock.patch("lightck.failure.signals.event_aside") as told:
        assert heard(signals, CALL(NUMBER)) == [NUMBER]
        assert heard(signals, CALL(NUMBER), CALL(LAST)) == [NUMBER, LAST]
    assert [call.args[0] for call in told.call_args_list] == ["wakeup_lost"], "told once"
    assert heard(signals, TRIP(NUMBER), CALL(NUMBER)) == [NUMBER]


def test_what_is_sent_to_the_main_thread_itself_is_no_new_signal(signals: Signals) -> None:
    taken = signals._taken[NUMBER]
    for stream in (
        [TRIP(NUMBER), PASSED(NUMBER)],
        [TRIP(NUMBER) + PASSED(NUMBER)],
        # A call that was owed passes it on: the echo's own call comes afterwards.
        [PASSED(NUMBER), TRIP(NUMBER), CALL(NUMBER)],
    ):
        assert heard(signals, TRIP(NUMBER)) == [NUMBER]
        if stream[0] == TRIP(NUMBER):
            assert heard(signals, CALL(NUMBER)) == []
        taken.echo = True
        assert heard(signals, *stream) == []
        assert heard(signals, TRIP(NUMBER), CALL(NUMBER)) == [NUMBER], "the next one is"


def test_an_echo_that_went_elsewhere_hides_no_later_signal(signals: Signals) -> None:
    signals._lost = True
    assert heard(signals, CALL(NUMBER)) == [NUMBER]
    signals._taken[NUMBER].echo = True
    assert heard(signals, PASSED(NUMBER)) == []
    assert heard(signals, TRIP(NUMBER), CALL(NUMBER)) == [NUMBER]


def test_a_signal_of_others_only_wakes(signals: Signals) -> None:
    assert heard(signals, TRIP(signal.SIGCHLD), WAKE) == []


def test_signals_come_in_their_order(signals: Signals) -> None:
    assert heard(signals, TRIP(LAST) + TRIP(NUMBER) + TRIP(LAST)) == [LAST, NUMBER]


@pytest.mark.parametrize(
    ("name", "handler", "outcome"),
    [
        ("SIGTERM", signal.SIG_DFL, Outcome.ENDS),
        ("SIGHUP", signal.SIG_DFL, Outcome.ENDS),
        ("SIGRTMIN", signal.SIG_DFL, Outcome.ENDS),
        ("SIGHUP", signal.SIG_IGN, Outcome.GOES_ON),
        ("SIGUSR1", signal.SIG_DFL, Outcome.GOES_ON),
        ("SIGUSR2", signal.SIG_DFL, Outcome.GOES_ON),
        ("SIGUSR1", print, Outcome.FUNCTION),
        ("SIGINT", signal.default_int_handler, Outcome.FUNCTION),
        ("SIGTSTP", signal.SIG_DFL, Outcome.KERNEL),
    ],
)
def test_the_process_goes_where_its_earlier_handler_took_it(
    name: str, handler: signal.Handlers, outcome: Outcome
) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, handler)
    try:
        signals = Signals()
        signals.take({number})
        assert signals.outcome(number) is outcome
        signals.give_back()
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)


def test_an_action_is_read_and_written_back() -> None:
    before = disposition.read(NUMBER)
    assert not disposition.is_function(before) and not disposition.is_ignored(before)
    disposition.write(NUMBER, (1).to_bytes(8, "little"))
    assert disposition.is_ignored(disposition.read(NUMBER))
    disposition.write(NUMBER, before)
    assert disposition.read(NUMBER) == before
    assert disposition.is_function(disposition.read(signal.SIGINT))


def test_an_impossible_signal_is_an_error_with_its_number() -> None:
    with pytest.raises(OSError, match="sigaction of signal 9"):
        disposition.write(signal.SIGKILL, disposition.DEFAULT)
