"""Small states are copied by the training thread at forward start, and no worker is involved."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import lightck
from support import internals
from support.loops import Loop, Overwriter, attach, mlp, steps_at

pytestmark = pytest.mark.at_once


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte is small, whatever this machine measures."""
    monkeypatch.setattr("lightck.pipeline.pipeline.at_once_bytes", lambda pool, size: 1 << 20)


def overwriter_loop(width: int = 64) -> Loop:
    model = mlp(width)
    return Loop(model, Overwriter(model.parameters()), width=width)


@pytest.mark.parametrize("failure", ["off", "jit"])
@pytest.mark.parametrize("where", ["tmpfs", "file"])
def test_everything_is_captured_when_the_forward_begins_and_is_of_the_step(
    run_dir: Path, disk_dir: Path, where: str, failure: str
) -> None:
    path, loop = run_dir if where == "tmpfs" else disk_dir, overwriter_loop()
    with attach(path, loop, policy=1, slots=8, failure=failure) as handle:
        for step in range(1, 5):
            loop.run(1) if step == 1 else loop.update()
            loss = loop.forward()
            assert handle.last_captured_step == step and internals.window(handle) is None
            loss.backward()
            handle.wait()
        stats = handle.stats()
        handle.detach()
    assert stats.copied_at_once and stats.at_once_bytes == 1 << 20
    if where == "tmpfs":  # elsewhere workers that are awake to drain may copy, too
        assert stats.bytes_copied == stats.bytes_helped > 0
    loop.check(path, [1, 2, 3, 4])


def test_a_write_behind_the_forward_s_start_is_of_the_next_step_and_tears_nothing(
    run_dir: Path,
) -> None:
    loop = overwriter_loop()
    with attach(run_dir, loop, policy=1, slots=8) as handle:
        loop.run(2)
        loop.forward().backward()
        with torch.no_grad():
            loop.model[1].weight.add_(1)
        loop.update()
        handle.wait()
        assert handle.stats().torn == 0
        handle.detach()
    loop.check(run_dir, [1, 2])


@pytest.mark.parametrize("failure", ["off", "jit"])
def test_a_tensor_is_copied_from_where_it_is_now(run_dir: Path, failure: str) -> None:
    """Memory that it left stays there, and would be copied were nobody told that it has moved."""
    loop, left = overwriter_loop(), list[torch.Tensor]()
    with attach(run_dir, loop, policy=1, slots=8, failure=failure) as handle:
        for _ in range(4):
            loop.run(1)
            weight = loop.model[0].weight
            left.append(weight.data)
            weight.data = weight.data.clone()
            left[-1].fill_(-1.0)
        loop.forward()
        handle.wait()
        assert handle.stats().torn == 0 and handle.stats().copied_at_once
        handle.detach()
    loop.check(run_dir, [1, 2, 3, 4])


def test_a_state_that_grows_is_measured_again_and_goes_through_the_window(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def limit(pool: object, size: int) -> int:
        measured.append(size)
        return 200_000

    monkeypatch.setattr("lightck.pipeline.pipeline.at_once_bytes", limit)
    loop = overwriter_loop()
    with attach(run_dir, loop, policy=1, slots=8) as handle:
        loop.run(2)
        small = handle.stats()
        loop.optimizers[0].state[loop.model[0].weight]["more"] = torch.zeros(100_000)
        loop.seen.pop(2, None)
        loop.run(2)
        grown = handle.stats()
        handle.wait()
        handle.detach()
    assert (small.copied_at_once, grown.copied_at_once) == (True, False)
    assert measured[-1] > 200_000 > measured[0]
    assert {1, 2, 3} <= set(steps_at(run_dir))


def test_a_named_schedule_is_that_of_a_small_state_too(run_dir: Path) -> None:
    loop = overwriter_loop()
    with attach(run_dir, loop, policy=1, schedule="eager") as handle:
        loop.run(1)
        loop.forward()
        assert internals.window(handle) is not None
        assert (handle.stats().copied_at_once, handle.stats().at_once_bytes) == (False, 0)
        handle.detach()


def test_what_the_loop_changes_while_another_thread_saves_is_found(run_dir: Path) -> None:
    """Just in time, copies at once are compared with the live state as those of workers are."""
    loop, found = overwriter_loop(), list[lightck.Saved]()
    with attach(run_dir, loop, policy=1000, slots=8) as handle:
        loop.run(3)
        loop.forward().backward()
        pipeline, edits = internals.pipeline(handle), [1.0]
        fence = pipeline.fence

        def torn(optimizer: int | None = None) -> bool:
            if edits:
                with torch.no_grad():
                    loop.model[0].weight.add_(edits.pop())
            return fence(optimizer)

        pipeline.fence = torn  # type: ignore[method-assign,assignment]
        saver = threading.Thread(target=lambda: found.append(handle.snapshot_now("test")))
        saver.start()
        saver.join()
        pipeline.fence = fence  # type: ignore[method-assign]
        handle.detach()
    (saved,) = found
    assert not saved.fresh and "model/0.weight" in saved.why
    assert steps_at(run_dir) == []
