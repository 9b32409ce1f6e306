"""Closing and failing to attach: everything is undone, and what is told is what happened."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lightck
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.hooks import Hooks
from lightck.loop.requests import Requests
from lightck.pipeline.pipeline import Pipeline
from lightck.region.native_pool import NativePool
from lightck.region.native_region import NativeRegion
from lightck.state import tensor_layout
from support import faults, internals
from support.loops import Loop, adam_loop, attach, steps_at


class Broken(Exception):
    """A broken part raises this."""


def broken(owner: type | ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a method do its work and then raise `Broken`, with its own name."""
    original: Callable[..., Any] = getattr(owner, name)

    def work_and_raise(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise Broken(f"{owner.__name__}.{name}")

    monkeypatch.setattr(owner, name, work_and_raise)


def undone(path: Path, loop: Loop, before: tuple[int, set[threading.Thread]]) -> None:
    """No hook, worker or lock of a handle on `path` is left."""
    loop.run(1)
    native, python = threads()
    assert python <= before[1]
    assert native == before[0]
    with attach(path, loop, overwrite=True):  # nobody owns the region
        loop.run(1)


def threads() -> tuple[int, set[threading.Thread]]:
    """Return the number of this process's threads, and those of Python: other tests leave some."""
    return len(list(Path("/proc/self/task").iterdir())), {*threading.enumerate()}


@pytest.fixture(autouse=True)
def others(region_dir: Path) -> None:
    """Let torch, and pyarrow at the first handle, start the threads that they keep."""
    loop = adam_loop()
    with attach(region_dir / "first", loop):
        loop.run(1)


@pytest.mark.parametrize(
    "parts",
    [
        [(Hooks, "remove")],
        [(Pipeline, "close")],
        [(NativePool, "close")],
        [(NativeRegion, "close")],
        [(Requests, "finish_last_step"), (Hooks, "remove"), (NativeRegion, "close")],
    ],
)
def test_whatever_a_part_of_closing_raises_the_others_are_closed_and_the_first_error_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, parts: list[tuple[type | ModuleType, str]]
) -> None:
    loop, before = adam_loop(), threads()
    with monkeypatch.context() as patch:
        for owner, name in parts:
            broken(owner, name, patch)
        owner, name = parts[0]
        handle = attach(run_dir, loop, policy=1000)
        loop.run(2)
        loop.forward().backward()
        future = handle.snapshot()  # waits for a boundary
        with pytest.raises(Broken, match=f"{owner.__name__}.{name}"):
            handle.close()
    assert future.done()
    handle.close()
    assert handle.step == 2
    loop.model.zero_grad()
    loop.note()
    with attach(run_dir, loop) as again:
        assert again.step == 2
    undone(run_dir, loop, before)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Checkpointer, "start"),
        (Checkpointer, "check_state"),
        (NativeRegion, "branch"),
        (Hooks, "install"),
        (Hooks, "_install_gradients"),
    ],
)
def test_an_attach_that_fails_leaves_nothing_behind(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    loop, before = adam_loop(), threads()
    with monkeypatch.context() as patch:
        broken(owner, name, patch)
        with pytest.raises(Broken):
            attach(run_dir, loop)
    undone(run_dir, loop, before)


def test_a_warning_that_is_an_error_makes_attach_fail_before_anything_is_made(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, before = adam_loop(), threads()
    loop.model.register_buffer("statistics", torch.zeros(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monkeypatch.context() as patched:
            patched.setattr(tensor_layout, "MUCH_BYTES", 1)
            with pytest.raises(UserWarning, match="copies 0 MiB at the start of a forward"):
                attach(run_dir, loop)
    assert not run_dir.exists()
    undone(run_dir, loop, before)


def test_the_warning_about_synchronous_copies_points_at_the_call_of_attach(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_layout, "MUCH_BYTES", 1)
    loop = adam_loop()
    loop.model.register_buffer("statistics", torch.zeros(8))
    with pytest.warns(UserWarning, match="at the start of a forward") as caught:
        lightck.attach(loop.model, path=run_dir).close()
    assert caught[0].filename == __file__


def test_a_close_that_outlasts_its_time_says_so_and_counts_the_commit(
    disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = adam_loop()
    handle = attach(disk_dir, loop, close_timeout_s=0.05)
    loop.run(2)
    handle.wait()
    told = logging.Handler(logging.WARNING)
    told.emit = lambda record: faults.release(faults.SYNC)  # type: ignore[method-assign]
    logging.getLogger("lightck").addHandler(told)
    faults.hold(faults.SYNC)
    handle.close()
    logging.getLogger("lightck").removeHandler(told)
    assert handle.last_committed_step == 2
    assert handle.stats().committed == 2
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "steps=[2]" in warned[0].getMessage()
    loop.note()
    loop.check(disk_dir, [1, 2])
    attach(disk_dir, loop).detach()  # the path is known to hold this process's own state


def test_a_close_that_outlasts_its_time_raises_when_the_commit_fails(disk_dir: Path) -> None:
    loop = adam_loop()
    handle = attach(disk_dir, loop, close_timeout_s=0)
    loop.run(2)
    handle.wait()
    faults.arm(faults.RECORD)
    with (
        faults.delayed(faults.SYNC, 0.2),
        pytest.warns(RuntimeWarning, match="Input/output error"),
        pytest.raises(lightck.RegionIOError),
    ):
        handle.close()
    assert handle.last_committed_step == 1


def test_a_commit_that_comes_while_closing_goes_wrong_counts(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    broken(Requests, "finish_last_step", monkeypatch)
    handle = attach(disk_dir, loop, policy=1000)
    loop.run(2)
    with faults.delayed(faults.SYNC, 0.2), pytest.raises(Broken):
        handle.close()
    assert handle.last_committed_step == 2
    attach(disk_dir, loop).detach()


def test_futures_end_even_when_the_pipeline_cannot_be_closed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop, policy=1000)
    loop.run(1)
    loop.forward().backward()
    future = handle.snapshot()
    original = Pipeline.close
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "close", lambda pipeline: [][0])
        with pytest.raises(IndexError):
            handle.detach()
    with pytest.raises(lightck.LightckError, match="closed"):
        future.result(timeout=100)
    original(internals.pipeline(handle))
    handle.region.close()
    assert steps_at(run_dir) == []
