"""A loss that is no number replaces no good state; a best metric saves the state as evaluated."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.policy import Auto, Budget, EverySteps, Hybrid, OnBest, Quality
from lightck.types import Moment, Policy
from support.loops import Loop, adam_loop, of_live, of_stored, steps_at

ALWAYS = Budget(1.0)
"""A policy that would take every snapshot it can, and minds the loss."""


def _attach(path: Path, loop: Loop, policy: Policy, **more: Any) -> lightck.Handle:
    return lightck.attach(loop.model, list(loop.optimizers), path, policy=policy, **more)


def _spoil(loop: Loop) -> None:
    """Make a step whose loss is no number."""
    (loop.forward() * math.nan).backward()  # type: ignore[no-untyped-call]
    loop.update()


@pytest.mark.parametrize(
    "policy",
    [ALWAYS, Auto(budget=1.0, most_s=1e-9, watch=False), Quality(most_s=1e-9, watch=False),
     Hybrid(mtbf_s=1e-9), ALWAYS | OnBest("accuracy")],
    ids=str,
)  # fmt: skip
def test_a_loss_that_is_no_number_leaves_the_good_slots(
    run_dir: Path, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    loop = adam_loop()
    handle = _attach(run_dir, loop, policy)
    for _ in range(6):
        loop.run(1)
        handle.wait()
    _spoil(loop)  # its forward still takes the good state that was due before
    handle.wait()
    good = steps_at(run_dir)
    assert good and max(good) <= 6
    for _ in range(20):
        _spoil(loop)
        handle.wait()
    assert steps_at(run_dir) == good
    assert [r.getMessage() for r in caplog.records if "loss_not_finite" in r.getMessage()]
    handle.detach()
    again = adam_loop()
    info = lightck.restore(again.model, list(again.optimizers), run_dir)
    assert info is not None and info.step == max(good)
    assert of_live(again.model, again.optimizers) == loop.seen[info.step]
    assert all(math.isfinite(p.sum().item()) for p in again.model.parameters())


def test_a_gradient_scaler_s_overflow_is_over_with_the_next_number(run_dir: Path) -> None:
    loop = adam_loop()
    with _attach(run_dir, loop, ALWAYS) as handle:
        loop.run(3)
        handle.wait()
        before = handle.stats().captured
        (loop.forward() * math.inf).backward()  # type: ignore[no-untyped-call]
        loop.model.zero_grad()  # as a scaler does, which leaves the update out
        loop.run(40)
        handle.wait()
        assert handle.stats().captured > before


def test_a_policy_by_steps_does_what_it_says(run_dir: Path) -> None:
    loop = adam_loop()
    with _attach(run_dir, loop, EverySteps(1)) as handle:
        loop.run(2)
        _spoil(loop)
        loop.note()
        handle.wait(3)
    assert 3 in steps_at(run_dir)


def test_a_reported_loss_that_is_no_number_holds_as_well(run_dir: Path) -> None:
    loop = adam_loop()
    handle = _attach(run_dir, loop, ALWAYS)
    for _ in range(3):
        loop.run(1)
        handle.report(loss=1.0)
        handle.wait()
    handle.report(loss=math.nan)
    loop.run(1)  # the loss of this step was said to be none: it is not due
    handle.wait()
    good = steps_at(run_dir)
    for _ in range(10):
        handle.report(loss=math.nan)
        loop.run(1)
        handle.wait()
    assert steps_at(run_dir) == good
    handle.detach()


# ---- metrics -------------------------------------------------------------------------------------


def test_a_best_metric_saves_exactly_the_evaluated_state(run_dir: Path) -> None:
    loop, evaluated = adam_loop(), {}
    with _attach(run_dir, loop, OnBest("loss") | EverySteps(1000), slots=4) as handle:
        for step, loss in enumerate([0.9, 0.5, 0.7, math.nan, 0.4, 0.4], 1):
            loop.run(1)
            evaluated[step] = of_live(loop.model, loop.optimizers)
            handle.report(loss=loss)
            handle.report(other=1.0)
            loop.run(1)
            handle.wait()
            loop.run(1)
        assert steps_at(run_dir) == [1, 4, 13]
    for step, index in ((1, 1), (4, 2), (13, 5)):
        assert of_stored(run_dir, step) == evaluated[index]


def test_best_values_are_known_to_the_next_life(run_dir: Path) -> None:
    loop = adam_loop()
    policy = OnBest("acc", "max")
    with _attach(run_dir, loop, policy) as handle:
        loop.run(1)
        handle.report(acc=0.8)
        loop.run(3)
    again = adam_loop()
    info = lightck.restore(again.model, list(again.optimizers), run_dir)
    assert info is not None
    with _attach(run_dir, again, policy) as handle:
        again.run(1)
        handle.report(acc=0.7)
        again.run(2)
        assert handle.stats().captured == 0
        handle.report(acc=0.9)
        again.run(2)
        assert handle.stats().captured == 1


def test_what_is_reported_inside_an_iteration_saves_the_next_step(run_dir: Path) -> None:
    loop = adam_loop()
    with _attach(run_dir, loop, OnBest("loss"), failure="off") as handle:
        loop.run(2)
        loss = loop.forward()
        handle.report(loss=0.5)
        loss.backward()  # type: ignore[no-untyped-call]
        loop.update()
        loop.run(2)
        handle.wait()
        assert steps_at(run_dir) == [3]


def test_a_report_at_a_step_that_has_its_snapshot_takes_no_second_one(run_dir: Path) -> None:
    loop = adam_loop()
    with _attach(run_dir, loop, OnBest("loss") | EverySteps(1)) as handle:
        for loss in (0.9, 0.8, 0.7):
            loop.run(1)
            handle.report(loss=loss)
            handle.wait()
        loop.run(1)
        assert handle.stats().captured == 3


def test_a_policy_of_the_user_s_own_sees_metrics_and_loss(run_dir: Path) -> None:
    seen: list[Moment] = []

    class Mine:
        needs = frozenset({"loss", "hazard"})

        def due(self, moment: Moment) -> bool:
            seen.append(moment)
            return not moment.finite

    loop = adam_loop()
    with _attach(run_dir, loop, Mine()) as handle:
        loop.run(2)
        handle.report(acc=0.5)
        loop.run(1)
        _spoil(loop)
        loop.run(0)
    assert [moment.step for moment in seen] == [1, 2, 3, 4]
    assert [dict(moment.metrics) for moment in seen] == [{}, {}, {"acc": 0.5}, {"acc": 0.5}]
    assert [dict(moment.extremes) for moment in seen][2:] == [{}, {"acc": (0.5, 0.5)}]
    assert [moment.finite for moment in seen] == [True, True, True, False]
    assert all(moment.hazard is not None and moment.world == 1 for moment in seen)


def test_what_is_seen_is_logged_at_no_step(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightck")
    loop = adam_loop()
    torch.manual_seed(0)
    with _attach(run_dir, loop, "auto"):  # type: ignore[arg-type]
        loop.run(50)
    told = [r.getMessage().split()[1] for r in caplog.records if r.levelno >= logging.INFO]
    assert sorted(set(told) - {"attached", "closed", "summary", "policy", "symptom"}) == []
