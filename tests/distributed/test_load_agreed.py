"""All ranks load, without a model, the snapshot that their restore will take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_restore import damage_payload

import lightck
from lightck.load import load_agreed
from lightck.region.native_region import RECORD_EARLY, RECORD_JIT, RECORD_SUSPECT
from support.distributed import ranks
from support.distributed.islands import Islands
from support.distributed.together import together
from support.distributed.written import T2, Crew, Rank


def both(world: int, folder: Path) -> list[Any]:
    """Per rank the loaded state, and the step that `restore(step="exact")` takes behind it."""

    def code(rank: int) -> tuple[dict[str, Any] | None, int | None]:
        loaded = load_agreed(folder)
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
    for rank, (loaded, restored) in enumerate(both(world, tmp_path / "run")):
        assert loaded["step"] == restored == step
        wanted = crew.states[rank, step]
        for name, tensor in loaded["model"].items():
            assert torch.equal(tensor, wanted[f"model/{name}"]), (rank, name)
        assert loaded["extras"]["position"] == {"batches": 100 * step + rank}


def test_more_ranks_than_wrote_load_the_same_snapshot(tmp_path: Path) -> None:
    with Crew(tmp_path / "run", 2) as crew:
        plain(crew)
    assert [(each[0]["step"], each[1]) for each in both(3, tmp_path / "run")] == [(2, 2)] * 3


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

    def code(me: ranks.Me) -> dict[str, Any] | None:
        loaded = load_agreed(islands.enter(me.rank))
        return loaded and {"step": loaded["step"], **loaded["model"]}

    with ranks.started(2, code) as job:
        found = job.outcomes()
    for rank, loaded in enumerate(found):
        assert loaded.pop("step") == 2
        own = crew.states[0, 2]  # the buffers, too: those of rank 1 were lost
        assert all(torch.equal(v, own[f"model/{k}"]) for k, v in loaded.items()), rank
