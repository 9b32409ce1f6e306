"""Snapshots that are suspect: an older one is restored, and everybody who looks is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import lightck
from lightck.cli.main import main
from lightck.errors import RegionIOError
from lightck.region import location
from lightck.region.region import Region, open_and_recover
from support import processes
from support.loops import adam_loop, attach
from support.regions import Book, newest, random_contents

SIZES = {"a": 1000, "b": 70000}


def marked(folder: Path, steps: range, first: int, slots: int = 4) -> None:
    """Commit these steps, and mark what is there from the snapshot of step `first` on."""
    rng = np.random.default_rng(1)
    with Book(folder, slots=slots) as book:
        book.region.begin_timeline(None)
        for step in steps:
            assert book.commit(step, random_contents(rng, SIZES))
        if first in steps:
            book.region.native.suspect(1 + steps.index(first))


def order(folder: Path) -> list[tuple[int, bool]]:
    region, recovery = open_and_recover(location.locate(folder, 0, create=False))
    region.close()
    return [(c.record.step, c.record.suspect) for c in recovery.candidates]


@pytest.mark.parametrize("first", [2, 3, 4, 9])
def test_recovery_prefers_what_is_above_suspicion_newest_first(
    region_dir: Path, first: int
) -> None:
    marked(region_dir, range(1, 5), first)
    trusted = [(step, False) for step in (4, 3, 2, 1) if step < first]
    assert order(region_dir) == trusted + [(step, True) for step in (4, 3, 2) if step >= first]
    assert order(region_dir)[0] == (min(4, first - 1), False)


def test_without_another_the_newest_suspect_one_is_taken(region_dir: Path) -> None:
    marked(region_dir, range(1, 4), 1)
    assert order(region_dir) == [(3, True), (2, True), (1, True)]


def test_a_mark_survives_kill_9_at_once_after_it(region_dir: Path) -> None:
    def job(parent: processes.Parent) -> None:
        marked(region_dir, range(1, 4), 0)
        region = Region.open(location.locate(region_dir, 0, create=False), writable=True)
        region.native.suspect(3)
        os.kill(os.getpid(), signal.SIGKILL)

    child = processes.start(job)
    assert child.join() == -signal.SIGKILL
    assert order(region_dir) == [(2, False), (1, False), (3, True)]


def test_what_comes_after_the_mark_is_suspect_until_a_restore(region_dir: Path) -> None:
    marked(region_dir, range(1, 4), 3)
    with Book(region_dir) as book:
        assert book.commit(4, random_contents(np.random.default_rng(2), SIZES))
        step, _, _ = newest(book.region)
        assert (step, order(region_dir)[0]) == (2, (2, False))
        good = book.region.recover().candidates[0].record
        book.region.begin_timeline(good)
        assert book.commit(3, random_contents(np.random.default_rng(3), SIZES))
        assert order(region_dir) == [(3, False), (2, False), (1, False)], "left behind"


@pytest.fixture
def trained(run_dir: Path) -> Path:
    """Three snapshots of a training run, of which the newest two are suspect."""
    loop = adam_loop()
    with attach(run_dir, loop, slots=4) as handle:
        for _ in range(4):
            loop.run(1)
            handle.wait()
    region = Region.open(location.locate(run_dir, 0, create=False), writable=True)
    records = sorted(c.record.sequence for c in region.recover().candidates)
    region.native.suspect(records[-2])
    region.close()
    return run_dir


def steps_at(path: Path) -> dict[int, bool]:
    table = lightck.snapshots(path)
    return dict(zip(table["step"].to_pylist(), table["suspect"].to_pylist(), strict=True))


def test_restore_takes_the_newest_trusted_one_and_says_what_it_passed_over(trained: Path) -> None:
    known = steps_at(trained)
    good = max(step for step, suspect in known.items() if not suspect)
    passed = sorted((step for step in known if step > good), reverse=True)
    loop = adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), trained)
    assert info is not None
    assert (info.step, info.suspect, len(passed)) == (good, False, 2)
    assert len(info.fell_back) == 2
    for text, step in zip(info.fell_back, passed, strict=True):
        assert f"step {step}: suspect, for replicas were found to differ" in text


def test_a_suspect_step_that_is_asked_for_is_restored_and_called_so(trained: Path) -> None:
    step = max(steps_at(trained))
    loop = adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), trained, step=step)
    assert info is not None
    assert (info.step, info.suspect) == (step, True)
    assert "no other was found" in info.fell_back[0]


def test_ls_inspect_and_verify_show_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest_step = max(steps_at(trained))
    for command in (["ls"], ["verify"], ["inspect", "--step", str(newest_step)]):
        assert main([*command, str(trained)]) == 0
        said = capsys.readouterr().out
        assert "suspect" in said, command
        assert said.count("suspect") == (1 if command[0] == "inspect" else 2)


def test_a_reader_marks_nothing(region_dir: Path) -> None:
    marked(region_dir, range(1, 4), 0)
    region = Region.open(location.locate(region_dir, 0, create=False), writable=False)
    with pytest.raises(Exception, match="read-only") as refused:
        region.native.suspect(1)
    assert not isinstance(refused.value, RegionIOError)
    region.close()
