"""Fixtures of the tests that run whole training loops in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import faults, processes
from support.loops import Digests, Loop, adam_loop, train


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    """Faults and delays end with the test that set them."""
    yield
    faults.clear()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same draws in every run: what is tested does not depend on them."""
    torch.manual_seed(int(os.environ.get("LIGHTCK_TEST_SEED") or 5))


@pytest.fixture
def run_dir(region_dir: Path) -> Path:
    """A path for a run on tmpfs, where copies go straight to the region; not made yet."""
    return region_dir / "run"


@pytest.fixture
def elsewhere(run_dir: Path) -> tuple[Path, Loop]:
    """A run that another process made: snapshots of steps 2 and 3, and what they hold."""
    loop = adam_loop()

    def job() -> tuple[dict[int, Digests], int]:
        train(run_dir, loop, 3)
        return loop.seen, loop.step

    loop.seen, loop.step = processes.run(job)
    return run_dir, loop
