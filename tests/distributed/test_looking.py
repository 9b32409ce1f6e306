"""Looking at what several ranks wrote: load, snapshots, and the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_restore import damage_payload

import lightck
from lightck.cli.main import main
from lightck.distributed.restore.selection import Key
from lightck.distributed.restore.survey import RegionSurvey
from lightck.errors import NoSnapshotError
from lightck.load import load_tensors
from support.distributed.written import T1, Crew, differences


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """Three ranks that share; the third step is not whole."""
    with Crew(tmp_path / "run", 3) as made:
        made.train(1)
        made.train(2)
        made.train(3, absent=[1])
        yield made


def as_captured(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A loaded state under the names of `Rank.state`."""
    held = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    for i, each in state["optimizers"][0]["state"].items():
        held |= {f"optim/{i}/{key}": torch.as_tensor(value) for key, value in each.items()}
    held["position"] = torch.tensor(state["extras"]["position"]["batches"])
    held["noise"] = state["extras"]["noise"]
    held["rng"] = state["rng"]["torch"]
    return held


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_load_puts_the_whole_state_together_with_one_ranks_own(crew: Crew, rank: int) -> None:
    state = lightck.load(crew.folder, rank=rank)
    assert state["step"] == 2
    assert differences(as_captured(state), crew.states[rank, 2]) == []
    state["model"]["first.weight"].zero_()  # what was loaded is the reader's own
    again = lightck.load(crew.folder, 2, rank=rank)
    assert differences(as_captured(again), crew.states[rank, 2]) == []
    assert again["model"]["first.weight"] is again["model"]["tied.weight"]


def test_load_maps_tensors_that_one_rank_wrote_and_copies_those_that_are_cut(
    tmp_path: Path,
) -> None:
    with Crew(tmp_path / "run", 4) as crew:
        crew.train(1)
    _, tensors = load_tensors(crew.folder)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    private = [m[0].split("-") for m in maps if m[1] == "rw-p" and "region-0000" in m[-1]]
    spans = [(int(begin, 16), int(end, 16)) for begin, end in private]
    mapped = {n for n, t in tensors.items() if any(a <= t.data_ptr() < b for a, b in spans)}
    assert len(spans) == 4, "every rank's region is mapped"
    assert {"model/seen", "model/second.bias"} <= mapped
    cut = set(tensors) - mapped
    assert cut and all(tensors[name].nbytes > 4096 for name in cut)


def test_slots_of_every_rank_are_leased_while_a_tensor_lives(crew: Crew) -> None:
    state = lightck.load(crew.folder, 2)
    for region in crew.regions:
        slot = crew.records[region.info.rank, 2].slot
        region.protected = None
        for each in region.slots:
            each.record = None
        opened = [region.begin(crew.pool) for _ in range(3)]
        assert slot not in {each.index for each in opened if each is not None}
        for each in opened:
            if each is not None and each.writer is not None:
                each.writer.free()
                each.writer = None
    assert state["step"] == 2


def test_a_rank_that_wrote_nothing_has_no_state_to_load(crew: Crew) -> None:
    with pytest.raises(NoSnapshotError, match="no region of rank 7"):
        lightck.load(crew.folder, rank=7)


def test_load_falls_back_over_all_ranks(crew: Crew) -> None:
    damage_payload(crew, 2, 2)
    assert lightck.load(crew.folder)["step"] == 1


def test_load_takes_what_is_whole_over_all_ranks_where_it_can_know(tmp_path: Path) -> None:
    """State that is each rank's own can be put together of a step that another has not got."""
    with Crew(tmp_path / "run", 3, shares=False) as made:
        made.train(1)
        made.train(2, absent=[1])
        assert lightck.load(made.folder)["step"] == 1
        assert lightck.load(made.folder, 2)["step"] == 2, "the only one that is wanted"
        for rank in (1, 2):  # on their own nodes
            made.file(rank).rename(tmp_path / str(rank))
        assert lightck.load(made.folder)["step"] == 2


def test_snapshots_tells_which_steps_are_whole_over_ranks(crew: Crew) -> None:
    rows = lightck.snapshots(crew.folder).to_pylist()
    assert [(r["step"], r["rank"], r["state"]) for r in rows] == [
        (3, 0, "partial"),
        (3, 2, "partial"),
        *((step, rank, "whole") for step in (2, 1) for rank in range(3)),
    ]
    assert "rank 1: nothing of it is there" in rows[0]["problem"]


def test_of_a_snapshot_that_claims_very_many_ranks_only_the_first_are_missed(crew: Crew) -> None:
    where = crew.regions[0].place
    with RegionSurvey.of_files(where, [region.place for region in crew.regions]) as held:
        lacking = held.lacks(Key(T1, 2, 1 << 18))
    assert [text.split(":")[0] for text in lacking] == [f"rank {rank}" for rank in range(12)]


def test_ls_lists_steps_over_ranks(crew: Crew, capsys: Any) -> None:
    assert main(["ls", str(crew.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["STEP", "RANKS", "STATE", "WRITTEN", "SIZE", "SURVIVES"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["3", "2", "partial"],
        ["2", "3", "whole"],
        ["1", "3", "whole"],
    ]
    assert lines[4].startswith("partial: step 3: ") and "rank 1" in lines[4]


def test_inspect_shows_every_piece_and_whose_it_is(crew: Crew, capsys: Any) -> None:
    assert main(["inspect", "--json", str(crew.folder)]) == 0
    held = json.loads(capsys.readouterr().out)
    assert [region["rank"] for region in held["regions"]] == [0, 1, 2]
    assert held["snapshot"]["step"] == 2
    rows = [r for r in held["snapshot"]["tensors"] if r["alias_of"] is None]
    assert {r["rank"] for r in rows} == {0, 1, 2}
    sizes: dict[str, int] = {}
    for row in rows:
        assert row["begin"] == sizes.get(row["name"], 0), "pieces in their order, without a gap"
        sizes[row["name"]] = sizes.get(row["name"], 0) + row["bytes"]
    assert sizes["model/first.weight"] == 64 * 60 * 4
    assert held["snapshot"]["payload_bytes"] == sum(sizes.values())
    assert main(["inspect", "--tensors", str(crew.folder)]) == 0
    assert "RANK" in capsys.readouterr().out


def test_verify_reads_every_region(crew: Crew, capsys: Any) -> None:
    assert main(["verify", str(crew.folder)]) == 0
    capsys.readouterr()
    damage_payload(crew, 2, 2)
    assert main(["verify", str(crew.folder)]) == 1
    out = capsys.readouterr().out
    assert "region-00002.lck slot" in out and "do not match their checksum" in out


@pytest.mark.parametrize("rank", [0, 2])
def test_export_writes_the_whole_state(crew: Crew, rank: int, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "state.pt"
    chosen = ["--rank", str(rank)] if rank else []
    assert main(["export", *chosen, str(crew.folder), str(out)]) == 0
    capsys.readouterr()
    found = torch.load(out, weights_only=True)
    wanted = crew.states[rank, 2]
    assert found["step"] == 2
    assert all(torch.equal(t, wanted[f"model/{n}"]) for n, t in found["model"].items())
