"""What ranks decide together: run, nodes, timeline, the snapshot to restore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from memory import MemoryStore, Server

from lightck.distributed.agreement import (
    Candidate,
    Choice,
    Identity,
    agree_on_attach,
    agree_on_restore,
    decide_restore,
)
from lightck.distributed.exchange import Rounds
from lightck.distributed.topology import Topology, find, place, settle
from lightck.errors import CoordinationError

T1, T2, T3 = 11, 12, 13


def together(
    world: int,
    code: Callable[[Rounds], Any],
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
            results[rank] = code(Rounds(MemoryStore(server), rank, world, timeout_s))
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
    def attach(rounds: Rounds) -> int:
        mine = replace(IDENTITY, **{field: value}) if rounds.rank == 2 else IDENTITY
        return agree_on_attach(rounds, mine)

    results = together(3, attach)
    for result in results:
        assert isinstance(result, CoordinationError)
        assert f"the ranks differ in {field}" in str(result)
        assert "on rank(s) 2" in str(result)


@pytest.mark.parametrize("absent", [1, 0])
def test_a_rank_that_does_not_come_is_named_on_every_other(absent: int) -> None:
    results = together(
        3, lambda rounds: agree_on_attach(rounds, IDENTITY), absent=[absent], timeout_s=0.2
    )
    others = [result for rank, result in enumerate(results) if rank != absent]
    for result in others:
        assert isinstance(result, CoordinationError)
        assert f"attach: rank(s) {absent} of 3 did not come in 0." in str(result)
        assert "key round/0" in str(result)


def test_ranks_in_different_rounds_are_told_so() -> None:
    def code(rounds: Rounds) -> object:
        if rounds.rank == 1:
            return agree_on_restore(rounds, [], [])
        return agree_on_attach(rounds, IDENTITY)

    for result in together(2, code):
        assert "rank 0 is in attach and rank 1 in restore" in str(result)


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
    def code(rounds: Rounds) -> Topology:
        return find(rounds, environment={}, node=f"host{rounds.rank % 2}")

    found = together(5, code)
    assert [t.peers for t in found] == [(0, 2, 4), (1, 3), (0, 2, 4), (1, 3), (0, 2, 4)]
    assert [(t.node, t.local_rank, t.local_world) for t in found[:3]] == [
        (0, 0, 3),
        (1, 0, 2),
        (0, 1, 3),
    ]
    assert len({t.run_id for t in found}) == 1


def test_a_name_settles_the_run_id_and_two_names_are_an_error() -> None:
    named = together(2, lambda r: find(r, environment={"LIGHTCK_RUN_ID": "a"} if r.rank else {}))
    assert named[0].run_id == named[1].run_id == find(None, name="a").run_id
    for result in together(2, lambda r: find(r, name=f"job{r.rank}", environment={})):
        assert "'job0' on rank 0, 'job1' on rank 1" in str(result)


def test_ten_thousand_ranks_read_a_decision_of_some_bytes_per_node() -> None:
    said = [{"name": "x", "node": f"host{r // 8}", "world": 10_000} for r in range(10_000)]
    decision = settle(said)
    assert len(str(decision)) < 12 * 1250
    assert place(9_999, decision).peers == tuple(range(9_992, 10_000))


# ---- restore ----


def regions(*steps_of_ranks: Sequence[int], timeline: int = T1) -> list[list[Candidate]]:
    world = len(steps_of_ranks)
    return [
        [Candidate(timeline, s, r, world) for s in steps] for r, steps in enumerate(steps_of_ranks)
    ]


def decide(
    candidates: Sequence[Sequence[Candidate]],
    lineages: Sequence[Sequence[int]] | None = None,
    covers: Any = None,
    step: int | None = None,
) -> Choice:
    said = [
        {
            "candidates": [list(asdict(c).values()) for c in mine],
            "timelines": (lineages or [[T1]] * len(candidates))[rank],
            "step": step,
        }
        for rank, mine in enumerate(candidates)
    ]
    return Choice(**decide_restore(said, covers))


def test_the_newest_step_that_every_rank_holds_is_chosen() -> None:
    choice = decide(regions([8, 7, 6], [7, 6], [8, 7]))
    assert (choice.timeline, choice.step) == (T1, 7)
    assert choice.passed_over == ("step 8: not whole, missing on rank(s) 1",)
    assert "newest that is whole" in choice.why


def test_nothing_in_common_is_nothing_to_restore() -> None:
    choice = decide(regions([8], [7]))
    assert choice.timeline is None
    assert len(choice.passed_over) == 2
    assert decide([[], []], [[], []]).timeline is None


def test_a_step_is_never_combined_with_its_namesake_of_another_timeline() -> None:
    first, second = regions([10, 9], [10, 9])
    second = [Candidate(T2, 10, 1, 2), *second[1:]]
    assert decide([first, second], [[T1], [T2, T1]]).step == 9


def test_a_deliberate_fallback_is_not_undone_by_a_node_that_missed_it() -> None:
    # Node 1 (rank 1) was away while the others went back to 9 and on to 10 in T2.
    kept = [Candidate(T2, 10, 0, 2), Candidate(T1, 9, 0, 2)]
    away = [Candidate(T3, 40, 1, 2), Candidate(T1, 9, 1, 2)]
    one = lambda world: lambda held: bool(held)  # noqa: E731 - any rank holds it all
    choice = decide([kept, kept, away], [[T2, T1], [T2, T1], [T3, T1]], covers=one)
    assert (choice.timeline, choice.step) == (T2, 10)
    assert "step 40: of a timeline that was abandoned" in choice.passed_over


def test_a_rank_that_died_before_its_own_branch_still_agrees() -> None:
    choice = decide(regions([9, 8], [9, 8]), [[T2, T1], [T1]])
    assert (choice.timeline, choice.step) == (T1, 9)


def test_one_whole_node_suffices_for_replicated_state() -> None:
    nodes = [frozenset({0, 1}), frozenset({2, 3})]
    covers = lambda world: lambda held: any(node <= held for node in nodes)  # noqa: E731
    choice = decide(regions([8, 7], [7], [8, 7], [8, 7]), covers=covers)
    assert choice.step == 8
    assert decide(regions([8, 7], [7], [8, 7], [7]), covers=covers).step == 7


def test_fewer_ranks_speak_for_the_regions_of_more() -> None:
    four = regions([8, 7], [8, 7], [7], [8, 7])
    choice = decide([four[0] + four[2], four[1] + four[3]])
    assert (choice.step, choice.world) == (7, 4)


def test_a_suspect_step_comes_after_all_others() -> None:
    marked = [
        [replace(c, suspect=c.step == 8 and c.holder == 1) for c in mine]
        for mine in regions([8, 7], [8, 7])
    ]
    assert decide(marked).step == 7
    assert "step 8: suspect, replicas differed" in decide(marked).passed_over
    only = [[c for c in mine if c.step == 8] for mine in marked]
    assert decide(only).step == 8
    assert "is suspect" in decide(only).why


def test_an_early_step_yields_to_an_exact_one_just_before_it() -> None:
    early = [[replace(c, early=c.step == 8) for c in mine] for mine in regions([8, 7], [8, 7])]
    assert decide(early).step == 7
    assert decide([[c for c in mine if c.step != 7] for mine in early]).step == 8
    older = [[replace(c, early=c.step == 8) for c in mine] for mine in regions([8, 6], [8, 6])]
    assert decide(older).step == 8


def test_a_named_step_is_the_only_one_considered() -> None:
    assert decide(regions([8, 7], [8, 7]), step=7).step == 7
    assert decide(regions([8, 7], [8, 7]), step=6).timeline is None

    def code(rounds: Rounds) -> Choice:
        return agree_on_restore(rounds, [], [], step=5 + rounds.rank)

    for result in together(2, code):
        assert "different steps: ['5', '6']" in str(result)


def test_every_rank_reads_the_same_choice_and_its_reason() -> None:
    held = regions([8, 7], [7], [8, 7])
    choices = together(3, lambda r: agree_on_restore(r, held[r.rank], [T1]))
    assert choices[0] == choices[1] == choices[2]
    assert choices[0].step == 7
    assert choices[0].passed_over
