"""Training jobs on a device, each once without lightck and once cut off and resumed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lightck

WIDTH, CLASSES = 16, 4
LAST, CUT = 8, 5  # steps of a job; the last one before it is cut off


@dataclass(frozen=True)
class Mode:
    """A device, and `placement` as `attach` takes it."""

    device: str
    placement: str

    @property
    def gpu(self) -> bool:
        """Say whether the device is a GPU, not a CPU."""
        return self.device != "cpu"

    def attach(self, models: Any, optimizers: Any, path: Path, **settings: Any) -> lightck.Handle:
        """Attach with this placement; errors in the background are raised."""
        given: dict[str, Any] = {"placement": self.placement, "on_error": "raise", **settings}
        return lightck.attach(models, optimizers, path, **given)

    def check(self, handle: lightck.Handle) -> None:
        """The handle has used this placement, and nothing went wrong."""
        stats = handle.stats()
        assert (stats.torn, stats.failed) == (0, 0), stats
        assert stats.committed > 0, stats
        if self.gpu and self.placement != "auto":
            assert stats.device_mode == self.placement, stats.device_why  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Return when the device has nothing to do."""
        if self.gpu:
            torch.cuda.synchronize()


def moded(device: str, placement: str) -> Any:
    """A parameter for pytest; on a GPU it skips visibly where there is none."""
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return pytest.param(Mode(device, placement), id=f"{device}-{placement}", marks=marks)


class Job:
    """A model, optimizers, extras, and one step; subclasses differ from this in one thing each."""

    def __init__(self, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device, self.gpu = device, device != "cpu"
        self.extras: dict[str, Any] = {}
        with torch.device(device):
            self.model = self.make_model()
        self.models = [self.model]
        self.optimizers = [self.make_optimizer(self.model)]
        self.prepare()

    def make_model(self) -> nn.Module:
        """Make a model with dropout, so that the device's random numbers count."""
        return nn.Sequential(
            *(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2)),
            *(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES)),
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of one model."""
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def prepare(self) -> None:
        """Make whatever else there is."""

    def batch(self, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of step t, the same whoever asks."""
        source = torch.Generator().manual_seed(1000 + t)
        x = torch.randn(12, WIDTH, generator=source).to(self.device)
        return x, (torch.arange(12) % CLASSES).to(self.device)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Run the forward; return its loss."""
        return functional.cross_entropy(self.model(x), y)

    def step(self, t: int, handle: lightck.Handle | None) -> torch.Tensor:
        """Make one step; return its loss."""
        loss = self.loss(*self.batch(t))
        loss.backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return loss.detach()

    def around(self) -> AbstractContextManager[Any]:
        """Return the context that the whole loop runs inside of."""
        return nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of every tensor that a snapshot has, by name; what no tensor is, as one."""
        if self.gpu:
            torch.cuda.synchronize()
        found: dict[str, torch.Tensor] = {}
        for m, model in enumerate(self.models):
            _flatten(model.state_dict(), f"model{m}", found)
        for o, optimizer in enumerate(self.optimizers):
            _flatten(optimizer.state_dict(), f"optimizer{o}", found)
        for name, extra in self.extras.items():
            _flatten(extra.state_dict(), name, found)
        if self.gpu:
            torch.cuda.synchronize()
        return found


def _flatten(tree: Any, name: str, into: dict[str, torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        local = tree.to_local() if hasattr(tree, "to_local") else tree
        into[name] = local.detach().clone()
    elif isinstance(tree, dict):
        for key, value in tree.items():
            _flatten(value, f"{name}/{key}", into)
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            _flatten(value, f"{name}/{i}", into)
    elif isinstance(tree, bool | int | float):
        into[name] = torch.tensor(float(tree), dtype=torch.float64)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    """Every tensor is there with the same bits."""
    assert found.keys() == expected.keys(), what
    wrong = [n for n, t in expected.items() if not torch.equal(found[n].cpu(), t.cpu())]
    assert not wrong, f"{what}: {len(wrong)} of {len(expected)} tensors differ, first {wrong[0]}"


def check(
    make: Callable[[str, int], Job],
    mode: Mode,
    path: Path,
) -> None:
    """Run a job to its end; and again, cut off and resumed with other weights: the same bits."""
    plain = make(mode.device, 0)
    states, losses = {}, {}
    with plain.around():
        for t in range(1, LAST + 1):
            losses[t] = plain.step(t, None)
            states[t] = plain.state()

    def run(job: Job, handle: lightck.Handle, first: int, last: int) -> None:
        for t in range(first, last + 1):
            loss = job.step(t, handle)
            assert torch.equal(loss, losses[t]), f"loss of step {t}: {loss}, expected {losses[t]}"
            assert handle.step == t
            if t % 2:  # the others' next steps come at once
                handle.wait()
        equal(job.state(), states[last], f"after step {last}")

    cut = make(mode.device, 0)
    with cut.around():
        handle = mode.attach(cut.models, cut.optimizers, path, extras=cut.extras)
        run(cut, handle, 1, CUT)
        mode.check(handle)
        handle.detach()
    fresh = make(mode.device, 1)
    with fresh.around():
        info = lightck.restore(fresh.models, fresh.optimizers, path, extras=fresh.extras)
        assert info is not None and 1 <= info.step <= CUT, info
        equal(fresh.state(), states[info.step], f"restored step {info.step}")
        handle = mode.attach(fresh.models, fresh.optimizers, path, extras=fresh.extras)
        run(fresh, handle, info.step + 1, LAST)
        handle.wait()
        mode.check(handle)
        handle.close()
