"""A rank is killed with all of its gradients given, before its update begins: its peers make the
update, and what it had of its own is in its journal since its last gradient, if it keeps habits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_peer_death import (
    AT,
    NEVER,
    Mortal,
    first_life,
    go_on,
    last_complete_step_is_everywhere,
    passed,
)
from torch import nn

from support.distributed import ranks

PHASE = "gathered"


class Behind(Mortal):
    """May die between its gradients and its update."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.gathered = partial(self._die_in, PHASE)


class Drawing(Behind):
    """Draws there, in every iteration."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.gathered = self._draw

    def _draw(self) -> None:
        torch.rand(())
        self._die_in(PHASE)


class Once(Behind):
    """Has one micro-batch more in one iteration, with what its forward draws."""

    def loss(self) -> torch.Tensor:
        if self.iteration == AT:
            with self.model.no_sync():  # type: ignore[operator]
                super().loss().backward()
        return super().loss()


class Evaluating(Behind):
    """Fails there, in a forward that comes in no other iteration."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.gathered = self._evaluate

    def _evaluate(self) -> None:
        if self.phase == PHASE and self.iteration == self.last:
            self.tell(0.0)
            self.probe(torch.rand(2, 3))

    class Probe(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such class")

    probe = Probe()


class Scaled(Behind):
    """Its gradients are infinite in iteration `at`, on every rank: that has no update.

    Its scaler scales by powers of two: no loss is another where its update is missed.
    """

    at = AT

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.extras["scaler"] = self.scaler
        self.skipped: Callable[[], object] = lambda: None

    def iterate(self) -> float:
        self.iteration += 1
        self.optimizer.zero_grad()
        loss = self.loss()
        factor = float("inf") if self.iteration == self.at else 1.0
        self.scaler.scale(loss * factor).backward()
        self.gathered()
        self.scaler.step(self.optimizer)
        if self.iteration == self.at:
            self.skipped()
        self.scaler.update()
        self.pending()
        return loss.item()


class Skipped(Scaled):
    """Its gradients are infinite in the iteration before, which has no update."""

    at = AT - 1


@pytest.mark.parametrize(
    ("world", "dead"), [(2, 0), (2, 1), pytest.param(3, 1, marks=pytest.mark.soak)]
)
def test_the_step_that_its_peers_go_on_to_is_there_on_every_rank(
    region_dir: Path, world: int, dead: int
) -> None:
    last_complete_step_is_everywhere(region_dir, world, dead, PHASE, Behind)


def lives_on(path: Path, kind: type[Mortal], of: list[int]) -> list[Any]:
    """Return what comes of these ranks when rank 1 is gone and its peer has gone on to the step."""

    def prepare(me: ranks.Me, job: Mortal) -> None:
        passed(me, job, 1, PHASE)
        if isinstance(job, Scaled) and me.rank == 0:
            job.skipped = lambda: me.send(PHASE)

    code = first_life(path, 1, PHASE, kind=kind, prepare=prepare, policy=NEVER)
    with ranks.started(2, code) as job:
        assert job.receive(0) == PHASE
        job.let_go(1)
        return job.outcomes(of)


@pytest.mark.parametrize("kind", [Drawing, Once])
def test_what_is_not_as_it_would_have_been_at_its_fence_is_not_taken_for_it(
    region_dir: Path, kind: type[Mortal]
) -> None:
    ((saved, taken, refused, _),) = lives_on(region_dir, kind, [0])
    assert saved["step"] == AT and not taken and refused
    assert all("rank 1 has nothing of the step" in each["why"] for each in refused), refused
    assert go_on(region_dir, 2, kind) is None, "nothing whole is there"


def test_an_error_in_a_forward_against_habit_is_not_taken_for_its_fence(region_dir: Path) -> None:
    (saved, taken, refused, _), (own, *_) = lives_on(region_dir, Evaluating, [0, 1])
    assert saved["step"] == AT and not taken and refused
    assert own["step"] == AT - 1


def test_an_iteration_against_habit_is_known_at_its_fence(region_dir: Path) -> None:
    last_complete_step_is_everywhere(region_dir, 2, 1, "half", Once)


def test_an_update_that_was_left_out_is_no_other_habit(region_dir: Path) -> None:
    last_complete_step_is_everywhere(region_dir, 2, 1, PHASE, Skipped)


def test_it_is_there_too_where_that_update_is_left_out(region_dir: Path) -> None:
    ((saved, taken, refused, _),) = lives_on(region_dir, Scaled, [0])
    assert saved["step"] == AT and not refused
    assert [each["step"] for each in taken] == [AT]
    info = go_on(region_dir, 2, Scaled)
    assert info is not None and info.step == AT and info.early
