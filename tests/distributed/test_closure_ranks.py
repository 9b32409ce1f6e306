"""Ranks whose iterations run inside of `optimizer.step(closure)`: one is killed there, or fails.

No snapshot is ever due, and the job goes on golden from the last complete step, as in
`test_peer_death.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer would load on first use, in every rank by itself
from test_just_in_time import AT as FAILS_AT
from test_just_in_time import Broken, armed, check, resumed
from test_peer_death import BEFORE, Mortal, last_complete_step_is_everywhere

from support.distributed import ranks
from support.distributed.resumed import begin
from support.distributed.training import Training


class Closed(Mortal):
    """The same training, but for where its iterations run: zero_grad follows the forward."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.optimizer._optimizer_step_pre_hooks.clear()  # somebody's: all would be mixed

    def closure(self) -> torch.Tensor:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.gathered()
        return loss

    def iterate(self) -> float:
        self.iteration += 1
        loss = self.optimizer.step(self.closure)
        self._die_in("step end")
        self.pending()
        self._die_in("loop")
        return loss.item()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("world", "dead", "phase"),
    [
        *((2, 1, phase) for phase in (*BEFORE, "half", "updated", "step end")),
        *(pytest.param(3, 0, phase, marks=pytest.mark.soak) for phase in (*BEFORE, "half")),
    ],
)
def test_the_last_complete_step_is_there_on_every_rank(
    region_dir: Path, world: int, dead: int, phase: str
) -> None:
    last_complete_step_is_everywhere(region_dir, world, dead, phase, Closed)


def nothing() -> None:
    """Do nothing after the backward."""


def losses_of(
    training: Training, count: int, behind: Callable[[], object] = nothing
) -> list[float]:
    """Train as `test_resume.losses_of` does; call `behind` after the backward, in the closure."""
    found = []
    for _ in range(count):
        batch = torch.randn(4, 8, generator=training.data) + torch.rand(())

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            loss: torch.Tensor = training.model(batch).square().mean()
            training.optimizer.zero_grad()
            loss.backward()
            behind()
            return loss

        found.append(training.optimizer.step(closure).item())
    return found


def broken(*_: Any) -> None:
    raise Broken


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_ranks_that_fail_inside_of_their_closures_go_on_bit_for_bit(
    region_dir: Path, place: str
) -> None:
    def train(me: ranks.Me) -> bool:
        training = begin(me)
        try:
            with armed(training, region_dir):
                losses_of(training, FAILS_AT)
                if place == "forward":
                    training.module[2].register_forward_hook(broken)
                else:
                    training.module[0].weight.register_hook(broken)
                losses_of(training, 1)
        except Broken:
            return True
        return False

    with ranks.started(2, train) as job:
        assert job.results() == [True, True]
    check(resumed(region_dir, 2), 2, FAILS_AT, early=False)


def test_a_rank_that_fails_between_its_gradients_and_the_end_of_its_closure_is_finished(
    region_dir: Path,
) -> None:
    """The other rank ends the update, and writes what this one leaves.

    A rank that clips its gradients may fail there.
    """

    def train(me: ranks.Me) -> Any:
        def behind() -> None:  # until the other is behind the update
            me.pause()
            broken()

        training, saved = begin(me), None
        with pytest.raises(Broken), armed(training, region_dir) as handle:
            losses_of(training, 2)
            training.optimizer.zero_grad()
            assert handle.snapshot_now("all of them").fresh
            losses_of(training, FAILS_AT - 2)
            losses_of(training, 1, nothing if me.rank else behind)
            saved = handle.snapshot_now("ahead").step
            me.send("ahead")
            me.pause()  # until the other has left
            raise Broken
        return saved

    with ranks.started(2, train) as job:
        assert job.receive(1) == "ahead"
        job.let_go(0)
        assert job.outcomes([0]) == [None]
        job.let_go(1)
        assert job.outcomes([1]) == [FAILS_AT + 1]
    check(resumed(region_dir, 2), 2, FAILS_AT, early=False)
