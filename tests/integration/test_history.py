"""The history of a run: what is kept, what a report does, and what it does to training: nothing."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck import examine, removal
from lightck.cli.main import main
from lightck.errors import ConfigError, NoSnapshotError, RegionError, UnrestoredError
from lightck.history import history, item
from lightck.policy.keep import Newest, steps_to_keep
from lightck.region import snapshot_copy
from support.histories import (
    check_items,
    kept_steps,
    metrics_at,
    restored_from,
    settle,
    state,
)
from support.loops import Loop, adam_loop, attach, train


def run(
    path: Path,
    loop: Loop,
    steps: int,
    losses: dict[int, float] | None = None,
    **settings: Any,
) -> None:
    """Train on, and report the losses of some steps as they end; every snapshot is committed."""
    with attach(path, loop, **{"slots": 4, **settings}) as handle:
        for _ in range(steps):
            loop.run(1)
            if losses is not None and loop.step in losses:
                handle.report(loss=losses[loop.step])
            handle.wait()
            if handle.config.keep is not None:
                settle(handle)
        loop.note()


def told(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    """The fields of the events of one name so far."""
    return [r.lightck for r in caplog.records if getattr(r, "lightck_event", "") == name]  # type: ignore[attr-defined]


# ---- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["run_dir", "disk_dir"])
def test_what_is_kept_is_restored_bit_for_bit(where: str, request: pytest.FixtureRequest) -> None:
    path, loop = request.getfixturevalue(where), adam_loop()
    run(path, loop, 13, policy=2, keep="every 4 steps")
    assert kept_steps(path) == [2, 4, 8, 12]
    check_items(path, loop)
    info, again = restored_from(path / "history" / "step-8")
    assert info.step == 8 and state(again) == loop.seen[8]


def test_training_goes_on_from_an_item_as_if_it_had_never_stopped(run_dir: Path) -> None:
    golden = adam_loop()
    initial = [p.clone() for p in golden.model.parameters()]
    golden.run(12)
    golden.note()
    loop = adam_loop()
    with torch.no_grad():
        for p, value in zip(loop.model.parameters(), initial, strict=True):
            p.copy_(value)
    run(run_dir, loop, 8, keep="steps 3")
    assert 3 in kept_steps(run_dir)
    info, again = restored_from(run_dir, step=3)
    assert info.path == run_dir / "history" / "step-3"
    again.run(9)
    again.note()
    assert again.seen[12] == golden.seen[12]


def test_without_keep_nothing_is_made(run_dir: Path) -> None:
    run(run_dir, adam_loop(), 3, {2: 0.5})
    assert not (run_dir / "history").exists()


def test_an_item_takes_the_bytes_of_one_snapshot(run_dir: Path) -> None:
    run(run_dir, Loop(big := torch.nn.Linear(512, 512), torch.optim.SGD(big.parameters(), 0.1),
                      width=512), 2, keep=1)  # fmt: skip
    region = (run_dir / "region-00000.lck").stat()
    (file,) = (run_dir / "history").glob("*/region-*.lck")
    assert file.stat().st_size == region.st_size
    assert 1 << 20 <= file.stat().st_blocks * 512 <= 1.2 * (1 << 20)
    assert file.stat().st_mode & 0o777 == 0o600


# ---- reports -------------------------------------------------------------------------------------


def test_the_best_step_is_kept_due_or_not(run_dir: Path) -> None:
    loop, losses = adam_loop(), {3: 0.5, 5: 0.2, 8: 0.9, 11: 0.3}
    run(run_dir, loop, 13, losses, policy=100, keep="best loss")
    assert kept_steps(run_dir) == [5]
    assert metrics_at(run_dir)[5] == {"loss": 0.2}
    check_items(run_dir, loop)


def test_every_better_one_replaces_the_best(run_dir: Path) -> None:
    loop, losses = adam_loop(), {s: 1 / s for s in range(1, 9)}
    run(run_dir, loop, 10, losses, policy=100, keep="best 2 loss")
    assert kept_steps(run_dir) == [7, 8]
    check_items(run_dir, loop)


def test_a_report_behind_the_commit_of_its_step_keeps_that_step(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=100, keep="best loss") as handle:
        for step in range(1, 7):
            loop.run(1)
            loop.note()
            handle.snapshot()
            handle.wait()
            handle.report(loss=abs(step - 3.0))
            settle(handle)
    assert kept_steps(run_dir) == [3]
    check_items(run_dir, loop)


def test_an_item_gets_the_metrics_that_come_after_it(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, keep="newest 3 or best loss") as handle:
        loop.run(2)
        loop.note()
        handle.snapshot()
        handle.wait()
        settle(handle)
        handle.report(loss=0.5, accuracy=torch.tensor(0.25))
        handle.report(loss=0.4)
    assert metrics_at(run_dir)[2] == {"loss": 0.4, "accuracy": 0.25}


def test_nan_is_kept_and_is_never_best(run_dir: Path) -> None:
    run(run_dir, adam_loop(), 5, {2: math.nan, 3: 7.0, 4: math.inf}, policy=1, keep="best loss")
    assert kept_steps(run_dir) == [3]


def test_what_is_no_number_is_refused(run_dir: Path) -> None:
    with attach(run_dir, adam_loop(), keep="best loss") as handle:
        with pytest.raises(ConfigError, match="metrics: loss = 'low'"):
            handle.report(loss="low")
        with pytest.raises(ConfigError, match="one element"):
            handle.report(loss=torch.ones(2))


def test_a_report_behind_the_next_forward_says_that_it_came_too_late(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=100, keep="best loss") as handle:
        loop.run(3, between=lambda step: handle.report(loss=0.1) if step == 2 else None)
    (missed,) = told(caplog, "history_missed")
    assert missed["step"] == 2 and "before the next forward" in missed["why"]
    assert kept_steps(run_dir) == []


def test_the_best_survives_a_restart_and_is_beaten_by_better_ones_only(run_dir: Path) -> None:
    loop = adam_loop()
    run(run_dir, loop, 4, {2: 0.2}, policy=100, keep="best loss")
    run(run_dir, loop, 4, {6: 0.3}, policy=100, keep="best loss")
    assert kept_steps(run_dir) == [2]
    run(run_dir, loop, 4, {10: 0.1}, policy=100, keep="best loss")
    assert kept_steps(run_dir) == [10]


def test_a_best_step_whose_copy_a_kill_cut_short_is_kept_by_the_next_life(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    with monkeypatch.context() as patch:  # as if the process ended there
        patch.setattr(history.History, "_take", lambda self, offer: self._drop(offer) or True)
        run(run_dir, loop, 3, {3: 0.1}, policy=100, keep="best loss")
    assert kept_steps(run_dir) == [] and (run_dir / "history/step-3/item.json").exists()
    run(run_dir, loop, 2, policy=100, keep="best loss")
    assert kept_steps(run_dir) == [3]
    assert metrics_at(run_dir)[3] == {"loss": 0.1}
    check_items(run_dir, loop)


def test_the_best_is_kept_however_slowly_it_is_copied(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, loop = history.copy_snapshot, adam_loop()

    def slow(*given: Any, **named: Any) -> None:
        threading.Event().wait(0.1)  # the training goes on meanwhile, and needs the two slots
        real(*given, **named)

    monkeypatch.setattr(history, "copy_snapshot", slow)
    with attach(run_dir, loop, policy=1, slots=2, keep="newest 1 or best 3 loss") as handle:
        for step in range(1, 41):
            loop.run(1)
            if step in (5, 20, 21):
                handle.report(loss=1 / step)
        loop.note()
    assert {5, 20, 21} <= {*kept_steps(run_dir)}
    check_items(run_dir, loop)


# ---- what goes wrong -----------------------------------------------------------------------------


def _no_room(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_event_and_the_next_snapshot_is_tried(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, keep=3) as handle:
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_copy.os, "sendfile", _no_room)
            loop.run(2)
            handle.wait()
            for _ in range(6000):
                if told(caplog, "history_failed"):
                    break
                threading.Event().wait(0.01)
            assert kept_steps(run_dir) == []
        loop.run(3)
        loop.note()
    assert "No space left" in told(caplog, "history_failed")[0]["why"]
    assert kept_steps(run_dir)[-1] == 5
    check_items(run_dir, loop)


def test_a_folder_that_cannot_be_written_is_an_event(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "history").write_text("no folder")
    run(run_dir, adam_loop(), 3, {2: 0.1}, keep="newest 3 or best loss")
    assert told(caplog, "history_failed")
    assert lightck.snapshots(run_dir)["step"].to_pylist()[0] == 3


def test_a_copy_that_does_not_match_its_checksums_is_no_item(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.sendfile

    def damaging(out: int, source: int, offset: int, count: int) -> int:
        sent = real(out, source, offset, count)
        if count > 8192:  # a slot's part: its last tensor's bytes are somewhere in the middle
            os.pwrite(out, b"damaged", offset + 9000)
        return sent

    monkeypatch.setattr(snapshot_copy.os, "sendfile", damaging)
    run(run_dir, adam_loop(), 2, keep=2)
    assert told(caplog, "history_failed") and kept_steps(run_dir) == []
    assert not [*(run_dir / "history").glob("step-*")]


def _stuck(until: threading.Event) -> Callable[..., None]:
    def copy(*_: Any, **__: Any) -> None:
        until.wait(60)
        raise OSError(errno.EIO, "a hanging disk came back, and failed")

    return copy


def test_a_hanging_disk_neither_stops_training_nor_keeps_its_slot(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    until, loop = threading.Event(), adam_loop()
    monkeypatch.setattr(history, "copy_snapshot", _stuck(until))
    monkeypatch.setattr(history, "HELD_S", 0.0)
    with attach(run_dir, loop, policy=1, keep=3, close_timeout_s=0.2) as handle:
        for _ in range(30):
            loop.run(1)
            handle.wait()
    (unfinished,) = told(caplog, "history_unfinished")
    assert unfinished["steps"] and told(caplog, "history_slow")
    assert lightck.snapshots(run_dir)["step"].to_pylist()[0] == 30
    assert kept_steps(run_dir) == []
    until.set()


def test_a_copy_that_hangs_does_not_keep_a_failing_training_from_its_slot(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until, loop = threading.Event(), adam_loop()
    monkeypatch.setattr(history, "copy_snapshot", _stuck(until))
    with attach(run_dir, loop, policy=1, slots=2, keep=3, close_timeout_s=10) as handle:
        loop.run(1)
        handle.wait()  # step 0 or 1 is copied, and held
        for _ in range(20):
            loop.run(1)
        saved = handle.snapshot_now("a test")
        assert saved.fresh and saved.step == 21, saved.why
        until.set()


def test_a_damaged_item_is_found(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = adam_loop()
    run(run_dir, loop, 4, keep="steps 2")
    assert main(["verify", str(run_dir)]) == 0
    (row,) = examine.check(run_dir / "history" / "step-2")
    place = examine.contents(run_dir / "history" / "step-2").tensors.to_pylist()[0]
    with open(row["file"], "r+b") as file:
        file.seek(place["offset"])
        byte = file.read(1)
        file.seek(place["offset"])
        file.write(bytes([byte[0] ^ 1]))
    capsys.readouterr()
    assert main(["verify", str(run_dir)]) == 1
    assert f"step-2/region-00000.lck slot {row['slot']} step 2" in capsys.readouterr().out
    with pytest.raises(NoSnapshotError):
        restored_from(run_dir / "history" / "step-2")


# ---- going back, and whose history it is ---------------------------------------------------------


def test_a_run_that_goes_back_leaves_the_newer_items_aside(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightck")
    run(run_dir, adam_loop(), 5, policy=1, keep=9)
    assert kept_steps(run_dir) == [1, 2, 3, 4, 5]
    _, again = restored_from(run_dir, step=4)
    run(run_dir, again, 2, policy=1, keep=9)
    assert kept_steps(run_dir) == [1, 2, 3, 4, 5, 6]
    assert (run_dir / "history/left/step-5/region-00000.lck").exists()
    assert told(caplog, "history_left")[0]["steps"] == [5]
    check_items(run_dir, again)
    info, _ = restored_from(run_dir / "history/left/step-5")
    assert info.step == 5


def test_a_state_that_is_replaced_by_an_older_one_leaves_newer_items_aside(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, keep=9) as handle:
        for _ in range(4):  # no step slips: nothing is in flight, or read, when the next is due
            loop.run(1)
            handle.wait()
            settle(handle)
        assert kept_steps(run_dir)[-1] == 3
        handle.replaced(2)
        assert kept_steps(run_dir)[-1] <= 2
        loop.step, loop.seen = 2, {}
        loop.run(3)
        loop.note()
    assert kept_steps(run_dir)[-1] == 5
    del loop.seen[2]  # of another state that was called so
    check_items(run_dir, loop)


def test_an_old_step_comes_from_the_history_and_asks_before_it_gives_newer_ones_up(
    run_dir: Path,
) -> None:
    run(run_dir, adam_loop(), 6, policy=1, keep=9)
    assert lightck.load(run_dir, step=2)["step"] == 2
    info, again = restored_from(run_dir, step=2)
    assert info.step == 2
    with pytest.raises(UnrestoredError):
        attach(run_dir, again)
    run(run_dir, again, 1, policy=1, keep=9, overwrite=True)
    assert kept_steps(run_dir) == [1, 2, 3]
    with pytest.raises(NoSnapshotError):
        restored_from(run_dir, step=5)


def test_what_another_run_has_kept_is_set_aside(run_dir: Path) -> None:
    run(run_dir, adam_loop(), 4, policy=1, keep=9)
    run(run_dir, adam_loop(), 2, policy=1, keep=9, overwrite=True)
    assert kept_steps(run_dir) == [1, 2]
    assert len([*(run_dir / "history" / "left").iterdir()]) == 4


def test_a_step_that_is_nowhere_is_missed_as_before(run_dir: Path) -> None:
    run(run_dir, adam_loop(), 4, policy=1, keep="steps 1")
    with pytest.raises(NoSnapshotError, match=r"wanted: 77; steps there: \[1, 2, 3, 4\]"):
        restored_from(run_dir, step=77)


def test_nothing_is_attached_to_an_item(run_dir: Path) -> None:
    run(run_dir, adam_loop(), 2, keep=1)
    folder = run_dir / "history" / "step-2"
    _, again = restored_from(folder)
    with pytest.raises(RegionError, match="an item of a history"):
        attach(folder, again)


def test_unfinished_items_of_a_dead_run_are_removed(run_dir: Path) -> None:
    loop = adam_loop()
    run(run_dir, loop, 3, policy=1, keep=9)
    (run_dir / "history/step-2/region-00000.lck").unlink()
    gone = run_dir / "history/.gone-0123abcd"
    gone.mkdir()
    (gone / "region-00000.lck").write_bytes(b"half")
    run(run_dir, loop, 1, policy=1, keep=9)
    assert {each.name for each in (run_dir / "history").iterdir()} >= {"step-1", "step-3", "step-4"}
    assert not gone.exists() and 2 not in [
        e.kept.step for e in item.every_item(run_dir) if not e.is_whole
    ]


# ---- commands ------------------------------------------------------------------------------------


def test_a_pinned_step_stays_until_the_pin_is_taken_away(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = adam_loop()
    run(run_dir, loop, 3, policy=1, keep=2)
    assert main(["pin", "--step", "2", str(run_dir)]) == 0
    run(run_dir, loop, 3, policy=1, keep=2)
    assert kept_steps(run_dir) == [2, 5, 6]
    capsys.readouterr()
    assert main(["ls", str(run_dir)]) == 0
    assert "kept, pinned" in capsys.readouterr().out
    assert main(["pin", "--off", "--step", "2", str(run_dir)]) == 0
    run(run_dir, loop, 1, policy=1, keep=2)
    assert kept_steps(run_dir) == [6, 7]
    assert main(["pin", "--step", "99", str(run_dir)]) == 2


@pytest.mark.parametrize("by", [history, removal], ids=["the trainer", "rm"])
def test_a_step_that_is_pinned_while_the_policy_chooses_stays(
    run_dir: Path, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    run(run_dir, loop, 2, policy=1, keep=9)

    def choose(keep: Any, kept: Any) -> frozenset[int]:
        item.pin(next(e for e in item.every_item(run_dir) if e.kept.step == 1), pinned=True)
        return steps_to_keep(keep, kept)

    chosen = "newest 1" if by is history else 9
    monkeypatch.setattr(by, "steps_to_keep", choose)
    run(run_dir, loop, 1, policy=1, keep=chosen)
    if by is removal:
        listed = [removal.RunFile(run_dir / f"history/step-{n}/region", 0) for n in (1, 2)]
        removed = removal.prune(run_dir, Newest(1), listed)
        assert {file.path.parent.name for file in removed} == {"step-2"}
    assert kept_steps(run_dir) == [1, 3]


def test_rm_removes_no_step_that_was_not_asked_about(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = adam_loop()
    run(run_dir, loop, 2, policy=1, keep=9)

    def answer(question: str) -> str:
        run(run_dir, loop, 2, policy=1, keep=9)  # a trainer keeps more meanwhile
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(["rm", "--keep", "newest 1", str(run_dir)]) == 0
    assert "step-1" in capsys.readouterr().out
    assert kept_steps(run_dir) == [2, 3, 4]


def test_rm_prunes_by_words_and_removes_all_with_the_run(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(run_dir, adam_loop(), 6, {2: 0.1, 4: 0.2}, policy=1, keep=9)
    assert main(["rm", "--yes", "--keep", "newest 1", str(run_dir / "no")]) == 2
    assert main(["rm", "--yes", "--keep", "newst", str(run_dir)]) == 2
    assert "newst" in capsys.readouterr().err
    assert main(["rm", "--yes", "--keep", "best loss", str(run_dir)]) == 0
    assert kept_steps(run_dir) == [2, 6]
    assert main(["rm", "--yes", str(run_dir)]) == 0
    assert [*run_dir.iterdir()] == []


def test_commands_find_a_step_in_the_history(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(run_dir, adam_loop(), 6, {1: math.nan}, policy=1, keep=9)
    for command in (["inspect"], ["verify"]):
        assert main([*command, "--step", "1", str(run_dir)]) == 0
    out = run_dir / "one.pt"
    assert main(["export", str(run_dir), str(out), "--step", "1"]) == 0
    assert torch.load(out)["step"] == 1
    capsys.readouterr()
    assert main(["ls", "--json", str(run_dir)]) == 0
    assert '"nan"' in capsys.readouterr().out


def test_a_history_needs_a_folder(region_dir: Path) -> None:
    with pytest.raises(ConfigError, match="keep = newest 3"):
        train(region_dir / "run", adam_loop(), 1, keep=3, backend="pmemobj")
