"""`lightck rm`: what it removes, what it never touches, when it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lightck
from lightck.cli.main import main
from lightck.removal import files_at
from support import processes


@pytest.fixture
def run(region_dir: Path) -> Path:
    """A run of one rank with a snapshot, beside files that are not lightck's."""
    path = region_dir / "run"
    write(path)
    for name in ("notes.txt", "region-00000.lck.bak", "region-x.lck", "xregion-00001.lck"):
        (path / name).write_text("the user's")
    (path / "region-00002.lck.d").mkdir()
    return path


def write(path: Path) -> None:
    """One step, in this process."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, optimizer, path):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_it_removes_what_is_the_runs_and_nothing_else(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = names(run) - {"region-00000.lck"}
    for name in ("region-00001.lck.damaged", "region-00001.lck.damaged2", "region-00003.new"):
        (run / name).write_bytes(b"left over")
    assert main(["rm", "--yes", str(run)]) == 0
    assert names(run) == theirs
    assert capsys.readouterr().out.startswith("removed 4 file(s), ")
    write(run)
    assert main(["rm", "--json", "--yes", str(run)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["removed"] == [str(run / "region-00000.lck")] and said["bytes"] > 1 << 20
    assert main(["rm", "--yes", str(run)]) == 2
    assert "no lightck region" in capsys.readouterr().err


@pytest.mark.parametrize("written", ["run", "./run", "run/", "no/../run", "{folder}/../{name}/run"])
def test_however_the_path_is_written_the_region_is_gone(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    write(region_dir / "run")
    monkeypatch.chdir(region_dir)
    path = written.format(folder=region_dir, name=region_dir.name)
    assert [each.path for each in files_at(path)] == [region_dir / "run" / "region-00000.lck"]
    assert main(["rm", "--yes", path]) == 0
    assert not (region_dir / "run" / "region-00000.lck").exists()


@pytest.mark.parametrize(
    ("answer", "gone"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_it_asks_and_takes_only_yes_for_yes(
    run: Path, answer: str, gone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text(answer)
    with (tmp_path / "answer").open() as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
        assert main(["rm", str(run)]) == (0 if gone else 2)
    assert (run / "region-00000.lck").exists() != gone


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_where_nobody_can_answer_it_wants_to_be_told(
    run: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(os.devnull).open() as nobody, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nobody)
        assert main(["rm", *more, str(run)]) == 2
    assert "--yes" in capsys.readouterr().err
    assert (run / "region-00000.lck").exists()


def test_a_path_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "--yes"]) == 2
    assert "PATH" in capsys.readouterr().err


def test_a_trainer_that_holds_one_rank_keeps_all_of_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The second rank's region is another run's file under its name: locks do not ask.
    second = run.parent / "second"

    def trainer(parent: processes.Parent) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lightck.attach(model, optimizer, second):
            os.link(second / "region-00000.lck", run / "region-00001.lck")
            parent.send(None)
            parent.pause()

    child = processes.start(trainer)
    child.receive()
    try:
        before = names(run)
        assert main(["rm", "--yes", str(run)]) == 2
        said = capsys.readouterr().err
        assert "region-00001.lck: a trainer owns it" in said
        assert f"process {child.pid}" in said and "nothing was removed" in said
        assert names(run) == before
    finally:
        child.kill()
        child.join()
    assert main(["rm", "--yes", str(run)]) == 0
    assert not [name for name in names(run) if name in ("region-00000.lck", "region-00001.lck")]


def test_a_reader_that_holds_a_snapshot_keeps_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reader(parent: processes.Parent) -> None:
        held = lightck.load(run)
        parent.send(held["step"])
        parent.pause()
        del held

    child = processes.start(reader)
    assert child.receive() == 1
    try:
        assert main(["rm", "--yes", str(run)]) == 2
        assert "a reader holds a snapshot in it" in capsys.readouterr().err
        assert (run / "region-00000.lck").exists()
    finally:
        child.kill()
        child.join()
    assert main(["rm", "--yes", str(run)]) == 0


def test_a_link_under_a_regions_name_is_not_followed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = run.parent / "precious"
    target.write_text("the user's")
    (run / "region-00001.lck").symlink_to(target)
    assert main(["rm", "--yes", str(run)]) == 2
    assert "symbolic link" in capsys.readouterr().err
    assert target.exists() and (run / "region-00000.lck").exists()


def test_it_says_why_a_device_is_not_removed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "--yes", "/dev/null"]) == 2
    assert "a device" in capsys.readouterr().err
