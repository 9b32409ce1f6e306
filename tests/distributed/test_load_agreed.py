"""All ranks load, without a model, the snapshot that their restore will take."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_restore import damage_payload

import lightck
from lightck.errors import RegionIOError
from lightck.load import load_agreed
from lightck.region.native_region import RECORD_EARLY, RECORD_JIT, RECORD_SUSPECT
from lightck.region.region import Region
from support.distributed import ranks
from support.distributed.islands import Islands
from support.distributed.together import together
from support.distributed.written import T2, Crew, Rank


def both(world: int, folder: Path) -> list[Any]:
    """Per rank what is loaded, and the step that `restore(step="exact")` takes behind it."""

    def code(rank: int) -> tuple[tuple[int, dict[str, Any]] | None, int | None]:
        loaded = load_agreed(folder, tensors=True)
        live = Rank(rank)
        info = lightck.restore(live.net, live.optimizer, folder, extras=live.extras, step="exact")
        return loaded, info and info.step

    return together(world, code)


def plain(crew: Crew) -> None:
    crew.train(1)
    crew.train(2)


def early_twice(crew: Crew) -> None:
    crew.train(1)
    crew.train(2, flags=RECORD_EARLY)
    crew.train(3, flags=RECORD_EARLY)


def early_on_one(crew: Crew) -> None:
    crew.train(1)
    for step in (2, 3):
        crew.train(step, absent=[0])
        crew.commit(0, step, RECORD_EARLY)


def suspect(crew: Crew) -> None:
    crew.train(1)
    crew.train(2, flags=RECORD_SUSPECT)


def damaged(crew: Crew) -> None:
    crew.train(1)
    crew.train(2)
    damage_payload(crew, crew.world - 1, 2)


def missing(crew: Crew) -> None:
    crew.train(1)
    crew.train(2, absent=[0])


@pytest.mark.parametrize(
    ("wrote", "step"),
    [(plain, 2), (early_twice, 1), (early_on_one, 1), (suspect, 1), (damaged, 1), (missing, 1)],
)
@pytest.mark.parametrize("world", [1, 3])
def test_the_snapshot_that_restore_takes_is_loaded(
    tmp_path: Path, wrote: Callable[[Crew], None], step: int, world: int
) -> None:
    with Crew(tmp_path / "run", world) as crew:
        wrote(crew)
    for rank, ((found, loaded), restored) in enumerate(both(world, tmp_path / "run")):
        assert found == restored == step
        wanted = crew.states[rank, step]
        for name, tensor in loaded["model"].items():
            assert torch.equal(tensor, wanted[f"model/{name}"]), (rank, name)
        assert loaded["extras"]["position"] == {"batches": 100 * step + rank}


def test_more_ranks_than_wrote_load_the_same_snapshot(tmp_path: Path) -> None:
    with Crew(tmp_path / "run", 2) as crew:
        plain(crew)
    assert [(each[0][0], each[1]) for each in both(3, tmp_path / "run")] == [(2, 2)] * 3


def test_nothing_is_loaded_where_restore_begins_anew(tmp_path: Path) -> None:
    assert both(2, tmp_path / "run") == [(None, None)] * 2
    # One rank saved at a failure, before anything was whole: the job was killed early.
    with Crew(tmp_path / "run", 2, timeline=T2, shares=False) as crew:
        crew.train(1, absent=[1], flags=RECORD_JIT)
    assert both(2, tmp_path / "run") == [(None, None)] * 2


def test_a_node_that_has_lost_its_regions_is_sent_the_snapshot(tmp_path: Path) -> None:
    islands = Islands(tmp_path, 2, 2)
    with islands.crew() as crew:
        plain(crew)
    islands.settle(crew)
    islands.lose(1)

    def code(me: ranks.Me) -> tuple[int, dict[str, torch.Tensor]]:
        loaded = load_agreed(islands.enter(me.rank), tensors=True)
        assert loaded is not None
        return loaded[0], loaded[1]["model"]

    with ranks.started(2, code) as job:
        found = job.outcomes()
    for rank, (step, loaded) in enumerate(found):
        own = crew.states[0, 2]  # the buffers, too: those of rank 1 were lost
        assert step == 2
        assert all(torch.equal(v, own[f"model/{k}"]) for k, v in loaded.items()), rank


@pytest.mark.parametrize("takes", [True, False])
def test_all_ranks_load_an_older_one_if_the_medium_of_one_fails_behind_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    with Crew(tmp_path / "run", 2, shares=False) as crew:
        plain(crew)
    load: Any = importlib.import_module("lightck.load")
    make, failed = load._mapping, []

    def fails_once(region: Region) -> Any:
        if region.info.rank == 1 and not failed:
            failed.append(region)
            raise RegionIOError("the medium has failed")
        return make(region)

    monkeypatch.setattr(load, "_mapping", fails_once)
    code = lambda rank: load_agreed(tmp_path / "run", tensors=takes or rank == 1)  # noqa: E731
    for rank, (step, loaded) in enumerate(together(2, code)):
        assert step == 1
        for name, tensor in loaded.get("model", {}).items():
            assert torch.equal(tensor, crew.states[rank, 1][f"model/{name}"]), (rank, name)
    assert failed
