"""Ranks hear of each other's failures by words over the store, and by locks that are free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightck.distributed.topology import Topology
from lightck.errors import StoreError
from lightck.failure.peer_monitor import FailureNotice, PeerMonitor, PeerStatus
from lightck.region import location
from lightck.region.location import Location
from lightck.region.native_region import RegionSpec
from lightck.region.region import Region
from support.distributed import ranks
from support.distributed.memory import MemoryStore, Server
from support.distributed.training import Training

LONG_S = 100.0
NOWHERE = Location(Path("/nowhere"), Path("/nowhere"), is_device=True)


@contextmanager
def listening(
    server: Server, world: int = 2, where: Callable[[int], Location] = lambda rank: NOWHERE
) -> Iterator[list[PeerMonitor]]:
    made = [
        PeerMonitor(
            MemoryStore(server),
            Topology(rank, world, peers=tuple(range(world))),
            where(rank),
            poll_s=0.005,
        )
        for rank in range(world)
    ]
    try:
        yield made
    finally:
        for each in made:
            each.stop(LONG_S)


def until(look: Callable[[], PeerStatus], what: Callable[[PeerStatus], object]) -> PeerStatus:
    deadline = time.monotonic() + LONG_S
    while not what(status := look()):
        assert time.monotonic() < deadline, status
        time.sleep(0.002)
    return status


def looked(peers: PeerMonitor) -> PeerStatus:
    """Return what is known when the locks have been looked at once more, from the beginning."""
    enough = peers._polls + 2
    return until(peers.poll, lambda status: peers._polls >= enough)


def made(folder: Path, rank: int, world: int = 2) -> Region:
    where = location.locate(folder, rank, create=True)
    spec = RegionSpec(bytes(16), 2, 1 << 16, rank, world, process_durable=True)
    return Region.create(where, spec)


def test_what_a_rank_says_is_heard_by_every_other_and_not_by_itself() -> None:
    with listening(Server(), 3) as peers:
        assert all(each.poll().is_quiet for each in peers)
        assert peers[1].announce("SIGTERM", 7, early=True, seconds=LONG_S)
        for rank in (0, 2):
            status = until(peers[rank].poll, lambda status: status.notices)
            assert status.notices == (FailureNotice(1, "SIGTERM", 7, early=True),)
        assert peers[1].poll().is_quiet


def test_words_come_in_the_order_in_which_they_were_said() -> None:
    with listening(Server(), 3) as peers:
        assert peers[1].announce("RuntimeError: connection closed", seconds=LONG_S)
        assert peers[2].announce("hang", 3, seconds=LONG_S)
        assert peers[1].announce("RuntimeError: connection closed", 3, seconds=LONG_S)
        status = until(peers[0].poll, lambda status: len(status.notices) == 3)
        assert [(word.rank, word.step) for word in status.notices] == [(1, None), (2, 3), (1, 3)]


def test_a_reason_of_any_length_and_alphabet_can_be_said() -> None:
    with listening(Server()) as peers:
        assert peers[0].announce("k\u00f6nnte " + "x" * 10_000, seconds=LONG_S)
        word = until(peers[1].poll, lambda status: status.notices).notices[0]
        assert word.reason.startswith("k?nnte x") and len(word.reason) == 500


def test_a_word_lost_between_its_number_and_its_text_holds_no_other_up() -> None:
    server = Server()
    MemoryStore(server).add("count")  # and its speaker was killed
    with listening(server) as peers:
        assert peers[0].announce("hang", seconds=LONG_S)
        until(peers[1].poll, lambda status: status.notices)


def test_many_ranks_that_fail_at_once_are_not_all_read() -> None:
    server = Server()
    with listening(server) as peers:
        for i in range(100):
            assert peers[0].announce(f"{i}", seconds=LONG_S)
    with listening(server) as peers:
        until(peers[1].poll, lambda status: len(status.notices) == 16)
        assert peers[0].announce("later", seconds=LONG_S)  # no job is deaf after its first failures
        status = until(peers[1].poll, lambda status: len(status.notices) > 16)
        assert [word.reason for word in status.notices[15:]] == ["15", "later"]


def test_a_quiet_store_costs_one_message_per_look() -> None:
    server = Server()
    with listening(server) as peers:
        deadline = time.monotonic() + LONG_S
        while server.messages["read"] < 20:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert set(server.messages) <= {"read"}, server.messages
        assert all(each.poll().is_quiet for each in peers)


class Away(MemoryStore):
    """A store that does not answer while `away` is set."""

    away = False

    def read(self, key: str) -> Any:
        self._must_be_there()
        return super().read(key)

    def add(self, key: str, amount: int = 1) -> int:
        self._must_be_there()
        return super().add(key, amount)

    def _must_be_there(self) -> None:
        if self.away:
            raise StoreError("no route")


def test_an_unreachable_store_is_no_failure_and_what_was_to_be_said_is_said_later() -> None:
    server, topology = Server(), Topology(0, 2, peers=(0, 1))
    store = Away(server)
    store.away = True
    peers = PeerMonitor(store, topology, NOWHERE, poll_s=0.005)
    try:
        status = until(peers.poll, lambda status: status.unreachable)
        assert status.is_quiet and status.unreachable == "no route"
        assert not peers.announce("SIGTERM", 4, seconds=0.02)
        store.away = False
        until(peers.poll, lambda status: not status.unreachable)
        deadline = time.monotonic() + LONG_S
        while MemoryStore(server).read("1") is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        peers.stop(LONG_S)


def test_a_store_that_hangs_holds_nobody_up() -> None:
    class Hanging(MemoryStore):
        def read(self, key: str) -> Any:
            done.wait(LONG_S)
            raise StoreError("the server is gone")

    done = threading.Event()
    peers = PeerMonitor(Hanging(Server()), Topology(0, 2, peers=(0, 1)), NOWHERE, poll_s=0.005)
    began = time.monotonic()
    assert not peers.announce("SIGTERM", seconds=0.05)
    assert peers.poll().is_quiet
    peers.stop(0.05)
    assert time.monotonic() - began < LONG_S / 2
    done.set()
    peers.stop(LONG_S)


def test_a_file_system_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank hears what the others say meanwhile, and at once."""
    asked, done = threading.Event(), threading.Event()

    def hangs() -> bool:
        asked.set()
        return done.wait(LONG_S)

    peer = SimpleNamespace(rank=1, is_dead=hangs, closed=False)
    monkeypatch.setattr("lightck.failure.peer_monitor._node_ranks", lambda topology, where: [peer])
    with listening(Server()) as peers:
        assert asked.wait(LONG_S)
        began = time.monotonic()
        assert peers[0].poll().is_quiet
        peers[1].announce("SIGTERM")
        assert [word.rank for word in until(peers[0].poll, lambda h: h.notices).notices] == [1]
        peers[0].stop(0.05)
        assert time.monotonic() - began < LONG_S / 2
        done.set()
        assert until(peers[0].poll, lambda status: status.dead).dead == (1,)


def test_a_free_lock_is_a_dead_rank_only_once_it_was_held(region_dir: Path) -> None:
    def where(rank: int) -> Location:
        return location.locate(region_dir, rank, create=False)

    made(region_dir, 1).close()  # of an earlier life
    with listening(Server(), 2, where) as peers:
        assert looked(peers[0]).is_quiet, "it has not come yet"
        region = Region.open(where(1), writable=True, process_durable=True)
        assert looked(peers[0]).is_quiet
        region.close()
        assert looked(peers[0]).dead == (1,)
        assert looked(peers[0]).dead == (1,)


def test_a_folder_that_goes_away_is_no_failure(region_dir: Path) -> None:
    region = made(region_dir, 1)
    with listening(Server(), 2, lambda r: location.locate(region_dir, r, create=False)) as peers:
        assert looked(peers[0]).is_quiet
        region.place.file.unlink()
        region.close()
        assert looked(peers[0]).is_quiet


@pytest.mark.parametrize("way", ["kill", "close"])
def test_a_killed_rank_is_seen_and_one_that_closed_is_not(region_dir: Path, way: str) -> None:
    def code(me: ranks.Me) -> Any:
        training = Training(me.rank)
        handle = training.attach(region_dir / "run")
        training.steps(2)
        if me.rank == 1:
            me.send("ready")
            me.pause()
            handle.detach()
            me.send("closed")
            me.pause()
            return None
        where = location.locate(region_dir / "run", 0, create=False)
        topology = Topology(0, 2, peers=(0, 1))
        peers = PeerMonitor(MemoryStore(Server()), topology, where, poll_s=0.01)
        assert looked(peers).is_quiet
        me.send("listening")
        me.pause()
        closed = way == "close"
        found = looked(peers) if closed else until(peers.poll, lambda status: status.dead)
        peers.stop()
        handle.detach()
        return found.dead

    with ranks.started(2, code) as job:
        assert job.receive(0) == "listening" and job.receive(1) == "ready"
        if way == "close":
            job.let_go(1)
            assert job.receive(1) == "closed"
        else:
            job.kill(1)
        job.let_go(0)
        assert job.outcomes([0]) == [() if way == "close" else (1,)]
