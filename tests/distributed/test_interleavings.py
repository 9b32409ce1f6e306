"""The commit protocol over every order of messages of two and three ranks."""

from __future__ import annotations

from typing import Any

import pytest

from lightck.distributed.commit import due_steps as module
from lightck.distributed.commit.protocol import Add, Claim, CommitProtocol, DueStep
from support.distributed import interleavings
from support.distributed.interleavings import Rank, explore, world


@pytest.mark.parametrize(
    "case",
    [
        {"ranks": 2, "due": 3, "slots": 3},
        {"ranks": 2, "due": 2, "slots": 3, "tears": 2},
        {"ranks": 2, "due": 3, "slots": 2},
        {"ranks": 2, "due": 2, "slots": 3, "outages": 1},
        {"ranks": 2, "due": 2, "slots": 3, "deaths": 1},
        {"ranks": 2, "due": 1, "slots": 2, "outages": 3, "tears": 1},
        {"ranks": 3, "due": 1, "slots": 3, "tears": 1, "outages": 1},
        pytest.param({"ranks": 3, "due": 2, "slots": 3}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_no_order_gives_two_fates_or_costs_the_last_whole_step(case: dict[str, int]) -> None:
    found = explore(world(**case))
    print(f"{case}: {found}")
    assert found.whole, "no order made a step whole: the search shows nothing"
    if case.keys() & {"tears", "outages", "deaths"}:
        assert found.dead, "no order made a step dead: the search shows nothing"


@pytest.mark.parametrize(
    "case",
    [
        {"ranks": 2, "due": 2, "slots": 3, "unlike": 1},
        {"ranks": 2, "due": 1, "slots": 2, "unlike": 1, "outages": 2},
        {"ranks": 2, "due": 1, "slots": 2, "unlike": 1, "deaths": 1},
        {"ranks": 3, "due": 1, "slots": 2, "unlike": 1},
    ],
    ids=str,
)
def test_ranks_with_other_states_make_no_step_whole_in_any_order(case: dict[str, int]) -> None:
    found = explore(world(**case))
    assert found.dead >= found.ends, "no order made such a step dead: the search shows nothing"
    assert (found.whole > 0) == (case["due"] > case["unlike"])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"ranks": 2, "due": 2, "slots": 3, "odd": {1: 1}}, marks=pytest.mark.soak),
        {"ranks": 2, "due": 2, "slots": 2, "odd": {1: 0}},
        {"ranks": 2, "due": 2, "slots": 3, "odd": {2: 0}},
        {"ranks": 2, "due": 2, "slots": 2, "odd": {1: 1, 2: 1}},
        {"ranks": 2, "due": 2, "slots": 2, "odd": {1: 1}, "tears": 1},
        {"ranks": 2, "due": 1, "slots": 2, "odd": {1: 1}, "outages": 2},
        {"ranks": 2, "due": 1, "slots": 2, "odd": {1: 0}, "deaths": 1},
        {"ranks": 3, "due": 1, "slots": 3, "odd": {1: 2}},
        {"ranks": 2, "due": 2, "slots": 2, "odd": {}, "tears": 1},
    ],
    ids=str,
)
def test_no_order_lets_a_difference_pass_or_trusts_what_follows_it(case: dict[str, Any]) -> None:
    found = explore(world(**case))
    print(f"{case}: {found}")
    assert bool(found.suspect) == bool(case["odd"])
    if 1 not in case["odd"]:
        assert found.whole, "no order made a step whole before it: the search shows nothing"


def test_a_rank_that_counts_itself_before_it_says_that_it_differs_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = CommitProtocol._call_for

    def hasty(self: CommitProtocol, step: int, case: Any) -> Any:
        case.accuse = ""
        return right(self, step, case)

    monkeypatch.setattr(CommitProtocol, "_call_for", hasty)
    with pytest.raises(AssertionError, match="replicas differ since step 1"):
        explore(world(2, 1, slots=3, odd={1: 1}))


def test_a_rank_that_is_content_with_a_word_of_an_older_step_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = CommitProtocol._call_for

    def content(self: CommitProtocol, step: int, case: Any) -> Any:
        case.accuse = case.accuse.strip("y")
        return right(self, step, case)

    monkeypatch.setattr(CommitProtocol, "_call_for", content)
    with pytest.raises(AssertionError, match="what differs at 2 is named"):
        explore(world(2, 2, slots=2, odd={1: 1, 2: 1}))


def test_a_suspect_snapshot_that_replaces_the_trusted_one_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def newest(self: CommitProtocol, step: int, value: bytes) -> None:
        self._best = max((True, step), self._best or (True, step))

    monkeypatch.setattr(CommitProtocol, "_stands", newest)
    with pytest.raises(AssertionError, match="is whole, and all ranks hold"):
        explore(world(2, 3, slots=2, odd={2: 1}))


@pytest.mark.parametrize("due", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_keys_of_finished_blocks_are_deleted_and_never_come_back(
    due: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 1)
    deleted = []
    monkeypatch.setattr(
        interleavings, "_check_end", lambda state, found: deleted.append(dict(state.store))
    )
    explore(world(2, 2, slots=3))
    explore(world(2, 1, slots=3, tears=1))
    explore(world(2, due, slots=3, tears=1, odd={1: 1}))
    assert deleted
    assert all(store == {} for store in deleted)


def test_a_rank_that_would_reuse_a_slot_of_unknown_fate_is_caught() -> None:
    def careless(rank: Rank) -> int | None:
        free = interleavings.free_slot(rank)
        others = [i for i, s in enumerate(rank.slots) if s != rank.opened]
        return free if free is not None else others[0]

    with pytest.raises(AssertionError, match="is whole, and all ranks hold"):
        explore(world(2, 3, slots=2), choose=careless)


def test_a_fate_that_is_not_written_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overwritten(dict[str, bytes]):
        def setdefault(self, key: str, value: bytes) -> bytes:  # type: ignore[override]
            self[key] = value
            return value

    start = world(2, 1, slots=3, deaths=1)
    start.store = Overwritten()
    monkeypatch.setattr(interleavings, "Overwritten", Overwritten, raising=False)
    Overwritten.__module__, Overwritten.__qualname__ = "interleavings", "Overwritten"
    with pytest.raises(AssertionError, match="step 1 is"):
        explore(start)


def test_an_add_repeated_after_a_lost_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(self: CommitProtocol, now_s: float) -> None:
        self._taken()  # the case stays in its stage, so that the add is sent again
        self.unanswered(now_s)

    monkeypatch.setattr(CommitProtocol, "failed", again)
    with pytest.raises(AssertionError):
        explore(world(2, 2, slots=3, outages=1))


def test_a_lagging_rank_makes_others_slip_and_stalls_nobody() -> None:
    start = world(3, 6, slots=3)
    lagging = start.ranks[2]
    interleavings._step(start, lagging, interleavings.free_slot)  # opens step 1, stops in its copy
    for rank in start.ranks[:2]:
        for _ in range(6):
            interleavings._step(start, rank, interleavings.free_slot)
            if rank.opened is not None:
                interleavings._commit(start, rank)
            while rank.ledger.next_call(0.0) is not None:
                rank.ledger._call = None
                interleavings._call(start, rank, True, True)
        assert rank.at == 6
        assert rank.records == {1, 2, 3}, "three slots of unknown fate"
        assert rank.ledger.unsettled == [1, 2, 3]
    assert all(start.store[f"f/{step}"].startswith(b"dead") for step in (4, 5, 6))
    for _ in range(5):
        interleavings._commit(start, lagging)
        interleavings._step(start, lagging, interleavings.free_slot)
        while lagging.ledger.next_call(0.0) is not None:
            lagging.ledger._call = None
            interleavings._call(start, lagging, True, True)
    assert start.store["f/1"] == start.store["f/2"] == b"whole"


def test_steps_that_a_rank_has_passed_keep_their_order() -> None:
    ledger = CommitProtocol(0, 2)
    ledger.opened(DueStep(4, 0), 0.0)
    with pytest.raises(ValueError, match="step 4 is not above 4"):
        ledger.opened(DueStep(4, 1), 0.0)
    with pytest.raises(ValueError, match="step 5 was never opened"):
        ledger.committed(5, 0.0)


def test_more_commits_than_ranks_never_make_a_step_whole() -> None:
    ledger = CommitProtocol(0, 2)
    ledger.opened(DueStep(1, 0), 0.0)
    ledger.committed(1, 0.0)
    assert ledger.next_call(0.0) == Add("c/1")
    ledger.answered(3, 0.0)
    claim = ledger.next_call(0.0)
    assert isinstance(claim, Claim)
    assert claim.value.startswith(b"dead 0 0 counted 3 commits of 2 ranks")
