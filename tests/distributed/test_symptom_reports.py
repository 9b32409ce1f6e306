"""Symptoms of any rank reach rank 0 over the job's store, which is silent while all is well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightck.distributed import symptom_reports
from lightck.distributed.store import default_store
from lightck.distributed.symptom_reports import SymptomReports, watch_symptoms
from lightck.distributed.topology import Topology
from lightck.health import HealthMonitor
from lightck.policy import Auto, EverySteps, Quality
from support.distributed import ranks as jobs
from support.distributed.memory import MemoryStore, Server

LONG_S = 100.0


class Fixed:
    """A probe that finds what it is told to."""

    period_s = 0.001

    def __init__(self, name: str = "fixed") -> None:
        self.name = name
        self.found: Mapping[str, float] = {}

    def read(self) -> Mapping[str, float]:
        return self.found


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def ranks(
    world: int, store: Callable[[int], MemoryStore], clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[list[Fixed], list[SymptomReports]]]:
    probes = [Fixed() for _ in range(world)]
    made = [
        SymptomReports(
            HealthMonitor([probe]), store(rank), Topology(rank, world), look_s=0.005, clock=clock
        )
        for rank, probe in enumerate(probes)
    ]
    try:
        yield probes, made
    finally:
        for each in made:
            each.stop()


def until(look: Callable[[], Mapping[str, float]], expected: Mapping[str, float]) -> None:
    deadline = time.monotonic() + LONG_S
    while look() != expected:
        assert time.monotonic() < deadline, look()
        time.sleep(0.002)


def test_a_symptom_of_any_rank_reaches_rank_0_and_falls_there_again() -> None:
    server = Server()
    with ranks(3, lambda rank: MemoryStore(server)) as (probes, made):
        probes[0].found = {"gpu_action": 1}
        probes[1].found = {"gpu_action": 1}
        probes[2].found = {"gpu_action": 2, "memory": 1}
        until(made[0].active, {"gpu_action": 4.0, "memory": 1.0})
        until(made[1].active, {"gpu_action": 1.0})  # others know their own
        probes[2].found = {}
        until(made[0].active, {"gpu_action": 2.0})
        probes[1].found = {}
        probes[0].found = {}
        until(made[0].active, {})


def test_a_healthy_job_sends_nothing_but_rank_0s_look() -> None:
    server = Server()
    with ranks(2, lambda rank: MemoryStore(server)):
        deadline = time.monotonic() + LONG_S
        while server.messages["read"] < 10:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    assert set(server.messages) == {"read"}
    assert server.values == {}


def test_reports_that_were_read_are_deleted() -> None:
    server = Server()
    with ranks(2, lambda rank: MemoryStore(server)) as (probes, made):
        for count in (1, 2):
            probes[1].found = {"memory": count}
            until(made[0].active, {"memory": float(count)})
    store = MemoryStore(server)
    assert store.read("count") is not None
    assert store.read("1") is None


def test_a_report_is_repeated_while_it_lasts_and_expires_with_its_rank() -> None:
    clock, server = Clock(), Server()
    with ranks(2, lambda rank: MemoryStore(server), clock) as (probes, made):
        probes[1].found = {"memory": 1}
        until(made[0].active, {"memory": 1.0})
        for _ in range(4):
            before = int(MemoryStore(server).read("count") or 0)
            clock.now_s += symptom_reports.REPEAT_S
            deadline = time.monotonic() + LONG_S
            while int(MemoryStore(server).read("count") or 0) == before:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            until(made[0].active, {"memory": 1.0})
        made[1].stop()
        time.sleep(0.05)  # what it was doing is over, and has been read
        clock.now_s += symptom_reports.HOLDS_S + 1
        until(made[0].active, {})


def test_a_store_that_fails_is_asked_again() -> None:
    server = Server()
    away = threading.Event()
    away.set()

    def store(rank: int) -> MemoryStore:
        return MemoryStore(server, lambda operation, key: "before" if away.is_set() else None)

    with ranks(2, store) as (probes, made):
        probes[1].found = {"memory": 1}
        time.sleep(0.05)
        assert made[0].active() == {}
        away.clear()
        until(made[0].active, {"memory": 1.0})


def test_what_is_no_report_is_left_out_and_a_number_without_one_waits() -> None:
    server = Server()
    store = MemoryStore(server)
    with ranks(2, lambda rank: MemoryStore(server)) as (probes, made):
        late = store.add("count")
        for text in ("{", "[]", '{"rank": 1}', '{"rank": 1, "active": {"x": "y"}}'):
            store.set(str(store.add("count")), text.encode())
        probes[1].found = {"memory": 1}
        until(made[0].active, {"memory": 1.0})
        store.set(str(late), b'{"rank": 7, "active": {"link": 2}}')
        until(made[0].active, {"memory": 1.0, "link": 2.0})


def test_the_nodes_first_rank_reads_what_is_the_same_for_all(tmp_path: Path) -> None:
    class OfNode(Fixed):
        of_node = True

    def seen(rank: int, peers: tuple[int, ...]) -> Mapping[str, float]:
        node, own = OfNode("node"), Fixed("own")
        node.found, own.found = {"dram": 1}, {"gpu_error": 1}
        monitor = watch_symptoms(Auto(watch=(node, own)), tmp_path, Topology(rank, 4, peers))
        expected = {"gpu_error": 1.0} if rank != peers[0] else {"gpu_error": 1.0, "dram": 1.0}
        try:
            until(monitor.active, expected)
            return monitor.active()
        finally:
            monitor.stop()

    assert "dram" in seen(2, (2, 3))
    assert "dram" not in seen(3, (2, 3))


def test_a_notice_that_sees_symptoms_is_watched_and_another_is_not(tmp_path: Path) -> None:
    class Notice(Fixed):
        def __call__(self) -> bool:
            return False

    class Either:
        def __init__(self, *notices: object) -> None:
            self.notices = notices

    one = Notice()
    one.found = {"rebalance": 1}
    for notice in (one, Either(lambda: False, Either(one))):
        monitor = watch_symptoms(Auto(watch=(Fixed(),)), tmp_path, Topology(), notice=notice)
        until(monitor.active, {"rebalance": 1.0})
        monitor.stop()


def test_the_probes_are_those_that_the_policies_name_or_all_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(
        symptom_reports, "HealthMonitor", lambda probes: made.append([p.name for p in probes])
    )
    one, two = Fixed("one"), Fixed("two")
    every = [each.name for each in symptom_reports.probes(tmp_path)]
    for policy, expected in (
        (Auto(), every),
        (Auto(watch=(one,)), ["one"]),
        (Auto(watch=(one, two)) | EverySteps(5), ["one", "two"]),
        (EverySteps(5) | (Auto(watch=(one,)) & Quality(watch=(one, two))), ["one", "two"]),
        (Auto(watch=(one,)) | Quality(), ["one", *every]),
        (Auto(watch=False) | Quality(watch=(two,)), ["two"]),
        (SimpleNamespace(needs={"health"}), every),
    ):
        watch_symptoms(policy, tmp_path, Topology())
        assert made.pop() == expected, policy


def test_a_symptom_reaches_rank_0_over_the_jobs_real_store() -> None:
    def train(me: jobs.Me) -> float | None:
        probe = Fixed()
        store = default_store().below("symptoms")
        topology = Topology(me.rank, me.world, (me.rank,))
        reports = watch_symptoms(Auto(watch=(probe,)), Path(), topology, store)
        try:
            if me.rank == 1:
                probe.found = {"gpu_error": 1}
                me.pause()
                return None
            began = time.monotonic()
            until(reports.active, {"gpu_error": 1.0})
            return time.monotonic() - began
        finally:
            reports.stop()

    with jobs.started(2, train) as job:
        (took,) = job.outcomes([0])
        print(f"{took:.2f} s")
        job.let_go(1)
        assert job.results()[1] is None
