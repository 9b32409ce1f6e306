"""The ranks of a job may go on with live models that were restored, wrapped or not."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightck
from support.distributed import ranks
from support.distributed.training import Training


def test_a_model_that_is_wrapped_after_the_restore_goes_on_and_a_new_one_does_not(
    region_dir: Path,
) -> None:
    """Restored bare, trained inside of DistributedDataParallel; then made anew, as by a cell."""

    def first(me: ranks.Me) -> int:
        training = Training(me.rank)
        with training.attach(region_dir) as handle:
            training.steps(2, handle.wait)
        return handle.step

    def second(me: ranks.Me) -> tuple[int, str]:
        training = Training(me.rank)
        assert lightck.restore(training.module, training.optimizer, region_dir) is not None
        with training.attach(region_dir) as handle:
            training.steps(2, handle.wait)
        with pytest.raises(lightck.LightckError) as caught:
            Training(me.rank).attach(region_dir)
        return handle.step, str(caught.value)

    with ranks.started(2, first) as job:
        assert job.results() == [2, 2]
    with ranks.started(2, second) as job:
        results = job.results()
    for step, text in results:
        assert step == 4
        assert "neither restored into this model nor recorded from it" in text
