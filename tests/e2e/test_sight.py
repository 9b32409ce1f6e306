"""`lightck timeline` on traces, `lightck top` beside trainers that run, were killed or ended."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from lightck.cli.main import main
from lightck.cli.top import _since
from lightck.watch import readings
from support import processes

STATISTICS = 8192 + 16 * 4096
"""Offset of the page, see docs/design.md section 3."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def train(handle: lightck.Handle, what: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        what(torch.ones(2, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.wait()


@pytest.fixture
def traced(region_dir: Path, tmp_path: Path) -> Path:
    what, out = model(), tmp_path / "run.json"
    optimizer = torch.optim.AdamW(what.parameters())
    with lightck.attach(what, optimizer, region_dir / "run", trace=out) as handle:
        train(handle, what, optimizer, 8)
    return out


# ---- lightck timeline ----------------------------------------------------------------------------


def test_the_table_has_a_row_per_step(traced: Path, capsys: Any) -> None:
    assert main(["timeline", str(traced)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["STEP", "MS", "FORWARD"]
    assert [line.split()[0] for line in lines[1:]] == [str(i) for i in range(1, 9)]
    assert main(["timeline", "--steps", "3:5", str(traced)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["3", "4", "5"]


def test_the_numbers_are_those_of_the_snapshots(
    traced: Path, region_dir: Path, capsys: Any
) -> None:
    assert main(["timeline", "--json", str(traced)]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    payload = lightck.snapshots(region_dir / "run")["payload_bytes"].to_pylist()[0]
    for row in rows[1:]:
        assert row["snapshots"] == [row["step"] - 1]
        assert row["copied_bytes"] == payload
        assert 0 < row["lightck_ms"] < row["ms"]
        assert row["forward"] > 0 and row["backward"] > 0 and row["update"] > 0
        assert row["forward"] + row["backward"] + row["update"] < row["ms"]
    committed = [step for row in rows for step in row["committed"]]
    # That of step 7 may end behind the last step, in no row.
    assert committed in (list(range(1, 8)), list(range(1, 7)))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_drawn(traced: Path, tmp_path: Path, capsys: Any, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="SKIPPED: no matplotlib, nothing was drawn")
    out = tmp_path / f"run.{suffix}"
    assert main(["timeline", str(traced), "--steps", "3:6", "-o", str(out)]) == 0
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert out.read_bytes().startswith(starts[suffix])
    if suffix == "svg":
        text = out.read_text()
        # Not 5: its commit may begin behind the end of step 6.
        for word in ("training thread", "step 3", "step 6", "4 committed", "fence"):
            assert word in text
        assert "step 7" not in text
    assert main(["timeline", str(traced), "-o", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["timeline", str(traced), "-o", str(out), "--force"]) == 0


def test_without_matplotlib_the_extra_is_named(
    traced: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lightck.cli.timeline_plot", raising=False)
    assert main(["timeline", str(traced), "-o", str(tmp_path / "run.png")]) == 2
    assert "pip install 'lightck[timeline]'" in capsys.readouterr().err
    assert not (tmp_path / "run.png").exists()


def test_what_is_no_trace_is_refused(traced: Path, tmp_path: Path, capsys: Any) -> None:
    wrong = tmp_path / "wrong.json"
    for text in ("", "[]", '{"traceEvents": []}', '{"otherData": {"lost": 0}}', "\xff"):
        wrong.write_text(text, encoding="latin-1")
        assert main(["timeline", str(wrong)]) == 1, text
        assert "is no trace of lightck" in capsys.readouterr().err
    document = json.loads(traced.read_text())
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "step"]
    wrong.write_text(json.dumps(document))
    assert main(["timeline", str(wrong)]) == 2
    assert "no whole step" in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert main(["timeline", str(traced), "--steps", "20:30"]) == 2
    assert "whole steps there: 1 to 8" in capsys.readouterr().err
    for steps in ("a", "3-6", ""):
        assert main(["timeline", str(traced), f"--steps={steps}"]) == 2
        assert "--steps" in capsys.readouterr().err


# ---- lightck top ---------------------------------------------------------------------------------


def trainer(path: Path, steps: int, *, error: bool = False, **more: Any) -> Any:
    """A job for `processes.start` that trains, tells so, and waits with its handle open."""

    def job(parent: processes.Parent) -> None:
        what = model()
        optimizer = torch.optim.AdamW(what.parameters())
        settings = {"on_error": lambda e: None, **more} if error else more
        handle = lightck.attach(what, optimizer, path, overwrite=True, **settings)
        train(handle, what, optimizer, steps)
        if error:  # torn: reported, and counted
            what(torch.ones(2, 32)).square().mean().backward()
            with torch.no_grad():
                what[0].bias.add_(1)  # type: ignore[index,operator,union-attr]
            optimizer.step()
            handle._reporter.take()
        parent.send(handle.step)
        parent.pause()
        handle.close()

    return job


@pytest.fixture
def running(region_dir: Path) -> Iterator[tuple[Path, processes.Child]]:
    path = region_dir / "run"
    child = processes.start(trainer(path, 5))
    assert child.receive() == 5
    yield path, child
    child.kill()
    child.join()


def top(path: Path, capsys: Any) -> dict[str, Any]:
    assert main(["top", "--once", "--json", str(path)]) == 0
    (region,) = json.loads(capsys.readouterr().out)["regions"]
    return region


def test_a_running_trainer_is_seen_from_outside(
    running: tuple[Path, processes.Child], capsys: Any
) -> None:
    path, child = running
    region = top(path, capsys)
    assert region["state"] == "running" and region["survives"] == "process death"
    said = region["published"]
    assert said["process"] == child.pid and said["process_runs"]
    assert (said["step"], said["steps"], said["slipped"], said["torn"]) == (5, 5, 0, 0)
    # The page is written as step 5 ends: the commit of 4 may be known a moment later.
    assert said["committed_step"] in (3, 4) and said["bytes_copied"] > 0 and said["step_s"] > 0
    assert {"boundary", "fence", "step"} <= said["stall_s"].keys()
    assert region["committed"]["step"] == 4, "the last step waits for its forward"
    assert main(["top", "--once", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"trainer +process {child.pid}, running, last step ended .* ago", text)
    assert re.search(r"committed +step 4, 1 behind, .* ago", text)
    assert "survives process death" in text and "error      none" in text


def test_the_rate_to_the_medium_is_shown_where_snapshots_go_through_dram(
    region_dir: Path, capsys: Any
) -> None:
    for placement in ("staged", "direct"):
        path = region_dir / placement
        child = processes.start(trainer(path, 4, placement=placement))
        assert child.receive() == 4
        said = top(path, capsys)["published"]
        assert main(["top", "--once", str(path)]) == 0
        text = capsys.readouterr().out
        if placement == "staged":
            # Snapshots 1 and 2 are committed for certain: their bytes have left the DRAM.
            assert said["bytes_drained"] >= 2 * said["payload_bytes"] > 0
            assert said["drain_rate"] > 0
            assert re.search(r"drained +\d.* from DRAM to the medium at \d.*/s; \d.* held", text)
        else:
            assert (said["bytes_drained"], said["drain_rate"]) == (0, 0.0)
            assert "drained" not in text
        child.kill()
        child.join()


def test_a_killed_trainer_is_gone_and_its_last_words_stay(
    running: tuple[Path, processes.Child], capsys: Any
) -> None:
    path, child = running
    child.kill()
    while top(path, capsys)["state"] == "running":
        pass
    region = top(path, capsys)
    assert region["state"] == "gone"
    assert region["published"]["step"] == 5 and not region["published"]["process_runs"]
    assert main(["top", "--once", str(path)]) == 0
    assert f"process {child.pid} is gone without closing" in capsys.readouterr().out


def test_a_trainer_that_closed_its_handle_has_ended(region_dir: Path, capsys: Any) -> None:
    child = processes.start(trainer(region_dir / "run", 3, error=True))
    assert child.receive() == 4
    before = top(region_dir / "run", capsys)
    assert before["published"]["errors"] == 1 and before["published"]["torn"] == 1
    assert before["published"]["last_error"].startswith("TornSnapshotError: snapshot of step 3")
    child.let_go()
    assert child.receive() is None and child.join() == 0
    region = top(region_dir / "run", capsys)
    assert region["state"] == "ended"
    assert region["committed"]["step"] == region["published"]["committed_step"] == 4
    assert main(["top", "--once", str(region_dir / "run")]) == 0
    text = capsys.readouterr().out
    assert "has ended: it closed its handle" in text and "1 torn" in text


def test_another_owner_without_a_page_of_its_own_is_not_taken_for_the_last_one(
    region_dir: Path, capsys: Any
) -> None:
    path = region_dir / "run"
    child = processes.start(trainer(path, 3))
    child.receive()
    child.let_go()
    child.join()
    words = _page(path)
    child = processes.start(trainer(path, 3))
    child.receive()
    _write_page(path, words)
    assert top(path, capsys)["state"] == "unknown owner"
    assert main(["top", "--once", str(path)]) == 0
    assert "another process than process" in capsys.readouterr().out
    child.kill()
    child.join()


def _page(path: Path) -> bytes:
    with (path / "region-00000.lck").open("rb") as file:
        file.seek(STATISTICS)
        return file.read(4096)


def _write_page(path: Path, page: bytes) -> None:
    with (path / "region-00000.lck").open("r+b") as file:
        file.seek(STATISTICS)
        file.write(page)


def test_a_region_of_an_older_build_has_no_statistics(region_dir: Path, capsys: Any) -> None:
    path = region_dir / "run"
    child = processes.start(trainer(path, 5))
    child.receive()
    _write_page(path, bytes(4096))
    region = top(path, capsys)
    assert region["state"] == "unknown owner" and region["published"] is None
    assert region["committed"]["step"] == 4
    assert main(["top", "--once", str(path)]) == 0
    text = capsys.readouterr().out
    assert "running, but tells nothing of itself" in text and "statistics  none" in text
    child.kill()
    child.join()
    assert top(path, capsys)["state"] == "idle"


def test_a_torn_page_is_no_page_and_no_harm(
    running: tuple[Path, processes.Child], capsys: Any
) -> None:
    path, _ = running
    page = bytearray(_page(path))
    page[200] ^= 1
    _write_page(path, bytes(page))
    region = top(path, capsys)
    assert region["published"] is None and "torn?" in region["problem"]
    page[200] ^= 1
    page[0] |= 1  # a writer died in the middle: what it had written is judged by the checksum
    _write_page(path, bytes(page))
    assert top(path, capsys)["published"]["step"] == 5
    assert main(["verify", str(path)]) == 0


def test_many_regions_are_a_table(region_dir: Path, capsys: Any) -> None:
    path = region_dir / "run"
    child = processes.start(trainer(path, 3))
    child.receive()
    child.kill()
    child.join()
    for rank in (1, 2):
        shutil.copy(path / "region-00000.lck", path / f"region-{rank:05}.lck")
    assert main(["top", "--once", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["RANK", "TRAINER", "STEP", "COMMITTED"]
    assert [line.split()[1:5] for line in lines[2:]] == [["gone", "3", "2", "1"]] * 3


def test_another_handle_of_the_same_process_is_not_taken_for_the_last_one() -> None:
    first: dict[str, Any] = {"process": 7, "began_ns": 1, "began_s": 3.0, "step": 5}
    first |= {"bytes_copied": 300, "stall_s": {"fence": 0.9}, "stall_s_per_step": 0.1}
    second = {**first, "began_ns": 2, "began_s": 8.0, "step": 20, "bytes_copied": 50}
    row: dict[str, Any] = {"published": {**second, "write_rate": 6.25}, "since_s": None}
    _since(row, first)
    assert row == {"published": {**second, "write_rate": 6.25}, "since_s": None}
    _since(row, {**second, "began_s": 6.0, "step": 18, "bytes_copied": 30})
    assert row["since_s"] == 2.0 and row["published"]["write_rate"] == 10.0


def test_looking_again_shows_what_happened_in_between(
    running: tuple[Path, processes.Child], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = running
    looks = []

    def enough(where: str | None) -> list[Any]:
        looks.append(where)
        if len(looks) == 2:
            signal.raise_signal(signal.SIGINT)
        return readings(where)

    monkeypatch.setattr("lightck.cli.top.readings", enough)
    assert main(["top", "--json", "--every", "0.05", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["regions"][0]["published"]["step"] for line in lines] == [5, 5]
    assert looks == [str(path)] * 2, "the interrupt lets the look end, and is the last"
    assert main(["top", "--every", "0", str(path)]) == 2
