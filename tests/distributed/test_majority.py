"""Replicas of different nodes are held against each other; what most have counts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import Islands, check
from written import Crew, differences

from lightck.distributed.lineage import Key
from lightck.distributed.majority import judge, narrow, parts
from lightck.region.checksum import combine
from lightck.region.native import crc32c
from lightck.types import RestoreInfo

NAME = "model/second.weight"


def perturbed(islands: Islands, odd: int, *steps: int, at: int) -> Crew:
    """Give the ranks of one node another weight from step `at` on; every checksum is right."""
    with islands.crew() as crew:
        for step in steps:
            if step == at:
                for rank in crew.ranks:
                    if islands.node_of(rank.rank) == odd:
                        with torch.no_grad():
                            rank.net.second.weight[3, 4] += 1.0
            crew.train(step)
    islands.settle(crew)
    return crew


def replicated(state: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in state.items() if n.startswith(("model", "optim")) and "seen" not in n}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("world", [3, 6])
def test_of_three_nodes_the_odd_one_gets_what_the_others_have(
    tmp_path: Path, world: int, odd: int
) -> None:
    islands = Islands(tmp_path, world, 3)
    crew = perturbed(islands, odd, 1, 2, at=2)
    results = islands.restored()
    size = world // 3
    wrong = [rank for rank in range(world) if islands.node_of(rank) == odd]
    donor = size if odd == 0 else 0
    for rank, result in enumerate(results):
        assert isinstance(result, tuple), result
        info, state = result
        assert isinstance(info, RestoreInfo) and info.step == 2 and not info.suspect
        right = crew.states[donor, 2]
        assert differences(replicated(state), replicated(right)) == []
        own = crew.states[rank, 2]
        assert torch.equal(state["model/seen"], own["model/seen"])
        assert torch.equal(state["noise"], own["noise"]) and torch.equal(state["rng"], own["rng"])
        assert len(info.healed) == len(wrong)
        (text,) = [each for each in info.fell_back if "differ in" in each]
        ranks = ", ".join(map(str, wrong))
        assert f"on the node(s) of rank(s) {ranks} it is not what most nodes have" in text
        # The first of the tensors that differ, in the order of their names: Adam spreads it.
        assert text.startswith("step 2: replicas on different nodes differ in model/")
        assert result[0].healed[0].startswith(f"rank {wrong[0]} got ")


def test_without_a_majority_an_older_step_is_taken(tmp_path: Path) -> None:
    islands = Islands(tmp_path, 2, 2)
    crew = perturbed(islands, 1, 1, 2, at=2)
    infos = check(islands.restored(), crew, 1)
    texts = "\n".join(infos[0].fell_back)
    assert "step 2: replicas on different nodes differ in model/" in texts
    assert "those of rank(s) 0, 1; no value is most nodes'" in texts
    assert "step 2: suspect" in texts


def test_without_a_majority_and_without_an_older_step_it_is_suspect(tmp_path: Path) -> None:
    islands = Islands(tmp_path, 2, 2)
    perturbed(islands, 1, 1, at=1)
    for info, _ in islands.restored():
        assert info.step == 1 and info.suspect
        assert "is suspect, but no other is whole" in info.why


def test_who_lacks_it_too_gets_what_most_have(tmp_path: Path) -> None:
    islands = Islands(tmp_path, 4, 4)
    crew = perturbed(islands, 0, 1, 3, at=3)
    islands.file(3).unlink()
    for rank, (info, state) in enumerate(islands.restored()):
        assert info.step == 3 and len(info.healed) == 2
        assert differences(replicated(state), replicated(crew.states[1, 3])) == [], rank


def said(*replicas: tuple[int, str] | None) -> list[dict[str, Any]]:
    form = "f" * 16
    return [{"replica": e[0], "digest": form + e[1], "count": 9} if e else {} for e in replicas]


def test_a_node_has_one_vote_however_many_ranks_it_has() -> None:
    four = [(0, "a")] * 4
    verdict = judge(said(*four, (4, "b"), (5, "b")))
    assert verdict == {"same": False, "most": [4, 5], "odd": [0, 1, 2, 3], "count": 9}
    assert judge(said(*four, (4, "b")))["most"] == []
    assert judge(said((0, "a"), None, (2, "a")))["same"]
    assert judge(said(None, None))["same"]
    halves = judge(said((0, "a"), (1, "a"), (2, "b"), (3, "b")))
    assert halves["most"] == [] and halves["odd"] == [0, 1, 2, 3]


def test_what_differs_in_more_than_contents_is_not_named() -> None:
    verdict = judge([*said((0, "a"), (1, "a")), {"replica": 2, "digest": "e" * 17, "count": 9}])
    assert verdict["most"] == [0, 1] and verdict["odd"] == [2] and verdict["count"] == 0


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1000, 100_000])
def test_the_first_tensor_that_differs_is_found_in_a_few_rounds(count: int) -> None:
    drawn = random.Random(count)
    for odd in {0, count - 1, drawn.randrange(count)}:
        begin, end, rounds = 0, count, 0
        while end - begin > 1:
            rounds += 1
            ranges = parts(begin, end)
            assert len(ranges) <= 64 and ranges[0][0] == begin and ranges[-1][1] == end
            there = [
                {"ranges": [str(i == 2 and a <= odd < b) for a, b in ranges], "name": "n"}
                for i in range(3)
            ]
            begin, end = ranges[narrow([{}, *there])["at"]]
        assert (begin, end) == (odd, odd + 1) and rounds <= 3


def test_checksums_of_parts_give_that_of_the_whole() -> None:
    drawn = random.Random(5)
    for length in (0, 1, 7, 4096, 100_001):
        a, b = drawn.randbytes(drawn.randrange(1, 5000)), drawn.randbytes(length)
        assert combine(crc32c(a), crc32c(b), length) == crc32c(a + b)


def test_a_replica_is_the_same_however_many_ranks_wrote_it(tmp_path: Path) -> None:
    """Ranges differ, bytes do not: the digests that are compared are those of whole tensors."""
    from lightck.capture.assembled import Assembled
    from lightck.distributed.holdings import Holdings
    from lightck.distributed.majority import Content
    from lightck.region import place

    digests = set()
    for world in (1, 2, 3, 4):
        torch.manual_seed(3)
        with Crew(tmp_path / str(world), world) as crew:
            crew.train(1)
        where = place.locate(tmp_path / str(world), 0, create=False)
        with Holdings.opened(where, 0, world) as held:
            state = held.assembled(Key(crew.records[0, 1].timeline, 1, world))
            assert isinstance(state, Assembled) and state.replica == 0
            digests.add(Content.of(state).digest)
    assert len(digests) == 1
