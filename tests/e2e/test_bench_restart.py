"""Killed trainings: what comes back is compared, also through new Pythons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.definition import Contender, Method
from bench.errors import BenchError
from bench.measures import Job, restart
from bench.record import Record
from bench.work import Work


def _measured(folder: Path, engine: str, *, patient: bool) -> dict[str, Record]:
    method = Method(block=2, least=1, patient=patient)
    work = Work("tiny", sequence=8)
    job = Job("restart", Contender(engine, engine), work, method, {}, folder, lambda text: None)
    return {record.measure: record for record in restart.measure(job)}


def test_a_killed_training_is_restarted_in_a_new_python(region_dir: Path) -> None:
    found = _measured(region_dir, "torch.save", patient=False)
    parts = ("start_s", "restore_s", "first_step_s")
    assert found["restart_s"].value == pytest.approx(sum(found[part].value for part in parts))
    assert all(found[part].value > 0 for part in (*parts, "lost_work_s"))
    assert 0 <= found["lost_steps"].value <= 2
    assert found["restart_s"].note == "1 times killed, each restored state equal bit for bit"
    assert list(region_dir.iterdir()) == [], "nothing is left of the failures"


def test_a_state_that_is_not_the_one_that_was_saved_gives_no_number(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = restart._bring_back

    def wrong(loop: Any, engine: str, folder: Path) -> int:
        step = restored(loop, engine, folder)
        loop.training.plain.get_submodule("head").weight.data[0, 0] += 1
        return step

    monkeypatch.setattr(restart, "_bring_back", wrong)
    with pytest.raises(BenchError, match=r"restored step \d+, which is not as it was"):
        _measured(region_dir, "torch.save", patient=True)


def test_what_goes_wrong_in_the_process_is_told(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "_bring_back", lambda *_: 1 / 0)
    with pytest.raises(BenchError, match="instead of 'restored': (.|\n)*ZeroDivisionError"):
        _measured(region_dir, "lightck", patient=True)


def test_an_engine_that_finds_nothing_of_a_dead_process_is_refused(region_dir: Path) -> None:
    with pytest.raises(BenchError, match="restart takes lightck, torch.save, checkfreq, dcp"):
        _measured(region_dir, "blocking", patient=True)
