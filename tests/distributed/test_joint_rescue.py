"""A rank's save is told to the others, who save themselves, once; and never of two instants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_peers import LONG_S, NOWHERE, until

from lightck.distributed.topology import Topology
from lightck.errors import DeviceError
from lightck.failure.jit_save import JitSaver
from lightck.failure.jit_save_ranks import RankJitSaver
from lightck.failure.peer_monitor import PeerMonitor, PeerStatus
from lightck.types import Saved
from support.distributed.memory import MemoryStore, Server


class Node:
    """Ranks whose own saves are only noted."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        server, self.stack = Server(), ExitStack()
        self.ranks: list[RankJitSaver] = []
        self.saves: dict[int, list[tuple[str, bool]]] = {r: [] for r in range(world)}
        self.settled: dict[int, int] = dict.fromkeys(range(world), 0)
        self.early: set[int] = set()
        """Ranks that have not come to forward start."""
        self.stuck: set[int] = set()
        """Ranks that cannot save."""
        for rank in range(world):
            topology = Topology(rank, world, peers=tuple(range(world)))
            monitor = PeerMonitor(MemoryStore(server), topology, NOWHERE, poll_s=0.005)
            self.stack.callback(monitor.stop, LONG_S)
            pipeline = SimpleNamespace(region=SimpleNamespace(slots=[]))
            steps = SimpleNamespace(step=7)
            checkpointer: Any = SimpleNamespace(
                rank=rank, steps=steps, pipeline=pipeline, device_lag=None
            )
            whole: Any = SimpleNamespace(
                save_if_lacking=lambda _, rank=rank, **__: self._settle(rank)
            )
            self.ranks.append(RankJitSaver(checkpointer, whole_saver=whole, monitor=monitor))

        def save(own: Any, reason: str, deadline: float, *, early: bool = False) -> Saved:
            rank = own.checkpointer.rank
            self.saves[rank].append((reason, early))
            early = early or rank in self.early
            return Saved(reason, 7, fresh=rank not in self.stuck, early=early)

        monkeypatch.setattr(JitSaver, "save", save)

    def _settle(self, rank: int) -> bool:
        self.settled[rank] += 1
        return False

    def part(self) -> None:
        """Let every rank be on a node of its own."""
        for rank, each in enumerate(self.ranks):
            each.monitor.topology = Topology(rank, len(self.ranks), peers=(rank,))

    def save(self, rank: int, reason: str) -> Saved:
        return self.ranks[rank].save(reason, time.monotonic() + LONG_S)

    def hear(self, rank: int, notices: int) -> PeerStatus:
        return until(self.ranks[rank].monitor.poll, lambda status: len(status.notices) >= notices)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node(3, monkeypatch)
    with node.stack:
        yield node


def test_another_rank_s_failure_is_a_reason_to_save_here_once(node: Node) -> None:
    assert node.ranks[0].new_peer_failure() is None
    node.save(1, "SIGTERM")
    node.hear(0, 1)
    assert node.ranks[0].new_peer_failure() == "rank 1: SIGTERM"
    assert node.ranks[0].new_peer_failure() is None
    assert node.settled == {0: 0, 1: 1, 2: 0}


def test_a_save_for_another_rank_s_reason_is_no_reason_for_anybody(node: Node) -> None:
    """Ranks would answer each other for ever otherwise."""
    node.save(1, "SIGTERM")
    for rank in (0, 2):
        node.hear(rank, 1)
        reason = node.ranks[rank].new_peer_failure()
        assert reason == "rank 1: SIGTERM"
        node.save(rank, reason)
    for rank in range(3):
        node.hear(rank, 2)
        assert node.ranks[rank].new_peer_failure() is None, rank


def test_the_same_save_is_told_once(node: Node) -> None:
    for _ in range(3):
        node.save(1, "hang")
    node.save(2, "SIGTERM")
    assert [word.rank for word in node.hear(0, 2).notices] == [1, 2]


def test_an_early_snapshot_elsewhere_takes_this_rank_to_the_early_instant_too(node: Node) -> None:
    node.part()
    node.early.add(1)
    node.save(1, "SIGTERM")
    node.hear(0, 1)
    assert node.save(0, "rank 1: SIGTERM").early
    assert node.saves[0] == [("rank 1: SIGTERM", False), ("rank 1: SIGTERM", True)]


def test_an_early_snapshot_on_this_node_is_no_reason_for_another(node: Node) -> None:
    """Where shares are of two instants the whole snapshot has both."""
    node.early.add(1)
    node.save(1, "SIGTERM")
    node.hear(0, 1)
    node.save(0, "rank 1: SIGTERM")
    assert node.saves[0] == [("rank 1: SIGTERM", False)] and node.settled[0] == 1


def test_a_rank_that_has_saved_hears_of_an_earlier_instant_later(node: Node) -> None:
    node.part()
    node.save(0, "SIGTERM")
    node.early.add(1)
    node.hear(1, 1)
    reason = node.ranks[1].new_peer_failure()
    assert reason is not None
    node.save(1, reason)
    node.hear(0, 1)
    again = node.ranks[0].new_peer_failure()
    assert again == "another rank's snapshot is of the instant before"
    assert node.save(0, again).early
    node.hear(1, 2)
    assert node.ranks[1].new_peer_failure() is None
    assert node.ranks[0].new_peer_failure() is None


def test_a_rank_that_cannot_save_says_so_and_completes_nothing(node: Node) -> None:
    node.stuck.add(1)
    node.save(1, "SIGTERM")
    assert node.hear(0, 1).notices[0].step is None
    assert node.settled[1] == 0


def test_what_a_rank_could_not_save_long_ago_says_nothing_of_a_later_failure(node: Node) -> None:
    node.stuck.add(1)
    node.save(1, "a test")
    node.save(1, "a test")
    node.save(2, "SIGTERM")
    assert [word.last_step for word in node.hear(0, 2).notices] == [7, 7], "said once"
    own: Any = node.ranks[0].checkpointer
    for step, settled in ((7, True), (8, False)):  # rank 2 has saved step 7
        own.steps.step = step
        assert node.ranks[0].is_settled() is settled
    node.save(2, "SIGTERM")
    for each in node.ranks:
        each.checkpointer.steps.step = 9
    node.ranks[0].monitor._dead = (2,)
    assert not node.ranks[0].is_settled(), "rank 1 has gone on since"
    node.save(1, "a test")
    node.hear(0, 3)
    assert node.ranks[0].is_settled()


def test_a_dead_peer_is_settled_once_its_share_has_been_looked_after(node: Node) -> None:
    """The dead peer has said all that it could: this rank must have what its share goes with."""
    own = node.ranks[0]
    node.save(1, "hang")
    node.hear(0, 1)
    own.monitor._dead = (2,)
    assert own.is_settled(), "nothing is saved here"
    own._saved_step = 7
    assert not own.is_settled()
    assert own.new_peer_failure() == "rank 2: killed" and not own.is_settled()
    node.save(0, "rank 2: killed")
    assert own.is_settled()


@pytest.mark.parametrize(
    ("stood", "ahead", "hangs", "alone", "stuck"),
    [
        (True, True, False, False, True),
        (True, False, False, False, False),
        (False, True, False, False, False),
        (True, False, True, False, True),
        (True, False, True, True, False),
    ],
)
def test_a_rank_that_stands_is_not_waited_for_if_it_hangs_or_another_of_its_node_is_ahead(
    node: Node, stood: bool, ahead: bool, hangs: bool, alone: bool, stuck: bool
) -> None:
    """A rank that is alone on its node waits: nobody else could write its share."""
    own: Any = node.ranks[0]
    own.hang = SimpleNamespace(has_not_moved=lambda at: stood, is_stuck=lambda at: hangs)
    own.progress = lambda: SimpleNamespace(step=6 if ahead else 7)
    if alone:
        own.monitor.topology = Topology(0, 3, peers=(0,))
    node.save(1, "hang")
    node.hear(0, 1)
    assert own.gives_up_update() == stuck


def test_a_killed_peer_is_a_reason_once(node: Node, tmp_path: Path) -> None:
    node.ranks[0].monitor._dead = (2,)
    assert node.ranks[0].new_peer_failure() == "rank 2: killed"
    assert node.ranks[0].new_peer_failure() is None


def test_a_dead_peer_s_early_instant_is_told_to_the_other_nodes(node: Node) -> None:
    """Other nodes hold the exact instant of that step, which no dead rank's share goes with."""
    node.part()
    own = node.ranks[0]
    own.whole_saver = SimpleNamespace(save_if_lacking=lambda deadline, **_: True)  # type: ignore[assignment]
    node.save(1, "SIGTERM")
    assert node.save(0, "rank 2: killed").early
    words = node.hear(1, 2).notices
    assert [(word.step, word.early) for word in words] == [(7, False), (7, True)]
    assert node.ranks[1].new_peer_failure() is not None
    assert node.save(1, "rank 0: killed").early


def test_a_device_that_stands_before_an_update_may_wait_for_others(node: Node) -> None:
    rank, before = node.ranks[0], SimpleNamespace(step=7)
    own: Any = rank.checkpointer
    assert rank.hung_device() is None
    own.device_lag = SimpleNamespace(hung_state=lambda: before)
    first, again = rank.hung_device(), rank.hung_device()
    assert first is not None and first == again and "to step 8" in first.text
    before = SimpleNamespace(step=7)
    other = rank.hung_device()
    assert other is not None and other.mark != first.mark

    def failed() -> None:
        raise DeviceError("cuda:0 is lost")

    own.device_lag = SimpleNamespace(hung_state=failed)
    assert rank.hung_device() is None
