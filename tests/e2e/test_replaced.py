"""A state that is replaced in mid-run, and then a kill: training goes on as without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.nn import functional as F

import lightck
from support.e2e.jobs import Plain, batch
from support.e2e.resume import Bed, same_end
from support.e2e.trainer import Run

NOW_AT = 4
"""Step after which, or inside the iteration behind it, the state is replaced."""


class Replaced(Plain):
    """The state is replaced by its own of step 2, which is called another step from then on.

    params: `to`, that number; `inside` the iteration (as a peer heals it) or not. It dies in a step
    of the second part.
    """

    steps = 14

    def setup(self) -> None:
        super().setup()
        self.rounds = {"n": 0, "replaced": 0}
        self.extras = {"rounds": lightck.at_forward(self.rounds)}

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        self.dies_in, run.kill_step = run.kill_step, None
        self.now = run.begin()
        while self.now < run.last:
            run.now = self.now + 1
            loss = self.step(run.now, run)
            self.now += 1
            run.done(self.now, loss)
            self.between(run)
        run.finish()

    def between(self, run: Run) -> None:
        if self.now == 2 and not self.rounds["replaced"]:
            held = [self.model.state_dict(), self.optimizer.state_dict()]
            self.kept = copy.deepcopy(held)
        if not self.params["inside"]:
            self.replace(run)
        self.rounds["n"] += 1

    def replace(self, run: Run) -> None:
        if self.now != NOW_AT or self.rounds["replaced"]:
            return
        self.model.load_state_dict(self.kept[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.kept[1]))
        self.rounds["replaced"] = 1
        self.now = self.params["to"]
        if run.handle is not None:
            run.handle.replaced(self.now)
            run.kill_step = self.dies_in

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        if self.params["inside"]:
            self.replace(run)
            run.now = self.now + 1
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("where", ["forward", "update"])
@pytest.mark.parametrize(("to", "kill"), [(9, 12), (2, 5), (4, 7)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_run_whose_state_was_replaced_resumes_after_it(
    bed: Bed, inside: bool, to: int, kill: int, where: str
) -> None:
    params = {"inside": inside, "to": to}
    plain = bed.plain(Replaced, params=params)
    dying = {"kill_step": kill, "kill_where": where}
    bed.run(Replaced, "attach", params=params, **dying).check_killed()
    again = bed.run(Replaced, "resume", params=params).check_ended()
    assert again.value("restored") in {kill - 2, kill - 1}
    same_end(again, plain)
