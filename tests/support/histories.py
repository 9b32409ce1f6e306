"""Runs that keep a history, and what must hold of it whatever happened to the run."""

from __future__ import annotations

import time
from pathlib import Path

import lightck
from lightck import examine
from lightck.history import item
from support import internals
from support.loops import Loop, adam_loop, of_live, of_stored


def kept_steps(run: Path) -> list[int]:
    """Steps whose items are whole, oldest first."""
    return [each.kept.step for each in item.every_item(run) if each.is_whole]


def metrics_at(run: Path) -> dict[int, dict[str, float]]:
    """Metrics of the whole items."""
    return {e.kept.step: dict(e.kept.metrics) for e in item.every_item(run) if e.is_whole}


def settle(handle: lightck.Handle) -> None:
    """Wait until what is committed is kept, or not chosen."""
    kept = internals.checkpointer(handle).outcomes.history
    assert kept is not None
    for _ in range(60_000):
        if not (kept._offers or kept._copying or kept._untold or kept._unkept):
            return
        time.sleep(0.001)
    raise AssertionError("a minute has passed")


def check_items(run: Path, loop: Loop) -> None:
    """Every whole item is sound, and holds what was seen at its step."""
    for step in kept_steps(run):
        folder = item.place(run, step, 0).path
        assert [row["state"] for row in examine.check(folder)] == ["good"]
        if step in loop.seen:
            assert of_stored(folder, step) == loop.seen[step]


def restored_from(folder: Path, step: int | None = None) -> tuple[lightck.RestoreInfo, Loop]:
    """Restore a fresh loop from a folder."""
    loop = adam_loop()
    wanted = "latest" if step is None else step
    info = lightck.restore(loop.model, list(loop.optimizers), folder, step=wanted)
    assert info is not None
    loop.step = info.step
    return info, loop


def state(loop: Loop) -> dict[str, str]:
    """Digests of what is live."""
    return of_live(loop.model, loop.optimizers)
