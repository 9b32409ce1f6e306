"""A region whose file is removed or moved while it is written: nobody trains on without knowing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightck
from lightck.region import native_region
from support.loops import adam_loop, attach, restored, steps_at, train


@pytest.mark.parametrize(
    "away",
    [
        lambda path: shutil.rmtree(path),
        lambda path: (path / "region-00000.lck").unlink(),
        lambda path: path.rename(path.with_name("moved")),
        lambda path: (
            shutil.copy(path / "region-00000.lck", path / "copy")
            and os.replace(path / "copy", path / "region-00000.lck")
        ),
    ],
    ids=["folder", "file", "moved", "replaced"],
)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_region_that_is_taken_away_is_an_error_once_and_at_close(
    where: str, away: Callable[[Path], Any], run_dir: Path, disk_dir: Path
) -> None:
    path, loop = run_dir if where == "memory" else disk_dir, adam_loop()
    told: list[BaseException] = []
    handle = attach(path, loop, on_error=told.append)
    loop.run(2)
    handle.wait()
    assert not told
    away(path)
    loop.run(3)
    handle.wait()
    assert [type(error) for error in told] == [lightck.RegionError]
    assert "removed, moved or replaced" in str(told[0]) and str(path) in str(told[0])
    with pytest.raises(lightck.RegionError, match="removed, moved or replaced"):
        handle.close()
    assert len(told) == 1


def test_what_was_moved_is_whole_where_it_is_now(run_dir: Path) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop, on_error=lambda error: None)
    loop.run(2)
    handle.wait()
    moved = run_dir.rename(run_dir.with_name("moved"))
    loop.run(1)
    loop.note()
    with pytest.raises(lightck.RegionError):
        handle.close()
    loop.check(moved, steps_at(moved))
    assert steps_at(moved)[-1] == 3


def test_a_region_that_is_removed_while_it_is_opened_is_not_written(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lightck rm` beside an attach: the file had no owner yet."""
    train(run_dir, adam_loop(), 2)
    _, loop = restored(run_dir)
    real = native_region.NativeRegion.open

    def removed(*arguments: Any) -> Any:
        (run_dir / "region-00000.lck").unlink()
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(native_region.NativeRegion, "open", removed)
        with pytest.raises(lightck.RegionBusyError, match="removed while it was opened"):
            attach(run_dir, loop)
    train(run_dir, loop, 1)
    assert steps_at(run_dir) == [3]
