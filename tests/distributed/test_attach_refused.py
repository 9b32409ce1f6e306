"""Anything that one rank cannot do, or says differently, is an error on all; no hang.

The error names it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.errors import CoordinationError
from lightck.state import tensor_layout
from support.distributed import ranks
from support.distributed.missing import never_come
from support.distributed.training import Training

Outcomes = list[Any]


def attached(world: int, attach: Callable[[ranks.Me, Training], Any], **how: Any) -> Outcomes:
    """Return what attach raised on each rank, or 0 where it attached."""

    def train(me: ranks.Me) -> int:
        handle = attach(me, Training(me.rank))
        me.pause()  # nobody leaves before the others have seen what there is to see
        handle.detach()
        return 0

    with ranks.started(world, train, **how) as job:
        job.let_go()
        return job.outcomes()


def all_say(outcomes: Outcomes, pattern: str, *, but: int | None = None) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank != but:
            assert isinstance(outcome, CoordinationError), (rank, outcome)
            assert re.search(pattern, str(outcome)), (rank, str(outcome))


def test_a_rank_with_snapshots_that_it_did_not_restore(region_dir: Path) -> None:
    def before(me: ranks.Me) -> None:
        training = Training(me.rank)
        with training.attach(region_dir):
            training.steps(2)

    with ranks.started(2, before) as job:
        job.results()
    (region_dir / "region-00000.lck").unlink()
    outcomes = attached(2, lambda me, t: t.attach(region_dir))
    assert isinstance(outcomes[1], lightck.UnrestoredError)
    all_say(outcomes, r"no rank can attach: rank 1: UnrestoredError: .*steps \[1, 2\]", but=1)


def test_a_rank_whose_medium_is_full(region_dir: Path) -> None:
    def attach(me: ranks.Me, training: Training) -> Any:
        tensor_layout.MUCH_BYTES = 1 << 60
        if me.rank == 2:
            big = torch.empty(1, dtype=torch.uint8).expand(1 << 50)
            training.module.register_buffer("big", big)
        return training.attach(region_dir)

    outcomes = attached(3, attach)
    assert isinstance(outcomes[2], lightck.RegionFullError)
    all_say(outcomes, r"no rank can attach: rank 2: RegionFullError: .*bytes needed", but=2)


def test_a_rank_with_a_setting_that_is_wrong(region_dir: Path) -> None:
    outcomes = attached(2, lambda me, t: t.attach(region_dir, threads=1 if me.rank else -1))
    assert isinstance(outcomes[0], lightck.ConfigError)
    all_say(outcomes, r"no rank can attach: rank 0: ConfigError: threads = -1", but=0)


@pytest.mark.parametrize(
    ("setting", "values", "says"),
    [
        ("slots", (3, 4), r"differ in slots: 3 on rank\(s\) 0; 4 on rank\(s\) 1; .* same slots="),
        ("policy", (1, 2), r"differ in policy: EverySteps\(n=1\) on rank\(s\) 0"),
        ("run_id", ("a", "b"), r"different runs: 'a' on rank 0, 'b' on rank 1"),
    ],
)
def test_ranks_with_other_settings(
    setting: str, values: tuple[Any, Any], says: str, region_dir: Path
) -> None:
    outcomes = attached(2, lambda me, t: t.attach(region_dir, **{setting: values[me.rank]}))
    all_say(outcomes, says)


def test_ranks_with_other_paths(region_dir: Path) -> None:
    outcomes = attached(2, lambda me, t: t.attach(region_dir / str(me.rank)))
    all_say(outcomes, rf"differ in path: {region_dir}/0 on rank\(s\) 0; {region_dir}/1")


def test_ranks_at_other_steps(region_dir: Path) -> None:
    def attach(me: ranks.Me, training: Training) -> Any:
        lightck.restore(training.module)  # nothing is there; makes the model known
        from lightck.restore import progress

        progress(training.module).step = 5 * me.rank
        return training.attach(region_dir)

    outcomes = attached(2, attach)
    all_say(outcomes, r"differ in step: 0 on rank\(s\) 0; 5 on rank\(s\) 1")


def test_regions_of_two_jobs_in_one_folder(region_dir: Path) -> None:
    for name in "ab":

        def before(me: ranks.Me, name: str = name) -> None:
            Training(me.rank).attach(region_dir / name, run_id=f"run {name}").detach()

        with ranks.started(2, before) as job:
            job.results()
    shutil.copy(region_dir / "b" / "region-00001.lck", region_dir / "a" / "region-00001.lck")
    outcomes = attached(2, lambda me, t: t.attach(region_dir / "a"))
    all_say(outcomes, r"regions belong to different runs: run \w{32} on rank\(s\) \[0\]; run")


def test_a_region_of_another_rank(region_dir: Path) -> None:
    def before(me: ranks.Me) -> None:
        Training(me.rank).attach(region_dir).detach()

    with ranks.started(2, before) as job:
        job.results()
    os.replace(region_dir / "region-00000.lck", region_dir / "region-00001.lck")
    outcomes = attached(2, lambda me, t: t.attach(region_dir))
    all_say(outcomes, r"rank 1: RegionError: .* is the region of rank 0, this is rank 1", but=1)


def test_a_rank_that_never_attaches_is_named(region_dir: Path) -> None:
    def train(me: ranks.Me) -> None:
        if me.rank == 1:
            me.pause()
        else:
            never_come([1])
            Training(wrap=False).attach(region_dir)

    with ranks.started(3, train) as job:
        first, third = job.outcomes([0, 2])
    all_say([first, third], r"rank\(s\) 1 of 3 did not come in \d+\.\d s .*every rank must call it")


def test_a_rank_that_restores_while_others_attach(region_dir: Path) -> None:
    def attach(me: ranks.Me, training: Training) -> Any:
        from lightck.distributed.rendezvous import meeting

        if me.rank == 1:
            with meeting("restore") as others:
                others.agree(lambda rounds: rounds and rounds.agree("restore", {}, dict))
        return training.attach(region_dir)

    outcomes = attached(2, attach)
    all_say(outcomes, "rank 0 is in attach and rank 1 in restore: every rank must call")


def test_after_a_refusal_all_ranks_can_attach(region_dir: Path) -> None:
    def attach(me: ranks.Me, training: Training) -> Any:
        with pytest.raises(lightck.LightckError):
            training.attach(region_dir, slots=3 + me.rank)
        with pytest.raises(lightck.LightckError):
            training.attach(region_dir, threads=me.rank - 1)
        return training.attach(region_dir)

    assert attached(2, attach) == [0, 0]
