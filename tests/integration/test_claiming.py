"""Several processes, or one at several times, claim one path: exactly one of them gets it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.region import location, native_region
from support import processes
from support.loops import adam_loop, attach, train


def test_a_region_being_made_is_taken_for_no_leftover(run_dir: Path) -> None:
    create = native_region.NativeRegion.create
    loop = adam_loop()

    def job(parent: processes.Parent) -> None:
        def late(*arguments: Any) -> Any:
            parent.send("draft made")
            parent.pause()  # before the native library locks it
            return create(*arguments)

        native_region.NativeRegion.create = late  # type: ignore[method-assign]
        train(run_dir, loop, 2)
        parent.send(loop.seen)

    child = processes.start(job)
    assert child.receive() == "draft made"
    with pytest.raises(lightck.RegionBusyError, match="being made"):
        attach(run_dir, adam_loop())
    child.let_go()
    loop.seen = child.receive()
    child.receive()
    assert child.join() == 0
    loop.check(run_dir, [1, 2])
    assert os.listdir(run_dir) == ["region-00000.lck"]
    with pytest.raises(lightck.UnrestoredError):
        attach(run_dir, adam_loop())


def test_a_maker_whose_draft_was_discarded_is_told_that_the_path_is_busy(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner, own = adam_loop(), location._own

    def overtaken(fd: int) -> bool:
        monkeypatch.undo()
        winner.seen = processes.run(lambda: (train(run_dir, winner, 2), winner.seen)[1])
        return own(fd)

    monkeypatch.setattr(location, "_own", overtaken)
    with pytest.raises(lightck.RegionBusyError):
        attach(run_dir, adam_loop())
    winner.check(run_dir, [1, 2])
    assert os.listdir(run_dir) == ["region-00000.lck"]


def test_a_region_made_by_another_since_one_looked_is_not_replaced(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = native_region.NativeRegion.create

    def overtaken(*arguments: Any) -> Any:
        (run_dir / "region-00000.lck").write_bytes(b"another's")
        return create(*arguments)

    monkeypatch.setattr(native_region.NativeRegion, "create", overtaken)
    with pytest.raises(lightck.RegionBusyError, match="by another process"):
        attach(run_dir, adam_loop())
    assert os.listdir(run_dir) == ["region-00000.lck"]
    assert (run_dir / "region-00000.lck").read_bytes() == b"another's"


def test_the_draft_of_a_process_that_died_is_in_nobodys_way(run_dir: Path) -> None:
    def job() -> None:
        native_region.NativeRegion.create = lambda *arguments: os._exit(0)  # type: ignore[method-assign]
        attach(run_dir, adam_loop())

    with pytest.raises(AssertionError, match="without a word"):
        processes.run(job)
    assert os.listdir(run_dir) == ["region-00000.new"]
    loop = adam_loop()
    train(run_dir, loop, 2)
    loop.check(run_dir, [1, 2])
    assert os.listdir(run_dir) == ["region-00000.lck"]


def test_state_that_grows_all_the_time_does_not_run_out_of_segments(run_dir: Path) -> None:
    loop, extra = adam_loop(), {"t": [torch.zeros(1 << 13)]}
    with attach(run_dir, loop, extras={"extra": extra}) as handle:
        for k in range(1, 50):
            extra["t"] += [torch.full((1 << 13,), float(k)) for _ in range(1 + k)]
            loop.run(1)
            handle.wait()
        assert handle.stats().failed == 0
    assert len(lightck.load(run_dir)["extras"]["extra"]["t"]) == len(extra["t"])
