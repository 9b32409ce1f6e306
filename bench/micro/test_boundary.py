"""Measure what a due snapshot costs the training thread in a step: everything but large copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lightck
from bench.engines.base import Plan
from bench.engines.lightck import Lightck
from bench.work import Training, Work


@pytest.mark.parametrize("tensors", [64, 448, 4480])
@pytest.mark.parametrize("due", [False, True], ids=["idle", "due"])
def test_step(benchmark: Any, tensors: int, due: bool, folder: Path) -> None:
    training = Training(Work("bag", tensors=tensors))
    training.compute()
    training.update()
    engine, plan = Lightck({}), Plan(set(range(1_000_000)) if due else set())
    engine.attach(training, folder, plan)

    def step() -> None:
        training.compute()
        training.update()

    benchmark.pedantic(step, rounds=30, warmup_rounds=3)
    stats = engine.handle.stats()
    if benchmark.stats is not None:
        steps = engine.handle.step
        each = {cause: round(s / steps * 1e6) for cause, s in stats.stall_s.items()}
        benchmark.extra_info["us per step"] = each
    assert not (stats.torn or stats.failed)
    engine.finish()


def test_snapshot_on_request(benchmark: Any, folder: Path) -> None:
    training = Training(Work("bag", tensors=448))
    training.compute()
    training.update()
    with lightck.attach(
        training.model, training.optimizer, folder / "run", policy=1_000_000
    ) as handle:
        benchmark.pedantic(lambda: handle.snapshot().result(60), rounds=20, warmup_rounds=2)
