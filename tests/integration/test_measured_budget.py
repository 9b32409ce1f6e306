"""A real handle's measurements tell whether a snapshot fits into the grace period."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import lightck
from lightck.failure.budget import shortfall
from lightck.types import Failure
from support import internals
from support.loops import adam_loop

NEVER = 10**6


def attach(path: Path, grace_s: float, **settings: object) -> tuple[lightck.Handle, object]:
    loop = adam_loop()
    failure = Failure(grace_s=grace_s, signals=())
    return lightck.attach(
        loop.model, list(loop.optimizers), path, failure=failure, **settings
    ), loop


def test_before_the_first_snapshot_the_limit_that_the_user_set_counts(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lightck"):
        handle, loop = attach(run_dir, 1.0, policy=NEVER, write_limit=4096)
        assert internals.guard(handle) is not None
        assert internals.guard(handle).saver.snapshot_cost(1e9) is None, (
            "not even the size is known"
        )
        loop.run(2)  # type: ignore[attr-defined]
        measured = internals.guard(handle).saver.snapshot_cost(1e9)
        assert measured is not None
        assert measured.state_bytes > 4096 and measured.medium_rate == 4096
        assert measured.needed_s > 1
        text = shortfall(measured, 1.0)
        assert text is not None and "grace_s = 1" in text and "a policy of" in text
        handle.detach()


def test_after_a_snapshot_its_own_rates_count(run_dir: Path) -> None:
    handle, loop = attach(run_dir, 30.0, policy=1)
    loop.run(4)  # type: ignore[attr-defined]
    handle.wait()
    assert internals.guard(handle) is not None
    measured = internals.guard(handle).saver.snapshot_cost(1e9)
    assert measured is not None and shortfall(measured, 30.0) is None
    stats = handle.stats()
    assert measured.copy_rate == pytest.approx(
        stats.copy_rate * internals.pipeline(handle).pool.threads, rel=0.5
    )
    assert measured.commit_s == pytest.approx(stats.commit_s)
    assert measured.step_s is not None
    handle.close()
