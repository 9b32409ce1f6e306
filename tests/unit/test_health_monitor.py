"""The monitor: symptoms count for as long as the table says, and no probe costs a run anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from lightck.errors import LightckError
from lightck.events import Subscriber
from lightck.health import HealthMonitor, UnavailableError
from lightck.health import monitor as module
from lightck.policy.symptoms import SYMPTOMS, symptom
from lightck.types import Probe

LONG_S = 100.0


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Said:
    """A probe that reads once each time that the test says what it finds."""

    period_s = 0.001

    def __init__(self, name: str = "said", detail: str = "") -> None:
        self.name, self.detail = name, detail
        self._next: Any = {}
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._first = True

    def read(self) -> Mapping[str, float]:
        if not self._first:  # the monitor has noted the answer before, and asks again
            self._answered.release()
        self._first = False
        self._asked.acquire()
        if isinstance(self._next, Exception):
            raise self._next
        return self._next

    def finds(self, found: object) -> None:
        """Answer, and return when the monitor has noted it."""
        self._next = found
        self._asked.release()
        assert self._answered.acquire(timeout=LONG_S)

    def release(self) -> None:
        """Let the probe's thread go."""
        self._next = {}
        self._asked.release()


@contextmanager
def events() -> Iterator[Callable[[], list[tuple[str, dict[str, Any]]]]]:
    """Yield a function that returns the events so far, but those of nothing to read."""
    told: list[tuple[str, dict[str, Any]]] = []
    subscriber = Subscriber(lambda *each: told.append(each), report=lambda *each: None)

    def so_far() -> list[tuple[str, dict[str, Any]]]:
        assert subscriber.deliver(LONG_S)
        return [*told]

    yield so_far
    subscriber.stop()


@contextmanager
def watched(*probes: Said, clock: Clock | None = None) -> Iterator[HealthMonitor]:
    monitor = HealthMonitor(probes, clock=clock or Clock())
    try:
        yield monitor
    finally:
        monitor.stop()
        for each in probes:
            each.release()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_every_symptom_of_the_table_is_called_by_its_name_and_is_finite() -> None:
    for name, known in SYMPTOMS.items():
        assert known.name == name
        assert 0 < known.after_s < 1e9
        assert known.holds_s >= 0
        assert known.evidence


def test_a_symptom_of_a_users_probe_has_a_default() -> None:
    assert symptom("fan") == symptom("fan")
    assert symptom("fan").name == "fan"
    assert not symptom("fan").medium
    assert symptom("link") is SYMPTOMS["link"]


def test_a_probe_of_a_user_needs_no_base_class() -> None:
    assert isinstance(Said(), Probe)


def test_a_grown_counter_counts_for_as_long_as_the_table_says() -> None:
    clock, probe = Clock(), Said()
    with watched(probe, clock=clock) as monitor:
        assert monitor.active() == {}
        probe.finds({"link": 2})
        probe.finds({})  # the counter stands still again
        assert monitor.active() == {"link": 2.0}
        clock.now_s += SYMPTOMS["link"].holds_s - 1
        assert monitor.active() == {"link": 2.0}
        probe.finds({"link": 1})
        clock.now_s += SYMPTOMS["link"].holds_s - 1
        assert monitor.active() == {"link": 1.0}, "an hour after the last growth, not the first"
        clock.now_s += 2
        assert monitor.active() == {}


def test_a_symptom_without_a_time_of_its_own_is_over_when_it_is_seen_no_more() -> None:
    clock, probe = Clock(), Said()
    with watched(probe, clock=clock) as monitor:
        probe.finds({"gpu_action": 2, "link": 1})
        assert monitor.active() == {"gpu_action": 2.0, "link": 1.0}
        probe.finds({"gpu_action": 1})
        assert monitor.active() == {"gpu_action": 1.0, "link": 1.0}
        probe.finds({})
        assert monitor.active() == {"link": 1.0}


def test_what_several_probes_see_is_added_up() -> None:
    one, two = Said("one"), Said("two")
    with watched(one, two) as monitor:
        one.finds({"gpu_error": 1})
        two.finds({"gpu_error": 2, "fan": 0.5})
        assert monitor.active() == {"gpu_error": 3.0, "fan": 0.5}


def test_a_probe_that_hangs_is_told_once_and_what_it_saw_last_expires() -> None:
    clock, hanging, other = Clock(), Said("nvml"), Said("other")
    with events() as so_far, watched(hanging, other, clock=clock) as monitor:
        hanging.finds({"gpu_action": 1})
        clock.now_s += module.HANG_S + 1
        for _ in range(3):
            assert "gpu_action" not in monitor.active()
        other.finds({"fan": 1})
        assert monitor.active() == {"fan": 1.0}, "the others go on"
        hang = ("probe_hangs", {"probe": "nvml", "seconds": 61})
        until(lambda: hang in so_far())
        assert so_far().count(hang) == 1


def test_a_probe_that_raises_is_told_once_until_it_succeeds() -> None:
    probe = Said("fan")
    with events() as so_far, watched(probe) as monitor:
        for found in (OSError("one"), OSError("two"), {"fan": 1}, ValueError("three")):
            probe.finds(found)
        failed = [fields["error"] for name, fields in so_far() if name == "probe_failed"]
        assert failed == ["OSError('one')", "ValueError('three')"]
        assert monitor.active() == {"fan": 1.0}, "what it saw goes on to count"


@pytest.mark.parametrize(
    "lie",
    [
        None,
        7,
        ["link"],
        {"link": float("nan")},
        {"link": float("inf")},
        {"link": -1},
        {"link": "2"},
        {7: 1},
        {"": 1},
        {"x" * 41: 1},
        {str(number): 1 for number in range(33)},
    ],
    ids=repr,
)
def test_what_is_no_reading_is_told_and_counts_for_nothing(lie: object) -> None:
    probe = Said()
    with events() as so_far, watched(probe) as monitor:
        probe.finds(lie)
        assert monitor.active() == {}
        (told,) = [fields for name, fields in so_far() if name == "probe_failed"]
        assert "expected a dict" in told["error"]


def test_a_reading_of_zero_is_no_symptom() -> None:
    assert module.checked({"link": 0, "fan": 2}) == {"fan": 2.0}


def test_what_is_not_there_is_told_once_and_read_no_more() -> None:
    class Absent:
        name, period_s, reads = "absent", 0.001, 0

        def read(self) -> Mapping[str, float]:
            self.reads += 1
            raise UnavailableError("there is no such device")

    probe = Absent()
    with events() as so_far:
        monitor = HealthMonitor([probe])
        until(lambda: so_far())
        time.sleep(0.02)
        assert probe.reads == 1
        assert so_far() == [
            ("probe_unavailable", {"probe": "absent", "why": "there is no such device"})
        ]
        monitor.stop()
    assert issubclass(UnavailableError, LightckError)


def test_a_medium_at_risk_is_told_once_with_its_device_and_what_to_do() -> None:
    clock, probe = Clock(), Said("drives", detail="sda: 5 reallocated and 2 pending sectors")
    with events() as so_far, watched(probe, clock=clock) as monitor:
        assert monitor.risk == ""
        for _ in range(3):
            probe.finds({"drive": 1})
            clock.now_s += 1e6
        assert monitor.active() == {"drive": 1.0}, "for good"
        assert monitor.risk == probe.detail
        (told,) = [fields for name, fields in so_far() if name == "medium_at_risk"]
        assert told["device"] == probe.detail
        assert "lightck export" in told["advice"]


def test_a_monitor_that_is_stopped_reads_no_more() -> None:
    probe = Said()
    monitor = HealthMonitor([probe])
    probe.finds({"link": 1})
    monitor.stop()
    monitor.stop()
    probe._next = {"fan": 1}
    probe._asked.release()
    time.sleep(0.02)
    assert "fan" not in monitor.active()
