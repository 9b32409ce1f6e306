"""Simulated cases of when to save: papers' numbers are reproduced, and policies keep their word."""

from __future__ import annotations

import pytest

from bench import simulated
from bench.simulated import CASES


@pytest.mark.parametrize(
    ("x", "young", "time", "progress"),
    [
        (2.34, 0.1065, 0.2253, 0.2180),
        (4.68, 0.2130, 0.4378, 0.2741),
        (7.8, 0.3550, 2.687, 0.3623),
        (10.92, 0.4970, 11.19, 0.5192),
    ],
)
def test_coci_s_formula_as_coded_wastes_more_than_young_s_interval(
    x: float, young: float, time: float, progress: float
) -> None:
    found = simulated.coci_case(x, seeds=1)
    assert found["young_s"] / 60 == pytest.approx(young, rel=0.02)
    assert found["coci_time_s"] / 60 == pytest.approx(time, rel=0.02)
    assert found["coci_progress_s"] / 60 == pytest.approx(progress, rel=0.02)
    assert min(found["coci_ratio"], found["coci_time_ratio"]) > 1


@pytest.mark.parametrize(("x", "most"), [(5.0, 0.90), (11.0, 0.80)])
def test_quality_wastes_less_progress_than_young_s_interval(x: float, most: float) -> None:
    found = simulated.coci_case(x, seeds=2)
    assert found["ratio"] <= most
    assert 1 < found["time_ratio"] < 1.75, "its price"


@pytest.mark.parametrize(
    ("x", "of_one", "of_mean"), [(5.0, 1 - 0.51, 1 - 0.35), (8.0, 1 - 0.59, 1 - 0.44)]
)
def test_workers_that_come_and_go_are_worth_what_the_seed_says(
    x: float, of_one: float, of_mean: float
) -> None:
    found = simulated.workers_case(x, seeds=1)
    assert found["ratio"] == pytest.approx(of_one, rel=0.02)
    assert found["over_mean_ratio"] == pytest.approx(of_mean, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "stall_s", "shares"),
    [
        (1, 5.0, (0.031, 0.100, 0.117)),
        (8, 5.0, (0.088, 0.101, 0.148)),
        (64, 5.0, (0.252, 0.108, 0.242)),
        (1024, 5.0, (1.10, 0.222, 0.758)),
        (16384, 5.0, (5.77, 2.06, 4.17)),
        (1024, 0.05, (0.214, 0.221, 0.273)),
        (4096, 0.05, (0.658, 0.583, 0.685)),
    ],
)
def test_just_in_time_against_periodic_snapshots_over_ranks(
    ranks: int, stall_s: float, shares: tuple[float, float, float]
) -> None:
    found = simulated.jit_case(ranks, stall_s)
    names = ("periodic", "just_in_time", "both")
    assert [100 * found[name] for name in names] == pytest.approx(shares, rel=0.02)


def test_just_in_time_pays_from_about_ten_gpus_or_from_a_thousand() -> None:
    assert 8 < simulated.jit_pays(5.0) <= 12
    assert 1024 < simulated.jit_pays(0.05) < 4096


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("auto")])
def test_auto_wastes_little_more_than_the_best_interval_in_hindsight(case: str) -> None:
    found = CASES[case](1)
    assert found["failures"] > 300
    assert found["ratio"] <= 1.10


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("symptom")])
def test_an_announced_failure_loses_less_and_false_alarms_cost_little(case: str) -> None:
    found = CASES[case](1)
    assert found["ratio"] <= 0.45
    assert found["stall_ratio"] <= 1.1


def test_budget_takes_checkfreq_s_number_of_steps() -> None:
    assert simulated.checkfreq_case(1) == {
        "ratio": 1.0,
        "checkfreq_steps": 13,
        "budget_steps": 13,
    }
