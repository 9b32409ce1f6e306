"""A run that keeps a history is killed: items are complete or absent, and the best one is kept."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightck
from lightck import examine
from lightck.history import item
from support import processes
from support.histories import check_items, kept_steps, restored_from, settle, state
from support.loops import Loop, adam_loop, attach

EVERY = 3
"""Steps from one evaluation to the next."""


def loss(step: int) -> float:
    """The validation loss of a step, the same in every life."""
    return (step * 7919) % 101 / 101


def life(path: Path, until: int, tell: Callable[[int], object]) -> Loop:
    """Restore, and train on with an evaluation every few steps; what was seen is returned."""
    loop = adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), path)
    loop.step = info.step if info else 0
    with attach(path, loop, policy=2, keep="newest 2 or best loss") as handle:
        while loop.step < until:
            loop.run(1)
            tell(loop.step)
            if loop.step % EVERY == 0:
                handle.report(loss=loss(loop.step))
        loop.note()
    return loop


def golden(until: int) -> dict[int, Any]:
    """Return what a run that nothing interrupts has at each step."""

    def job() -> dict[int, Any]:
        loop = adam_loop()
        loop.run(until)
        loop.note()
        return loop.seen

    seen: dict[int, Any] = processes.run(job)
    return seen


@pytest.mark.parametrize("where", ["region_dir", "disk_dir"])
def test_killed_at_any_time_items_are_whole_or_absent_and_the_best_is_kept(
    where: str, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    folder: Path = request.getfixturevalue(where)
    path, until = folder / "run" if where == "region_dir" else folder, 60
    loop = adam_loop()
    loop.seen = golden(until)
    for _ in range(12):
        child = processes.start(lambda parent: life(path, until, parent.send).step)
        for _ in range(int(rng.integers(1, 14))):
            if child.receive() == until:
                break
        time.sleep(float(rng.uniform(0, 0.02)))
        child.kill()
        child.join()
        check_items(path, loop)
        for each in lightck.snapshots(path)["step"].to_pylist() if path.exists() else ():
            assert each is None or each <= until
    processes.run(lambda: life(path, until, lambda step: None).step)
    check_items(path, loop)
    best = min(range(EVERY, until + 1, EVERY), key=loss)
    assert best in kept_steps(path), (best, kept_steps(path))
    assert not [each for each in item.every_item(path) if not each.is_whole]
    info, again = restored_from(path, step=best)
    assert info.step == best and state(again) == loop.seen[best]


CALLS = ("rename", "replace", "link", "unlink", "fsync", "mkdir", "write", "sendfile", "ftruncate",
         "rmdir")  # fmt: skip
"""The calls that change what is on the medium."""


CUTS = 4
"""One of so many calls in a row is cut; the seed says which."""


def _cut(at: int) -> None:
    """End this process, as a kill does, before the `at`-th call that the history makes."""
    calls = itertools.count(1)

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if threading.current_thread().name in ("lightck-history", "lightck-report"):
                if next(calls) == at:
                    os._exit(9)
            return real(*given, **named)

        return call

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def _short(path: Path) -> None:
    loop = adam_loop()
    lightck.restore(loop.model, list(loop.optimizers), path)
    with attach(path, loop, policy=1, keep="newest 1 or best loss") as handle:
        for step in range(1, 4):
            loop.run(1)
            if step == 1:
                handle.report(loss=0.5)
            handle.wait()
            settle(handle)


def test_a_kill_before_any_call_leaves_items_whole_or_absent(
    region_dir: Path, rng: np.random.Generator
) -> None:
    ended = 0
    for at in itertools.count(int(rng.integers(1, CUTS + 1)), CUTS):
        path = region_dir / f"run-{at}"

        def job(parent: processes.Parent, at: int = at, path: Path = path) -> None:
            _cut(at)
            _short(path)

        status = processes.start(job).join()
        for step in kept_steps(path):
            found = examine.check(item.place(path, step, 0).path)
            assert [row["state"] for row in found] == ["good"], (at, step)
        if status == 0:
            break
        assert status == 9, at
        ended += 1
        _short(path)  # the next life
        left = [each.folder.name for each in item.every_item(path) if not each.is_whole]
        names = {each.name for each in (path / "history").iterdir()}
        assert not left and all(n.startswith("step-") or n == "left" for n in names), (at, names)
    assert ended > 5
