"""A rank that lacks a snapshot of replicated state gets it from one that has it, over gloo.

Regions written by hand, ranks on nodes that cannot read each other's paths, real processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lightck
from lightck.errors import CoordinationError, NoSnapshotError, RegionFormatError
from lightck.region.native_region import RECORD_EARLY, RECORD_SUSPECT
from support.distributed import ranks
from support.distributed.islands import Islands, check
from support.distributed.written import Crew, Net, Rank

SHAPES = [(2, 2), (3, 3), (4, 2)]
"""Ranks, and nodes that they are spread over."""


@pytest.fixture(params=SHAPES, ids=lambda s: f"{s[0]}-ranks-{s[1]}-nodes")
def islands(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Islands]:
    yield Islands(tmp_path, *request.param)


@pytest.fixture
def two(tmp_path: Path) -> Islands:
    return Islands(tmp_path, 2, 2)


@pytest.fixture
def three(tmp_path: Path) -> Islands:
    return Islands(tmp_path, 3, 3)


def written(islands: Islands, *steps: int, **options: object) -> Crew:
    """Each of these steps on every rank."""
    with islands.crew(**options) as crew:
        for step in steps:
            crew.train(step)
    islands.settle(crew)
    return crew


def test_a_region_that_is_gone_is_made_up_for_by_another_node(islands: Islands) -> None:
    crew = written(islands, 1, 2, 3)
    last = islands.world - 1
    islands.file(last).unlink()
    infos = check(islands.restored(), crew, 3, lent={last: 0})
    # Its peers lack its share, and have what is their own.
    lacking = [r for r in range(islands.world) if islands.node_of(r) == islands.node_of(last)]
    assert len(infos[0].healed) == len(lacking)
    for rank, text in zip(lacking, infos[0].healed, strict=True):
        assert text.startswith(f"rank {rank} got ") and "bytes of step 3 from rank 0; " in text
        assert ("are its own" in text) == (rank != last)
    assert f"rank(s) {last} with that rank's buffers" in infos[0].why
    for rank, info in enumerate(infos):
        assert ("rng" in info.skipped) == (rank == last)
    assert "neither region nor journal has" in infos[last].skipped["extras/noise"]


def test_what_is_given_is_as_long_as_the_state(two: Islands) -> None:
    crew = written(two, 1)
    two.file(1).unlink()
    infos = check(two.restored(), crew, 1, lent={1: 0})
    held = {n: v for n, v in crew.states[0, 1].items() if n.startswith(("model", "optim"))}
    size = sum(v.nbytes for n, v in held.items() if n != "model/tied.weight")
    size += crew.states[0, 1]["noise"].nbytes
    assert f"rank 1 got {size} bytes" in infos[0].healed[0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_has_lost_everything_gets_all_from_another(tmp_path: Path, lost: int) -> None:
    islands = Islands(tmp_path, 4, 2)
    crew = written(islands, 1, 2)
    islands.lose(lost)
    donor = 2 if lost == 0 else 0
    check(islands.restored(), crew, 2, lent={2 * lost: donor, 2 * lost + 1: donor})


def test_a_damaged_tensor_comes_from_another_node_and_what_is_the_ranks_own_stays(
    islands: Islands,
) -> None:
    crew = written(islands, 1, 2, 3)
    name, rank = ("model/first.weight", islands.world - 1) if islands.world < 4 else (None, 3)
    islands.alter(rank, 3, name)
    infos = check(islands.restored(), crew, 3)
    assert all("are its own" in text for text in infos[0].healed) and infos[0].healed
    assert any("do not match their checksum" in text for text in infos[0].fell_back)


def test_a_buffer_of_two_names_is_the_ranks_own_under_both(
    two: Islands, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Net.__init__

    def tied(net: Net) -> None:
        make(net)
        net.register_buffer("seen_too", net.seen)  # as of a module that is used twice
        net.register_buffer("first_too", net.first.weight)

    monkeypatch.setattr(Net, "__init__", tied)  # ranks are forked from here
    crew = written(two, 1, 3)
    two.alter(1, 3, "model/first.weight")
    infos = check(two.restored(), crew, 3)
    assert "are its own" in infos[0].healed[0]


def test_a_damaged_buffer_is_lost_with_all_that_was_the_ranks_own(two: Islands) -> None:
    crew = written(two, 1, 3)
    two.alter(1, 3, "model/seen")
    check(two.restored(), crew, 3, lent={1: 0})


def test_a_region_that_cannot_be_opened_is_no_loss_where_another_node_has_the_state(
    two: Islands,
) -> None:
    crew = written(two, 1, 3)
    with two.file(1).open("r+b") as file:
        file.truncate(5000)
    infos = check(two.restored(), crew, 3, lent={1: 0})
    assert any(text.startswith("rank 1: ") for text in infos[0].fell_back)


def test_a_region_that_cannot_be_opened_is_an_error_where_nobody_can_make_up_for_it(
    two: Islands,
) -> None:
    written(two, 1, 3, shares=False)
    two.file(1).write_bytes(b"\0" * 8192)
    first, second = two.restored()
    assert isinstance(first, CoordinationError) and "rank 1: RegionFormatError" in str(first)
    assert isinstance(second, RegionFormatError)


def test_a_step_that_one_rank_lacks_is_given_to_it(two: Islands) -> None:
    with two.crew() as crew:
        crew.train(1)
        crew.train(2, absent=[1])
        crew.train(3, absent=[1])
    two.settle(crew)
    check(two.restored(), crew, 3, lent={1: 0})


def test_one_step_is_repeated_rather_than_a_ranks_own_state_lost(two: Islands) -> None:
    with two.crew() as crew:
        crew.train(1)
        crew.train(2)
        crew.train(3, absent=[1])
    two.settle(crew)
    infos = check(two.restored(), crew, 2)
    assert not infos[0].healed and "without what is rank(s) 1's own" in infos[0].why


def test_ranks_that_hold_different_steps_are_brought_to_the_newest(three: Islands) -> None:
    with three.crew() as crew:
        crew.train(1)
        crew.train(3, absent=[2])
        crew.train(5, absent=[0])
    three.settle(crew)
    check(three.restored(), crew, 5, lent={0: 1})


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 3), (3, 2), (2, 4)])
def test_another_number_of_ranks_gets_what_its_nodes_do_not_have(
    tmp_path: Path, before: int, now: int
) -> None:
    islands = Islands(tmp_path, before, before)
    crew = written(islands, 1, 2)
    islands.nodes = now
    for node in range(before, now):
        islands.node(node).mkdir()
    infos = check(islands.restored(now), crew, 2, lent=dict.fromkeys(range(before, now), 0))
    assert len(infos[0].healed) == max(now - before, 0)


def test_what_is_not_known_to_be_replicated_is_never_given(two: Islands) -> None:
    with two.crew(shares=False) as crew:
        crew.train(1)
        crew.train(2, absent=[1])
    two.settle(crew)
    infos = check(two.restored(), crew, 1)
    assert "not healed: as rank(s) 0 have it, it is not replicated" in infos[0].fell_back[0]


def test_a_step_is_never_put_together_from_two_instants(three: Islands) -> None:
    with three.crew() as crew:
        crew.train(1)
        for rank, flags in zip(crew.ranks[:2], (RECORD_EARLY, 0), strict=True):
            rank.train(3)
            crew.commit(rank.rank, 3, flags)
    three.settle(crew)
    infos = check(three.restored(), crew, 1)
    assert "have it of two instants" in infos[0].fell_back[-1]


def test_what_is_a_ranks_own_of_another_instant_is_not_used(two: Islands) -> None:
    with two.crew() as crew:
        for rank, flags in zip(crew.ranks, (0, RECORD_EARLY), strict=True):
            rank.train(3)
            crew.states[rank.rank, 3] = rank.state()
            crew.commit(rank.rank, 3, flags)
    two.settle(crew)
    two.alter(1, 3, "model/first.weight")
    check(two.restored(), crew, 3, lent={1: 0})


def test_a_suspect_step_is_given_only_where_there_is_no_other(two: Islands) -> None:
    with two.crew() as crew:
        crew.train(1)
        crew.train(5, flags=RECORD_SUSPECT)
    two.settle(crew)
    two.alter(1, 5, "model/first.weight")
    check(two.restored(), crew, 1)
    two.alter(1, 1, "model/first.weight")
    infos = check(two.restored(), crew, 1)
    assert infos[0].healed and not infos[0].suspect


def test_attach_goes_on_beside_a_region_that_could_not_be_opened(two: Islands) -> None:
    written(two, 1, 3)
    with two.file(1).open("r+b") as file:
        file.truncate(5000)

    def code(me: ranks.Me) -> tuple[int, ...]:
        path, live = two.enter(me.rank), Rank(me.rank)
        lightck.restore(live.net, live.optimizer, path, extras=live.extras)
        with lightck.attach(live.net, live.optimizer, path, extras=live.extras) as handle:
            live.optimizer.zero_grad()
            live.net(torch.ones(2, 64)).square().mean().backward()
            live.optimizer.step()
        again = Rank(me.rank)
        info = lightck.restore(again.net, again.optimizer, path, extras=again.extras)
        assert info is not None and not info.healed
        return handle.step, info.step

    with ranks.started(2, code) as job:
        assert job.results() == [(4, 4), (4, 4)]
    aside = two.file(1).with_name(two.file(1).name + ".damaged")
    assert aside.stat().st_size == 5000


def test_nothing_newer_anywhere_is_as_before(two: Islands) -> None:
    crew = written(two, 1, 2)
    infos = check(two.restored(), crew, 2)
    assert infos[0].why == "step 2 is the newest that is whole"
    assert infos[0].healed == () == infos[0].fell_back
    two.lose(0)
    two.lose(1)
    results = two.restored()
    assert [info for info, _ in results] == [None, None]


def test_a_step_that_is_damaged_everywhere_is_an_error_on_every_rank(two: Islands) -> None:
    written(two, 3)
    for rank in range(2):
        two.alter(rank, 3, "model/first.weight")
    for result in two.restored():
        assert isinstance(result, NoSnapshotError)
        assert "rank 0: " in str(result) and "rank 1: " in str(result)
