"""State of which two ranks wrote a share each comes back with its keys in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightck
from support.distributed import ranks
from support.distributed.training import Training

ORDER = ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("world", [1, 2])
def test_the_keys_of_shared_state_have_the_order_that_the_optimizer_made(
    world: int, region_dir: Path
) -> None:
    def write(me: ranks.Me) -> None:
        training = Training(me.rank)
        with training.attach(region_dir):
            training.steps(2)

    def read(me: ranks.Me) -> list[list[str]]:
        training = Training(me.rank)
        assert lightck.restore(training.model, training.optimizer, region_dir) is not None
        return [[*state] for state in training.optimizer.state.values()]

    with ranks.started(2, write) as job:
        job.results()
    with ranks.started(world, read) as job:
        for states in job.results():
            assert states == [ORDER] * 6
