"""Ranks decide together at attach on run, nodes and timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightck.distributed.restore.selection import RankView, decide_restore
from lightck.distributed.rounds import MAX_BYTES, AgreementRounds, Identity, agree_on_attach
from lightck.distributed.topology import Topology, agree_on_topology, decide_topology, topology_of
from lightck.errors import CoordinationError
from support.distributed.memory import MemoryStore, Server
from support.distributed.missing import never_come

T1 = 11


def together(
    world: int,
    code: Callable[[AgreementRounds], Any],
    *,
    server: Server | None = None,
    absent: Sequence[int] = (),
    timeout_s: float = 20.0,
) -> list[Any]:
    """Run `code` as every rank on threads; what each returned or raised."""
    server = server or Server()
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = code(AgreementRounds(MemoryStore(server), rank, world, timeout_s))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world) if r not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


IDENTITY = Identity(bytes(16), 3, "/mnt/pmem/run", 3, "every 5 steps", None)


def test_all_ranks_share_the_timeline() -> None:
    timelines = together(3, lambda rounds: agree_on_attach(rounds, IDENTITY))
    assert len(set(timelines)) == 1
    assert 0 < timelines[0] < 2**63
    assert together(3, lambda rounds: agree_on_attach(rounds, IDENTITY)) != timelines


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", b"1" * 16),
        ("world", 4),
        ("path", "/tmp/elsewhere"),
        ("slots", 2),
        ("policy", "every 6 steps"),
        ("restored", (T1, 4)),
    ],
)
def test_every_rank_hears_which_rank_differs(field: str, value: object) -> None:
    def attach(rounds: AgreementRounds) -> int:
        mine = replace(IDENTITY, **{field: value}) if rounds.rank == 2 else IDENTITY
        return agree_on_attach(rounds, mine)

    results = together(3, attach)
    for result in results:
        assert isinstance(result, CoordinationError)
        assert f"the ranks differ in {field}" in str(result)
        assert "on rank(s) 2" in str(result)


@pytest.mark.parametrize("absent", [1, 0])
def test_a_rank_that_does_not_come_is_named_on_every_other(
    absent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_come([absent], put=monkeypatch.setattr)
    results = together(3, lambda rounds: agree_on_attach(rounds, IDENTITY), absent=[absent])
    others = [result for rank, result in enumerate(results) if rank != absent]
    for result in others:
        assert isinstance(result, CoordinationError)
        assert f"attach: rank(s) {absent} of 3 did not come in " in str(result)
        assert "key round/0" in str(result)


def test_ranks_in_different_rounds_are_told_so() -> None:
    def code(rounds: AgreementRounds) -> object:
        if rounds.rank == 1:
            return rounds.agree("restore", RankView("/mnt", None).to_message(), decide_restore)
        return agree_on_attach(rounds, IDENTITY)

    for result in together(2, code):
        assert "rank 0 is in attach and rank 1 in restore" in str(result)


def test_what_a_rank_cannot_say_every_rank_hears_of() -> None:
    def code(rounds: AgreementRounds) -> object:
        said = {"text": "x" * (MAX_BYTES * (rounds.rank == 1))}
        return rounds.agree("attach", said, lambda said: {})

    for result in together(3, code):
        assert isinstance(result, CoordinationError)
        assert f"rank 1: it has {MAX_BYTES + 27} bytes to say, more than {MAX_BYTES}" in str(result)


def test_a_decision_that_breaks_is_an_error_on_every_rank() -> None:
    for result in together(2, lambda rounds: rounds.agree("attach", {}, lambda said: said[7])):
        assert isinstance(result, CoordinationError)
        assert "attach: rank 0 could not decide: IndexError" in str(result)


def test_keys_of_another_life_are_noticed() -> None:
    server = Server()
    code = lambda rounds: [agree_on_attach(rounds, IDENTITY) for _ in range(3)]  # noqa: E731
    assert all(isinstance(each, list) for each in together(2, code, server=server))
    assert len(server.values) <= 2 * (2 + 3) + 1, "rounds leave keys behind"
    for result in together(2, code, server=server):
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in str(result)


def test_messages_per_rank_do_not_grow_with_the_world() -> None:
    def per_rank(world: int) -> float:
        server = Server()
        together(world, lambda rounds: agree_on_attach(rounds, IDENTITY), server=server)
        return sum(server.messages.values()) / world

    assert per_rank(64) <= per_rank(4) <= 6


# ---- topology ----


def test_ranks_on_one_node_find_each_other() -> None:
    def code(rounds: AgreementRounds) -> Topology:
        return agree_on_topology(rounds, environment={}, node=f"host{rounds.rank % 2}")

    found = together(5, code)
    assert [t.peers for t in found] == [(0, 2, 4), (1, 3), (0, 2, 4), (1, 3), (0, 2, 4)]
    assert [(t.rank, t.world) for t in found] == [(rank, 5) for rank in range(5)]
    assert len({t.run_id for t in found}) == 1


def test_ranks_that_cannot_read_each_other_s_regions_share_nothing() -> None:
    """Pools are one process's at a time; containers mount other media at one path."""

    def peers(*reach: str | None) -> list[tuple[int, ...]]:
        def code(rounds: AgreementRounds) -> Topology:
            return agree_on_topology(rounds, environment={}, node="host", reach=reach[rounds.rank])

        return [place.peers for place in together(len(reach), code)]

    assert peers("1:2", "1:2") == [(0, 1), (0, 1)]
    assert peers("1:2", "3:4", "1:2") == [(0, 2), (1,), (0, 2)]
    assert peers("", "") == [(0,), (1,)]


def test_a_name_settles_the_run_id_and_two_names_are_an_error() -> None:
    named = together(
        2, lambda r: agree_on_topology(r, environment={"LIGHTCK_RUN_ID": "a"} if r.rank else {})
    )
    assert named[0].run_id == named[1].run_id == agree_on_topology(None, name="a").run_id
    for result in together(2, lambda r: agree_on_topology(r, name=f"job{r.rank}", environment={})):
        assert "'job0' on rank 0, 'job1' on rank 1" in str(result)


def test_ten_thousand_ranks_read_a_decision_of_some_bytes_per_node() -> None:
    said = [{"name": "x", "node": f"host{r // 8}", "world": 10_000} for r in range(10_000)]
    decision = decide_topology(said)
    assert len(str(decision)) < 12 * 1250
    assert topology_of(9_999, decision).peers == tuple(range(9_992, 10_000))


def test_a_wait_that_ends_with_nothing_there_is_no_answer() -> None:
    """torch's server wakes every waiting client when one of them reads what is not there."""

    class Nervous(MemoryStore):
        def wait(self, key: str, seconds: float) -> bool:
            time.sleep(0.02)
            return True

    rounds = AgreementRounds(Nervous(Server()), 1, 2, timeout_s=0.2)
    with pytest.raises(CoordinationError, match=r"rank\(s\) 0 of 2 did not come"):
        rounds.agree("restore", {}, lambda said: {})
