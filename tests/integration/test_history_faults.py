"""Faults of histories that were found by trying to break them: none of them may come back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightck
from lightck.cli.main import main
from lightck.errors import ConfigError, NoSnapshotError
from lightck.history import history, item
from lightck.policy.keep import Kept, Newest
from lightck.region import location, snapshot_copy
from support import internals
from support.histories import check_items, kept_steps, metrics_at, restored_from, settle, state
from support.loops import adam_loop, attach


def full(value: float, size: int = 1000) -> dict[str, Any]:
    return {"number": value, "tensor": torch.full((size,), value)}


def saved(path: Path, steps: dict[int, float], **settings: Any) -> None:
    """Save state dicts in a life of its own; each is kept before the next one comes."""
    with lightck.Store(path, **{"keep": 9, **settings}) as store:
        for step, value in steps.items():
            store.save(full(value), step).result()
            kept = store._writer._history
            for _ in range(6000):
                if kept is None or not (kept._offers or kept._copying):
                    break
                threading.Event().wait(0.01)


# ---- what lies in the folder, whoever wrote it ---------------------------------------------------

SAID = {"step": 2, "time_s": 1.0, "epoch": 0, "metrics": {}, "ranks": [0]}


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", "7", "[" * 100_000, '"\\ud800"', "\xff\xfe"),
        *(json.dumps({**SAID, "epoch": float("inf")}), json.dumps({**SAID, "time_s": 10**400})),
        *(json.dumps({**SAID, "time_s": float("nan")}), json.dumps({**SAID, "metrics": [1]})),
        *(json.dumps({**SAID, "ranks": []}), json.dumps({**SAID, "ranks": [[]]})),
    ],
)
def test_no_text_in_place_of_a_description_stops_a_run_or_a_command(
    run_dir: Path, text: str
) -> None:
    saved(run_dir, {1: 1.0, 2: 2.0, 3: 3.0})
    (run_dir / "history/step-2/item.json").write_text(text, encoding="latin-1")
    read = item.every_item(run_dir)[1]
    assert (read.kept, read.ranks) == (Kept(2, 0.0), (0,))
    assert main(["ls", str(run_dir)]) == 0
    saved(run_dir, {4: 4.0}, keep="every 1 h or newest 9")
    assert kept_steps(run_dir) == [1, 2, 3, 4]


def test_reading_a_folder_in_place_of_a_description_leaves_no_descriptor_open(
    run_dir: Path,
) -> None:
    saved(run_dir, {1: 1.0})
    (run_dir / "history/step-1/item.json").unlink()
    (run_dir / "history/step-1/item.json").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        item.every_item(run_dir)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_removed_through_a_link(run_dir: Path, region_dir: Path) -> None:
    saved(run_dir, {1: 1.0, 2: 2.0})
    other = region_dir / "other"
    other.mkdir()
    (other / "region-00000.lck").write_text("somebody's")
    (run_dir / "history/step-0").symlink_to(other)
    (run_dir / "history/.gone-01234567").symlink_to(other)
    saved(run_dir, {3: 3.0}, keep=1)
    assert kept_steps(run_dir) == [3]
    assert main(["rm", "--yes", str(run_dir)]) == 0
    assert (other / "region-00000.lck").read_text() == "somebody's"


def test_rm_removes_what_a_killed_process_had_begun_to_remove(run_dir: Path) -> None:
    saved(run_dir, {1: 1.0, 2: 2.0})
    os.rename(run_dir / "history/step-1", run_dir / "history/.gone-01234567")
    (run_dir / "history/step-2/a-folder").mkdir()
    assert main(["rm", "--yes", str(run_dir)]) == 0
    assert [*run_dir.iterdir()] == []


def test_a_kept_step_is_found_where_the_run_has_lost_its_region(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, keep="steps 2") as handle:
        for _ in range(4):
            loop.run(1)
            handle.wait()
            settle(handle)
        loop.note()
    (run_dir / "region-00000.lck").unlink()
    assert lightck.load(run_dir, step=2)["step"] == 2
    info, again = restored_from(run_dir, step=2)
    assert info.step == 2 and state(again) == loop.seen[2]
    fresh = adam_loop()
    assert lightck.restore(fresh.model, list(fresh.optimizers), run_dir, step=3) is None


# ---- the policy ----------------------------------------------------------------------------------


class Failing:
    """A policy with a mistake in it: it fails in every thread, or in the history's alone."""

    metrics = frozenset({"loss"})

    def __init__(self, *, everywhere: bool) -> None:
        self.everywhere = everywhere

    def keep(self, kept: Any) -> frozenset[int]:
        if self.everywhere or threading.current_thread().name == "lightck-history":
            raise ValueError("a mistake")
        return frozenset(each.step for each in kept)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_policy_that_fails_ends_no_training_and_holds_no_slot(
    run_dir: Path, everywhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, slots=2, keep=Failing(everywhere=everywhere)) as handle:
        for _ in range(6):
            loop.run(1)
            handle.report(loss=0.5)
            handle.wait()
            settle(handle)
        assert handle.last_committed_step == 5
    assert "a mistake" in caplog.text


def test_a_policy_that_fails_fails_no_save(run_dir: Path) -> None:
    with lightck.Store(run_dir, keep=Failing(everywhere=True)) as store:
        assert store.save(full(1.0), 1).result(60) == 1


def test_a_metric_beyond_every_float_is_refused_in_words(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="loss"):
        lightck.Store(run_dir).save(full(1.0), 1, metrics={"loss": 10**400})


# ---- branches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [9, 0])
def test_a_store_opened_again_that_goes_back_leaves_what_its_history_had_beyond(
    run_dir: Path, keep: int
) -> None:
    saved(run_dir, {step: step for step in range(1, 7)})
    saved(run_dir, {4: 40.0, 5: 50.0, 6: 60.0, 7: 70.0}, keep=keep)
    store = lightck.Store(run_dir)
    assert [store.load(step)["number"] for step in (1, 2, 3)] == [1, 2, 3]
    if keep:
        assert [store.load(step)["number"] for step in (4, 5, 6, 7)] == [40, 50, 60, 70]
    else:
        assert store.steps() == [7, 6, 3, 2, 1]
        with pytest.raises(NoSnapshotError):
            store.load(5)


def test_a_store_that_has_lost_its_region_begins_a_history_anew(run_dir: Path) -> None:
    saved(run_dir, {1: 1.0, 2: 2.0, 3: 3.0})
    (run_dir / "region-00000.lck").unlink()
    saved(run_dir, {1: 10.0})
    assert lightck.Store(run_dir).steps() == [1]
    assert len([*(run_dir / "history/left").iterdir()]) == 3


def test_metrics_of_a_state_that_a_store_has_replaced_count_no_more(run_dir: Path) -> None:
    with lightck.Store(run_dir, keep="best loss") as store:
        for step, loss in ((5, 0.1), (6, 0.05), (3, 0.9)):
            store.save(full(step), step, metrics={"loss": loss}).result()
        store.save(full(60), 6).result()  # was never evaluated
        store.save(full(70), 7, metrics={"loss": 0.5}).result()
    assert metrics_at(run_dir) == {7: {"loss": 0.5}}


def test_metrics_of_a_state_that_was_replaced_count_no_more(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, keep="newest 9 or best loss") as handle:
        for step in range(1, 7):
            loop.run(1)
            handle.report(loss=1 / step)
        handle.wait()
        handle.replaced(2)
        loop.step = 2
        for _ in range(5):
            loop.run(1)
            handle.wait()
            settle(handle)
        loop.run(1)
    assert {s: m for s, m in metrics_at(run_dir).items() if s > 2 and m} == {}


def test_a_copy_that_runs_while_the_run_goes_back_is_no_item(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, real = threading.Event(), threading.Event(), item.make_place

    def place(run: Path, step: int, rank: int) -> Any:
        if step == 4 and not begun.is_set():
            begun.set()
            assert go.wait(60)
        return real(run, step, rank)

    monkeypatch.setattr(item, "make_place", place)
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, slots=3, keep=9) as handle:
        for _ in range(4):
            loop.run(1)
            handle.wait()
            settle(handle)
        loop.run(1)
        handle.wait()
        assert begun.wait(60)  # nothing of step 4 is on the medium yet
        handle.replaced(2)
        loop.step, loop.seen = 2, {}
        go.set()
        settle(handle)
        assert kept_steps(run_dir) == [1, 2]
        for _ in range(4):
            loop.run(1)
            handle.wait()
            settle(handle)
        loop.note()
    assert {4, 5} <= {*kept_steps(run_dir)}
    loop.seen = {step: seen for step, seen in loop.seen.items() if step > 2}
    check_items(run_dir, loop)


# ---- copies and reports --------------------------------------------------------------------------


def test_metrics_of_a_step_that_is_kept_already_are_on_the_medium_when_report_returns(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, keep="newest 9 or best loss") as handle:
        loop.run(2)
        handle.wait(2)
        settle(handle)
        assert kept_steps(run_dir)[-1] == 2
        kept = internals.checkpointer(handle).outcomes.history
        assert kept is not None
        with monkeypatch.context() as patch:
            patch.setattr(kept, "_tell", lambda step: None)  # the thread does nothing about it
            patch.setattr(history, "REPORT_S", 60.0)
            handle.report(loss=0.5)
            assert metrics_at(run_dir)[2] == {"loss": 0.5}
            settle(handle)


def test_metrics_that_hang_on_their_way_do_not_keep_a_slot(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    until, loop, real = threading.Event(), adam_loop(), item.describe
    hangs = threading.Event()

    def describe(*given: Any) -> None:
        if hangs.is_set():
            assert until.wait(60)
        real(*given)

    monkeypatch.setattr(item, "describe", describe)
    monkeypatch.setattr(history, "REPORT_S", 0.05)
    monkeypatch.setattr(history, "HELD_S", 0.1)
    keep = "newest 9 or best 9 loss"
    with attach(run_dir, loop, policy=1, slots=2, keep=keep, close_timeout_s=1) as handle:
        loop.run(2)
        handle.wait(2)
        settle(handle)
        hangs.set()
        handle.report(loss=0.5)  # of a kept step: no copy runs
        loop.run(1)
        handle.report(loss=0.4)  # its slot is held until it is copied
        threading.Event().wait(0.15)
        for _ in range(7):
            loop.run(1)
            handle.wait()
        assert handle.last_committed_step == 9
        until.set()
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_region_that_grows_while_it_is_copied_makes_no_copy_fail(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, begun, grown = snapshot_copy._copy, threading.Event(), threading.Event()

    def copy(*given: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert grown.wait(60)
        real(*given)

    monkeypatch.setattr(snapshot_copy, "_copy", copy)
    with lightck.Store(run_dir, keep=9) as store:
        store.save(full(1.0), 1).result()
        assert begun.wait(60)
        store.save(full(2.0, 5_000_000), 2).result()
        grown.set()
    assert kept_steps(run_dir) == [1, 2] and "history_failed" not in caplog.text
    assert lightck.Store(run_dir / "history/step-1").load()["number"] == 1.0


def test_of_a_step_that_is_left_again_and_again_one_item_stays_aside(run_dir: Path) -> None:
    for value in range(4):
        with lightck.Store(run_dir, keep=2) as store:
            store.save({"value": value}, 1).result()
    left = sorted(each.name for each in (run_dir / "history" / "left").iterdir())
    assert left == ["step-1"]
    assert lightck.Store(run_dir / "history" / "left" / "step-1").load() == {"value": 2}


def test_a_store_whose_region_is_lost_gives_the_newest_of_its_history(run_dir: Path) -> None:
    for step in (1, 2):
        with lightck.Store(run_dir, keep=2) as store:  # its close waits for the copy
            store.save({"value": step}, step).result()
    for file in run_dir.glob("region-*.lck"):
        file.unlink()
    store = lightck.Store(run_dir)
    assert store.steps() == [2, 1] and store.load() == {"value": 2}


@pytest.mark.parametrize("name", ["open", "lstat"])
def test_what_cannot_be_read_just_now_costs_no_item(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An error of the medium says nothing of an item's metrics, nor that it is not there."""
    with lightck.Store(run_dir, keep="newest 1 or best loss") as store:
        for step, loss in ((1, 0.1), (2, 0.5)):
            store.save(full(step), step, metrics={"loss": loss}).result()
    assert kept_steps(run_dir) == [1, 2]
    real, failed = getattr(os, name), []

    def failing(path: Any, *more: Any, **others: Any) -> Any:
        if "step-1" in str(path) and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *more, **others)

    monkeypatch.setattr(os, name, failing)
    if name == "open":
        assert "Input/output error" in item.every_item(run_dir)[0].unread
        failed.clear()
    with (
        contextlib.suppress(lightck.LightckError),
        lightck.Store(run_dir, keep="newest 1 or best loss") as store,
    ):
        store.save(full(3), 3, metrics={"loss": 0.7}).result()
    monkeypatch.undo()
    assert failed and 1 in kept_steps(run_dir)


def test_a_metric_that_is_corrected_does_not_come_back(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, policy=1, keep="best loss", placement="direct") as handle:
        for loss in (0.5, 0.1):
            loop.run(1)
            handle.report(loss=loss)
            handle.report(loss=0.5 if loss == 0.5 else 0.9)
            settle(handle)
    with attach(run_dir, loop, policy=1, keep="best loss", placement="direct") as handle:
        loop.run(1)
        settle(handle)
    assert metrics_at(run_dir)[1] == {"loss": 0.5}


def test_what_one_rank_has_not_copied_is_removed_behind_the_next_that_all_have(
    run_dir: Path,
) -> None:
    saved(run_dir, {1: 1.0}, keep=None)
    choice: Any = SimpleNamespace(chooses=True, decide=lambda *_: None, decided=lambda _: None)
    place = location.locate(run_dir, 0, create=False)
    kept = history.History(place, Newest(1), ranks=(0, 1))
    kept.begin(choice=choice)
    for step, ranks in ((2, (0,)), (4, (1,)), (6, (0, 1)), (7, (0,))):
        where = item.make_place(run_dir, step, 0)
        item.describe(where, Kept(step, float(step)), (0, 1))
        for rank in ranks:
            (where.path / f"region-{rank:05d}.lck").touch()
    kept._prune()  # 6 is of an earlier life: the other rank may still copy what is older
    assert [each.kept.step for each in item.every_item(run_dir)] == [2, 4, 6, 7]
    kept._made.add(6)
    kept._prune()
    assert [each.kept.step for each in item.every_item(run_dir)] == [6, 7]
    kept.close(0.0)
