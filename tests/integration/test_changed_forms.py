"""Tensors and state that take another form between two snapshots are saved as they are then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from support import internals
from support.loops import Loop, attach, mlp, of_stored, steps_at

NUMBER = torch.tensor(2 + 3j)
FORMS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (torch.rand(5, 5), torch.t),
    "shorter": (torch.rand(5, 3), lambda t: t[:4]),
    "as integers": (torch.rand(5, 3), lambda t: (9 * t).int()),
    "with gaps": (torch.rand(5, 3), lambda t: torch.rand(5, 6)[:, ::2]),
    "conjugated lazily": (torch.rand(5) + 2j, torch.conj),
    "negated lazily": (torch.rand(()), lambda t: NUMBER.conj().imag),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_that_takes_another_form_is_saved_in_it(run_dir: Path, form: str) -> None:
    first, change = FORMS[form]
    model = mlp()
    model.register_parameter("spare", torch.nn.Parameter(first.clone(), requires_grad=False))
    spare = model.spare
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with attach(run_dir, loop, slots=8, placement="direct") as handle:
        for _ in range(2):
            loop.run(1)
            handle.wait()
        spare.data = change(spare.data)
        for _ in range(2):
            loop.run(1)
            handle.wait()
        loop.note()
    loop.check(run_dir, steps_at(run_dir))
    for step in (1, 4):
        saved = lightck.load(run_dir, step)["model"]["spare"]
        assert torch.equal(saved, first if step == 1 else spare)


def test_a_frozen_tensor_that_changes_between_snapshots_is_saved_as_it_is(run_dir: Path) -> None:
    model = mlp()
    frozen = model[0].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    loop = Loop(model, torch.optim.SGD(trained, lr=0.1))
    with attach(run_dir, loop, slots=2, placement="direct") as handle:
        for step in range(12):
            if step in (7, 8):  # until then both slots come to hold it, and it is skipped
                with torch.no_grad():
                    frozen.add_(1)
            loop.run(1)
            handle.wait()
            if step:
                assert of_stored(run_dir, step) == loop.seen[step]
        skipped = internals.pipeline(handle).pool_stats()["bytes_skipped"]
    assert skipped > 0, "it was never found unchanged"


class Historian(torch.optim.SGD):
    """Keeps a list in its state and appends to it in place."""

    def step(self, closure: Any = None) -> None:
        """Step as SGD does, and add a line to the history."""
        super().step()
        for group in self.param_groups:
            held = self.state[group["params"][0]]
            held.setdefault("history", []).append(len(held.get("history", ())))


def test_a_list_in_an_optimizers_state_is_saved_as_long_as_it_was(run_dir: Path) -> None:
    model = mlp()
    loop = Loop(model, Historian(model.parameters(), lr=0.1))
    with attach(run_dir, loop, slots=8, placement="direct") as handle:
        for _ in range(4):
            loop.run(1)
            handle.wait()
    for step in steps_at(run_dir):
        (state,) = lightck.load(run_dir, step)["optimizers"]
        assert state["state"][0]["history"] == list(range(step))
    assert steps_at(run_dir) == [1, 2, 3, 4]
