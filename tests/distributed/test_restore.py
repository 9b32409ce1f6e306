"""Restoring over ranks: one snapshot for all, whatever is missing, damaged, older or from another
number of ranks. The regions are written by hand; `test_resume.py` has real jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.errors import CoordinationError, NoSnapshotError, RegionFormatError
from lightck.region import location
from lightck.region.native_region import RECORD_EARLY, RECORD_SUSPECT
from lightck.region.region import Region
from lightck.types import RestoreInfo
from support.distributed.memory import Server
from support.distributed.missing import never_come
from support.distributed.together import together
from support.distributed.written import T2, Crew, Rank, differences

OWN = ("model/seen", "position", "noise", "rng")
"""Each rank has its own of these, but `rng` is this process's, which the ranks here share."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"


def restore(world: int, folder: Path, **options: Any) -> list[Any]:
    """Restore on every rank; return its (info, rank), or what it raised."""

    def code(rank: int) -> tuple[RestoreInfo | None, Rank]:
        torch.manual_seed(77)
        live = Rank(rank)
        given = {"extras": live.extras, **options}
        return lightck.restore(live.net, live.optimizer, folder, **given), live

    return together(world, code)


def check(results: list[Any], crew: Crew, step: int, *, own: bool = True) -> list[RestoreInfo]:
    """Check that every rank holds that step, bit for bit; return what they were told."""
    infos = []
    for rank, result in enumerate(results):
        assert isinstance(result, tuple), result
        info, live = result
        assert info.step == step and info.world == crew.world
        assert info.rank == rank % crew.world
        wanted = crew.states[rank % crew.world, step]
        found = differences(live.state(), wanted)
        lent = rank >= crew.world
        assert set(found) <= ({"rng", "noise"} if lent or not own else {"rng"}), found
        infos.append(info)
    assert len({(i.step, i.timeline, i.why, i.fell_back) for i in infos}) == 1
    return infos


def damage_payload(crew: Crew, rank: int, step: int) -> None:
    """Change a byte in the largest extent of a rank's snapshot."""
    region = crew.regions[rank]
    held = next(c for c in region.recover().candidates if c.record.step == step)
    at = int(held.layout.offsets[held.layout.lengths.argmax()])
    with crew.file(rank).open("r+b") as file:
        file.seek(at + 5)
        byte = file.read(1)[0]
        file.seek(at + 5)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("shares", [True, False])
def test_every_rank_gets_its_whole_state_from_its_own_and_its_peers_regions(
    folder: Path, world: int, shares: bool
) -> None:
    with Crew(folder, world, shares=shares) as crew:
        for step in (1, 2, 3):
            crew.train(step)
    infos = check(restore(world, folder), crew, 3)
    assert infos[0].fell_back == () and infos[0].why == "step 3 is the newest that is whole"
    assert not infos[0].skipped


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("now", [1, 2, 3, 4])
def test_any_number_of_ranks_goes_on_from_any_other(folder: Path, before: int, now: int) -> None:
    with Crew(folder, before) as crew:
        crew.train(1)
        crew.train(2)
    infos = check(restore(now, folder), crew, 2)
    for rank, info in enumerate(infos):
        if rank >= before:
            assert f"takes over the state of rank {rank % before}" in info.skipped["rng"]
            assert "extras/noise" in info.skipped
        else:
            assert not info.skipped


def test_a_rank_beyond_the_former_world_keeps_its_own_random_numbers(folder: Path) -> None:
    with Crew(folder, 1) as crew:
        crew.train(1)
    results = restore(2, folder)
    noise = [live.extras["noise"].get_state() for _, live in results]
    assert torch.equal(noise[0], crew.states[0, 1]["noise"])
    assert torch.equal(noise[1], torch.Generator().manual_seed(901).get_state())
    assert results[1][1].extras["position"] == {"batches": 100}


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_region_that_is_older_takes_all_ranks_back(folder: Path, lag: int, late: int) -> None:
    with Crew(folder, 3) as crew:
        for step in (1, 2, 3):
            crew.train(step, absent=[late] if step > 3 - lag else [])
    infos = check(restore(3, folder), crew, 3 - lag)
    # Peers cannot put the newer steps together either: their shares lack that rank's.
    assert any("step 3: missing" in text for text in infos[0].fell_back)


def test_ranks_on_different_newest_steps_take_the_newest_that_all_have(folder: Path) -> None:
    with Crew(folder, 3, shares=False) as crew:
        crew.train(1)
        crew.train(2, absent=[2])
        crew.train(3, absent=[0])
    infos = check(restore(3, folder), crew, 1)
    for text, (step, rank) in zip(infos[0].fell_back, [(3, 0), (2, 2)], strict=True):
        assert text.startswith(f"step {step}: not whole, missing on rank(s) {rank}; not healed: ")


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_finds_takes_all_ranks_to_the_step_before(
    folder: Path, rank: int, shares: bool
) -> None:
    with Crew(folder, 2, shares=shares) as crew:
        for step in (1, 2, 3):
            crew.train(step)
        damage_payload(crew, rank, 3)
    infos = check(restore(2, folder), crew, 2)
    named = [text for text in infos[0].fell_back if "do not match their checksum" in text]
    assert named and all("step 3" in text and f"region-0000{rank}.lck" in text for text in named)
    assert named[0].startswith("rank ")


def test_everything_is_verified_everywhere_before_anything_changes_anywhere(folder: Path) -> None:
    with Crew(folder, 2, shares=False) as crew:
        crew.train(1)
        damage_payload(crew, 1, 1)
    lives = [Rank(r) for r in range(2)]
    for live in lives:
        live.train(9)
    before = [live.state() for live in lives]

    def code(rank: int) -> None:
        live = lives[rank]
        lightck.restore(live.net, live.optimizer, folder, extras=live.extras)

    for result in together(2, code):
        assert isinstance(result, NoSnapshotError)
        assert "rank 1: " in str(result) and "do not match their checksum" in str(result)
    for live, then in zip(lives, before, strict=True):
        assert differences(live.state(), then) in ([], ["rng"])


def test_ranks_that_find_nothing_whole_agree_again_later(folder: Path) -> None:
    with Crew(folder, 2, shares=False) as crew:
        crew.train(1, absent=[1])
        crew.train(2, absent=[0])
    other = folder.parent / "other"
    with Crew(other, 2, timeline=T2) as whole:
        whole.train(4)

    def code(rank: int) -> tuple[RestoreInfo | None, Rank]:
        live = Rank(rank)
        with pytest.raises(NoSnapshotError, match="missing on rank"):
            lightck.restore(live.net, live.optimizer, folder)
        info = lightck.restore(live.net, live.optimizer, other, extras=live.extras)
        return info, live

    server = Server()
    check(together(2, code, server=server), whole, 4)
    assert server.messages["add"] == 2 * (1 + 3), "a count per rank and round, and no other round"


@pytest.mark.parametrize("part", ["record", "manifest"])
def test_a_damaged_record_or_manifest_of_one_rank_takes_all_ranks_back(
    folder: Path, part: str
) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1)
        crew.train(2)
        record = crew.records[1, 2]
        at = 8192 + 4096 * record.slot + 40 if part == "record" else record.manifest_offset + 9
        with crew.file(1).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    infos = check(restore(2, folder), crew, 1)
    assert any("region-00001.lck" in text for text in infos[0].fell_back)


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("shares", [True, False])
def test_a_region_that_is_away_is_an_error_on_every_rank_that_names_it(
    folder: Path, gone: int, shares: bool
) -> None:
    with Crew(folder, 2, shares=shares) as crew:
        crew.train(1)
        file = crew.file(gone)
    file.unlink()
    for result in restore(2, folder):
        assert isinstance(result, NoSnapshotError)
        assert shares or f"missing on rank(s) {gone}" in str(result)
        assert f"no region of rank {gone}" in str(result)


def test_a_region_that_is_none_is_an_error_on_every_rank_with_its_reason(folder: Path) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1)
        crew.file(1).write_bytes(b"\0" * 8192)
    results = restore(2, folder)
    assert isinstance(results[1], RegionFormatError)
    assert isinstance(results[0], CoordinationError)
    assert "rank 1: RegionFormatError" in str(results[0])


def test_a_job_killed_before_its_first_whole_snapshot_finds_nothing_to_restore(
    folder: Path,
) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1, absent=[0])
    assert [info for info, _ in restore(2, folder)] == [None, None]
    with Crew(folder.parent / "older", 2) as crew:
        crew.train(1)
        crew.train(2, absent=[0])
    check(restore(2, folder.parent / "older"), crew, 1)


def test_what_is_older_than_the_chosen_step_is_no_step_to_fall_back_from(folder: Path) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1, absent=[1])
        crew.train(2)
    assert [(info.step, info.fell_back) for info, _ in restore(2, folder)] == [(2, ()), (2, ())]


@pytest.mark.parametrize("first", [0, 1])
def test_a_job_killed_while_it_began_anew_finds_nothing_to_restore(
    folder: Path, first: int
) -> None:
    """The second life had begun its timeline on one rank only."""
    with Crew(folder, 2) as crew:
        crew.train(1, absent=[0])
    where = location.locate(folder, first, create=False)
    with contextlib.closing(Region.open(where, writable=True, process_durable=True)) as region:
        region.recover()
        region.begin_timeline(None, T2)
    assert [info for info, _ in restore(2, folder)] == [None, None]


def test_nothing_anywhere_is_nothing_to_restore(folder: Path) -> None:
    folder.mkdir(0o700)
    assert [info for info, _ in restore(2, folder)] == [None, None]


def test_a_model_that_does_not_fit_on_one_rank_is_an_error_on_every_rank(folder: Path) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1)
    lives = [Rank(r) for r in range(2)]
    lives[1].net.second = torch.nn.Linear(60, 63)
    before = [p.clone() for p in lives[0].net.parameters()]

    def code(rank: int) -> None:
        lightck.restore(lives[rank].net, lives[rank].optimizer, folder)

    results = together(2, code)
    assert isinstance(results[1], lightck.RestoreMismatchError)
    assert isinstance(results[0], CoordinationError)
    assert "rank 1: RestoreMismatchError" in str(results[0])
    assert "model/second.weight" in str(results[0])
    assert all(map(torch.equal, before, lives[0].net.parameters()))


def test_a_rank_that_does_not_restore_is_named_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_come([1], put=monkeypatch.setattr)
    with Crew(folder, 3) as crew:
        crew.train(1)

    def code(rank: int) -> None:
        live = Rank(rank)
        lightck.restore(live.net, live.optimizer, folder)

    for result in together(3, code, absent=[1])[::2]:
        assert isinstance(result, CoordinationError)
        assert "restore: rank(s) 1 of 3 did not come in " in str(result)


def test_a_rank_that_fails_while_it_fills_is_named_on_every_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightck.reader.fill import StateFiller

    with Crew(folder, 2) as crew:
        crew.train(1)
    finish = StateFiller.finish

    def failing(filler: StateFiller) -> None:
        if filler.live.model is lives[1].net:
            raise MemoryError("no room for the state")
        finish(filler)

    lives = [Rank(r) for r in range(2)]
    monkeypatch.setattr(StateFiller, "finish", failing)
    results = together(2, lambda r: lightck.restore(lives[r].net, lives[r].optimizer, folder))
    assert isinstance(results[1], MemoryError)
    assert "rank 1: MemoryError: no room for the state" in str(results[0])


def test_ranks_that_ask_for_different_steps_or_paths_are_told_so(folder: Path) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1)
        crew.train(2)

    def steps(rank: int) -> None:
        lightck.restore(Rank(rank).net, None, folder, step=1 + rank)

    for result in together(2, steps):
        assert "differ in step: 1 on rank(s) 0; 2 on rank(s) 1" in str(result)
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(0o700)

    def paths(rank: int) -> None:
        lightck.restore(Rank(rank).net, None, elsewhere if rank else folder)

    for result in together(2, paths):
        assert isinstance(result, CoordinationError)
        assert "differ in path" in str(result) and "elsewhere on rank(s) 1" in str(result)
    check(restore(2, folder, step=1), crew, 1)


def test_regions_of_two_jobs_are_refused_on_every_rank(folder: Path) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1)
    other = folder.parent / "other"
    with Crew(other, 2, timeline=T2, run=b"run of another..") as stranger:
        stranger.train(1)
        stranger.file(1).replace(crew.file(1))
    for result in restore(2, folder):
        assert isinstance(result, CoordinationError)
        assert "regions of different jobs are mixed" in str(result)


def test_an_early_and_a_suspect_step_are_passed_over_by_all(folder: Path) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1)
        crew.train(2)
        crew.train(3, flags=RECORD_EARLY)
    infos = check(restore(2, folder), crew, 2)
    assert "step 3 was finished early" in infos[0].why
    folder = folder.parent / "suspect"
    with Crew(folder, 2) as crew:
        crew.train(1)
        crew.train(2, flags=RECORD_SUSPECT)
    infos = check(restore(2, folder), crew, 1)
    assert (
        "step 2: suspect, for replicas were found to differ there or before" in infos[0].fell_back
    )


def test_a_step_of_an_abandoned_branch_does_not_come_back(folder: Path) -> None:
    with Crew(folder, 2) as crew:
        crew.train(1)
        crew.train(2)
        back = [crew.records[r, 1] for r in range(2)]
    # Rank 1 was killed before it began the timeline that rank 0 has durable: its step 2 is there.
    with Crew(folder, 1, timeline=T2, continued=back[:1]):
        pass
    infos = check(restore(2, folder), crew, 1)
    assert infos[0].step == 1
    # And a single process that takes over from both does not fall for it either.
    check(restore(1, folder), crew, 1)
