"""A module's extra state (`get_extra_state`) is part of a snapshot, as it is of its state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck


class Counting(nn.Linear):
    """Counts and measures its forwards, in no buffer; what it gives depends on that."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.forwards, self.scale = 0, torch.ones(2)

    def get_extra_state(self) -> Any:
        return {"forwards": self.forwards, "scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.forwards, self.scale = state["forwards"], state["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.scale = self.scale * 0.9 + x.detach().abs().max() / 10
        return super().forward(x) * self.scale[0] / self.forwards


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(Counting(), nn.Tanh(), Counting())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_resumed_model_goes_on_with_the_extra_state_of_its_modules(run_dir: Path) -> None:
    golden = train(*make(), 6)
    model, optimizer = make()
    with lightck.attach(model, optimizer, run_dir):
        assert train(model, optimizer, 3) == golden[:3]
    model, optimizer = make()
    info = lightck.restore(model, optimizer, run_dir)
    assert info is not None and info.leftover == ()
    assert model[0].forwards == model[2].forwards == 3  # type: ignore[index]
    with lightck.attach(model, optimizer, run_dir):
        assert train(model, optimizer, 3) == golden[3:]


def test_a_state_dict_that_is_read_has_it_under_torchs_keys(run_dir: Path) -> None:
    model, optimizer = make()
    with lightck.attach(model, optimizer, run_dir, extras={"mine": {"n": 1}}):
        train(model, optimizer, 2)
    stored = lightck.load(run_dir)
    assert set(stored["model"]) == set(model.state_dict()) and set(stored["extras"]) == {"mine"}
    again, _ = make()
    again.load_state_dict(stored["model"])
    assert again[0].forwards == 2  # type: ignore[index]


def test_extra_state_that_could_not_be_restored_is_refused_at_attach(run_dir: Path) -> None:
    class Odd(Counting):
        def get_extra_state(self) -> Any:
            return {"code": object()}

    model = nn.Sequential(Odd())
    with pytest.raises(lightck.StateError, match=r"0\._extra_state"):
        lightck.attach(model, path=run_dir)
    assert not run_dir.exists()
