"""`handle.replaced(step)` on several ranks: ahead together, and never back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from test_fates_of_steps import step

import lightck
from support.distributed import ranks
from support.distributed.training import Training


def peer() -> list[dict[str, Any]]:
    """A state that every rank is given alike."""
    other = Training(0, wrap=False)
    other.steps(2)
    return copy.deepcopy([other.module.state_dict(), other.optimizer.state_dict()])


def load(training: Training, state: list[dict[str, Any]]) -> None:
    training.module.load_state_dict(state[0])
    training.optimizer.load_state_dict(copy.deepcopy(state[1]))


def restored(rank: int, path: Path) -> Any:
    again = Training(rank)
    info = lightck.restore(again.model, again.optimizer, path)
    parameters = [p.detach().double().sum().item() for p in again.module.parameters()]
    return info and (info.step, info.early), parameters


@pytest.mark.parametrize("inside", [False, True])
def test_ranks_go_ahead_together(region_dir: Path, inside: bool) -> None:
    def train(me: ranks.Me) -> Any:
        state, training = peer(), Training(me.rank)
        with training.attach(region_dir) as handle:
            for _ in range(3):
                step(training, handle)
            if inside:
                training.model(training.batch()).square().mean().backward()
            load(training, state)
            handle.replaced(40)
            if inside:
                training.optimizer.step()
            for _ in range(3):
                step(training, handle)
            last = handle.step
        assert handle.stats().torn == 0
        live = [p.detach().double().sum().item() for p in training.module.parameters()]
        assert restored(me.rank, region_dir) == ((last, False), live)
        return last, handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [(43 + inside,) * 2] * 2


def test_ranks_that_would_go_back_are_told_what_to_do(region_dir: Path) -> None:
    def train(me: ranks.Me) -> Any:
        state, training = peer(), Training(me.rank)
        with training.attach(region_dir) as handle:
            for _ in range(3):
                step(training, handle)
            load(training, state)
            with pytest.raises(lightck.LightckError, match=r"at step 3, and can only go ahead"):
                handle.replaced(1)
            saved = handle.snapshot_now("for the test")
            assert not saved.fresh, "of step 3, with another's weights"
            for _ in range(2):
                step(training, handle)
        return handle.step, handle.last_committed_step

    with ranks.started(2, train) as job:
        assert job.results() == [(5, 5)] * 2
