"""The loops that people copy, each killed at three random steps and at the last batch of an epoch.

Every resumed run takes up where the killed one before it died; each loss and all of the state are
compared, bit by bit, with a run that was never killed and that lightck had no part in. Only where
lightck seeds a loader's workers for each batch, it does so in that run, too.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from test_data import BATCHES, Sampled

from support.e2e.nanogpt import NanoGPT
from support.e2e.resume import KILLS, Bed, same_end, same_steps
from support.e2e.titan import Titan
from support.e2e.trainer import Job


def check(
    bed: Bed,
    rng: np.random.Generator,
    job: type[Job],
    *,
    epoch: int = BATCHES,
    seeds_workers: bool = False,
    **fields: Any,
) -> None:
    """Kill at three random steps and at the end of the second epoch, in their order; compare."""
    steps = sorted({*rng.choice(np.arange(3, job.steps), 3, replace=False).tolist(), 2 * epoch})
    mode = "attach" if seeds_workers else "plain"
    plain = bed.run(job, mode, folder="none", **fields).check_ended()
    for i, k in enumerate(steps):
        where = str(rng.choice([each for each in KILLS if k != 2 * epoch or each != "after"]))
        print(f"killed in step {k}: {where}")
        mode = "resume" if i else "attach"
        killed = bed.run(job, mode, kill_step=k, kill_where=where, **fields).check_killed()
        killed.name += f" of {steps}"
        same_steps(killed, plain)
    resumed = bed.run(job, "resume", **fields).check_ended()
    assert resumed.value("restored") >= steps[-1] - 2, resumed.log
    same_end(resumed, plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_plain_loop_with_a_resumable_sampler(
    bed: Bed, rng: np.random.Generator, workers: int
) -> None:
    check(bed, rng, Sampled, params={"workers": workers})


@pytest.mark.parametrize("accumulation", [1, 3])
def test_nanogpts_loop_with_its_batches_prefetched(
    bed: Bed, rng: np.random.Generator, accumulation: int
) -> None:
    check(bed, rng, NanoGPT, params={"accumulation": accumulation})


def test_torchtitans_loop_with_what_it_counts_at_the_steps_end(
    bed: Bed, rng: np.random.Generator
) -> None:
    check(bed, rng, Titan)


ACCELERATE = [
    {"where": "skip", "workers": 0},
    {"where": "skip", "workers": 2},
    {"where": "stateful", "workers": 0},
    {"where": "sampler", "workers": 0},
    {"where": "sampler", "workers": 2},
    {"where": "sampler", "workers": 0, "accumulate": 2},
]


@pytest.mark.parametrize(
    "params", ACCELERATE, ids=lambda each: "-".join(f"{v}" for v in each.values())
)
def test_accelerates_loop(bed: Bed, rng: np.random.Generator, params: dict[str, Any]) -> None:
    pytest.importorskip("accelerate", reason="SKIPPED: accelerate is not installed")
    job = importlib.import_module("support.e2e.accelerated").Accelerated
    # The last batch of an epoch ends a step there, too.
    epoch = -(-BATCHES // params.get("accumulate", 1))
    seeds_workers = params["where"] == "skip" and params["workers"] > 0
    check(bed, rng, job, epoch=epoch, seeds_workers=seeds_workers, params=params)
