"""The published formulas give the numbers that their sources, or the survey of them, have."""

from __future__ import annotations

import itertools
import math

import pytest

from lightck.policy import formulas
from lightck.policy.formulas import Waste


def test_young() -> None:
    assert formulas.young(0.05, 43_200) == pytest.approx(65.727, abs=5e-4)
    assert formulas.young(0.05, 43_200 / 0.3) == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("mtbf", "digits", "published"),
    [(1440, 116.690, 117), (360, 56.713, 57), (15, 9.141, 9.1)],
)
def test_daly_agrees_with_the_published_intervals(
    mtbf: float, digits: float, published: float
) -> None:
    assert formulas.daly(5, mtbf) == pytest.approx(digits, abs=5e-4)
    assert formulas.daly(5, mtbf) == pytest.approx(published, rel=0.006)


def test_daly_saves_once_per_failure_when_a_save_takes_twice_as_long() -> None:
    assert formulas.daly(20, 10) == formulas.daly(21, 10) == 10


def test_availability() -> None:
    assert formulas.availability(10, 6000, 600) == pytest.approx(373.456, abs=5e-4)


def test_checkfreq() -> None:
    at = {"step": 0.2, "update": 0.02, "copy": 0.5, "write": 2.0, "budget": 0.05}
    assert formulas.checkfreq(**at, gpu_copy=0.05) == 13
    # Without room on the device the stall is 0.32 s: k = 2.18 / 0.2, and 0.32 / (0.05 * 0.2).
    assert formulas.checkfreq(**at) == 32
    assert formulas.checkfreq(**at, gpu_copy=0.4) == 32
    assert formulas.checkfreq(step=1, update=0, copy=0.1, write=0.1, budget=0.05) == 1


def test_coci_as_its_authors_coded_it() -> None:
    # The numbers of models/ResNet/ResNet101_CIFAR10.py, in minutes.
    plan = formulas.coci(-0.078, 0.787, 0.0015, 0.0042)
    assert plan.quantum == pytest.approx(0.01467771, abs=5e-9)
    assert plan.level == pytest.approx(2.196796, abs=5e-7)
    assert len(plan.slots) == 149
    assert plan.slots[:3] == pytest.approx((0.085947, 0.172473, 0.259588), abs=5e-7)
    assert plan.slots[-1] == pytest.approx(69.36725, abs=5e-6)
    assert formulas.young(0.0015, 1 / 0.0042) == pytest.approx(0.845154, abs=5e-7)


def test_coci_plans_the_rest_when_some_saves_are_done() -> None:
    whole = formulas.coci(-0.078, 0.787, 0.0015, 0.0042)
    rest = formulas.coci(-0.078, 0.787, 0.0015, 0.0042, now=whole.slots[9], done=10)
    assert len(rest.slots) == 149 - 10
    assert rest.slots[0] > whole.slots[9]


@pytest.mark.parametrize(
    ("minutes", "in_time", "in_loss"),
    [(30, 0.2253, 0.2180), (60, 0.4378, 0.2741), (100, 2.687, 0.3623), (140, 11.19, 0.5192)],
)
def test_coci_wastes_more_than_young_in_time_and_in_loss(
    minutes: float, in_time: float, in_loss: float
) -> None:
    slope, stall, rate = -0.078, 0.0015, 0.0042
    plan = formulas.coci(slope, 0.787, stall, rate)
    ends = [each for each in plan.slots if each < minutes]
    gaps = list(itertools.pairwise([0.0, *ends, minutes]))
    young = formulas.young(stall, 1 / rate)
    least = minutes * (stall / young + rate * young / 2)

    # A failure is as likely at any time, and loses what was done since the last save.
    lost = sum((b - a) ** 2 / 2 for a, b in gaps)
    found = stall * len(ends) + rate * lost
    assert found == pytest.approx(in_time, rel=0.01)
    assert found > least

    def loss(at: float) -> float:
        return math.exp(slope * at)

    # Minutes are worth what the loss falls in them, against the mean.
    mean = (1 - loss(minutes)) / minutes
    fallen = sum(loss(a) * (b - a) + (loss(b) - loss(a)) / -slope for a, b in gaps)
    found = stall * len(ends) + rate * fallen / mean
    assert found == pytest.approx(in_loss, rel=0.01)
    assert found > least


def test_pccheck() -> None:
    assert formulas.pccheck(write=10, concurrent=2, slowdown=0.05, step=1) == pytest.approx(100)


def _waste(ranks: int, stall_s: float) -> Waste:
    return Waste(
        mtbf_s=8000 * 86_400 / 6.5 / ranks,  # 6.5 failures in 8,000 days of a GPU
        stall_s=stall_s,
        restore_s=120,
        detect_s=4,
        jit_s=2,
        jit_restore_s=120,
        step_s=1,
        armed=0.001,
        unrecoverable=0.3,
    )


@pytest.mark.parametrize(
    ("ranks", "stall_s", "periodic", "jit", "hybrid"),
    [
        (1, 5, 0.031, 0.100, 0.117),
        (8, 5, 0.088, 0.101, 0.148),
        (64, 5, 0.252, 0.108, 0.242),
        (1_024, 5, 1.10, 0.222, 0.758),
        (16_384, 5, 5.77, 2.06, 4.17),
        (1_024, 0.05, 0.214, 0.221, 0.273),
        (4_096, 0.05, 0.658, 0.583, 0.685),
    ],
)
def test_just_in_time_against_periodic_over_the_number_of_ranks(
    ranks: int, stall_s: float, periodic: float, jit: float, hybrid: float
) -> None:
    waste = _waste(ranks, stall_s)
    found = [100 * each for each in (waste.periodic(), waste.jit(), waste.hybrid())]
    assert found == pytest.approx([periodic, jit, hybrid], rel=0.02)
