"""No order of the device's work tears a snapshot: attacks on the fence and on the copies.

What is trained counts: every element of every tensor is the number of the step. A copy that starts
before the update that it belongs to, or that the next one overtakes, or whose memory somebody else
has got meanwhile, shows as another number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_jobs import Mode
from torch import nn

import lightck

pytestmark = pytest.mark.filterwarnings("default")

_STEPS = 8
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # of each tensor: 64 MiB on a GPU
_BUSY = 50_000_000  # clocks: some 30 ms


class Counting(torch.optim.Optimizer):
    """Adds one to every parameter, and to a tensor beside it; `renewed`: that is a new one then."""

    def __init__(self, parameters: Any, *, renewed: bool = False) -> None:
        super().__init__(parameters, {})
        self.renewed = renewed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"] = torch.zeros_like(parameter)
            if self.renewed:
                state["count"] = state["count"] + 1
            else:
                state["count"].add_(1)
            parameter.add_(1)


class Wave(nn.Module):
    """Two large parameters of zeros; a forward that reads them."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(elements))
        self.second = nn.Parameter(torch.zeros(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first[:8] * x).sum() + (self.second[-8:] * x).sum()


class Attack:
    """Trains and looks into every snapshot; subclasses disturb it.

    What is here is the first attack: each update comes right behind the fence.
    """

    renewed = False

    def __init__(self, mode: Mode, path: Path) -> None:
        self.mode, self.path = mode, path
        with torch.device(mode.device):
            self.model = Wave(_ELEMENTS[mode.device])
            self.x = torch.ones(8)
        self.optimizer = Counting(self.model.parameters(), renewed=self.renewed)

    def before_update(self) -> None:
        """Do something after the backward."""

    def after_update(self) -> None:
        """Do something before the next forward."""

    def meanwhile(self) -> Any:
        """Return a context around everything."""
        return nullcontext()

    def run(self) -> None:
        """Train; every snapshot is of one step, and of its own."""
        seen = set()
        with self.meanwhile(), self.mode.attach(self.model, self.optimizer, self.path) as handle:
            for _ in range(_STEPS):
                self.model(self.x).backward()
                self.before_update()
                self.optimizer.step()
                self.after_update()
                self.optimizer.zero_grad()
                handle.wait()
                if handle.last_committed_step:
                    seen.add(self.look(handle))
            self.mode.check(handle)
        assert self.look(handle) == _STEPS
        assert len(seen) > _STEPS // 2, f"only {seen} were there to be looked at"

    def look(self, handle: lightck.Handle) -> int:
        """The newest snapshot's step; every element in it has that value."""
        found = lightck.load(self.path)
        step: int = found["step"]
        assert step == handle.last_committed_step
        state = found["optimizers"][0]["state"]
        large = {**found["model"], **{f"count of {i}": s["count"] for i, s in state.items()}}
        for name, tensor in large.items():
            low, high = float(tensor.min()), float(tensor.max())
            assert low == high == step, f"{name} of step {step} has {low} to {high}"
        return step


class Late(Attack):
    """The update runs long after it was asked for: the copies are asked for before that."""

    def before_update(self) -> None:
        if self.mode.gpu:
            torch.cuda._sleep(_BUSY)


class Slowed(Attack):
    """Other copies to the host are under way all the time: lightck's take many times as long."""

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        source = torch.zeros(_ELEMENTS[self.mode.device], device=self.mode.device)
        target = torch.zeros_like(source, device="cpu", pin_memory=self.mode.gpu)
        ended = threading.Event()

        def copy() -> None:
            stream = torch.cuda.Stream() if self.mode.gpu else None
            with torch.cuda.stream(stream):  # no stream: nothing
                while not ended.is_set():
                    for _ in range(4):
                        target.copy_(source, non_blocking=True)
                    if stream is not None:
                        stream.synchronize()

        busy = threading.Thread(target=copy)
        busy.start()
        try:
            yield
        finally:
            ended.set()
            busy.join()


class Reused(Attack):
    """The optimizer makes new tensors; the old ones' memory is given to others at once."""

    renewed = True

    def after_update(self) -> None:
        for _ in range(3):
            torch.full_like(self.model.first, -1.0)


class Loading(Attack):
    """Batches arrive over a stream of their own, from pinned memory."""

    def __init__(self, mode: Mode, path: Path) -> None:
        super().__init__(mode, path)
        size = _ELEMENTS[mode.device] // 4
        self.pinned = torch.full((size,), 1.0, pin_memory=mode.gpu)
        self.stream = torch.cuda.Stream() if mode.gpu else None

    def after_update(self) -> None:
        with torch.cuda.stream(self.stream):
            batch = self.pinned.to(self.mode.device, non_blocking=True)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch.record_stream(torch.cuda.current_stream())
        self.x = batch[:8]
        assert float(batch.min()) == 1.0


class Elsewhere(Attack):
    """The update is asked for on another stream than the forward."""

    def __init__(self, mode: Mode, path: Path) -> None:
        super().__init__(mode, path)
        if mode.gpu:
            stream, plain = torch.cuda.Stream(), self.optimizer.step

            def step(closure: Any = None) -> None:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(_BUSY)
                    plain(closure)
                torch.cuda.current_stream().wait_stream(stream)

            self.optimizer.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("attack", [Attack, Late, Slowed, Reused, Loading, Elsewhere])
def test_every_snapshot_is_of_one_step(attack: type[Attack], mode: Mode, region_dir: Path) -> None:
    attack(mode, region_dir / "run").run()
