"""These training loops write down, at every forward start, what a snapshot must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import lightck
from lightck.journal.pre_fence import PreFencePredictor
from support import internals

Digests = dict[str, str]


def digest(tensor: torch.Tensor) -> str:
    """Digest dtype, shape and bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # A tensor that is made an array of counts as written: `pipeline/write_watch.py`.
    data = plain.contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
    label = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.blake2b(label + data, digest_size=8).hexdigest()


def of_live(model: nn.Module, optimizers: Sequence[Optimizer]) -> Digests:
    """Digest every tensor of a snapshot of these live objects, by path."""
    found = {f"model/{name}": digest(value) for name, value in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        found |= _of_optimizer(i, optimizer.state_dict())
    return found


def of_stored(path: Path, step: int) -> Digests:
    """Digest every tensor of a committed snapshot, by path."""
    stored = lightck.load(path, step)
    assert stored["step"] == step
    found = {f"model/{name}": digest(value) for name, value in stored["model"].items()}
    for i, state in enumerate(stored["optimizers"]):
        found |= _of_optimizer(i, state)
    return found


def _of_optimizer(i: int, state: dict[str, Any]) -> Digests:
    return {
        f"optim/{i}/{position}/{key}": digest(value)
        for position, held in state["state"].items()
        for key, value in held.items()
        if isinstance(value, torch.Tensor)
    }


def steps_at(path: Path) -> list[int]:
    """Steps of the whole snapshots at a path."""
    table = lightck.snapshots(path)
    return sorted(
        step
        for step, state in zip(table["step"].to_pylist(), table["state"].to_pylist(), strict=True)
        if state == "whole"
    )


class Overwriter(Optimizer):
    """Overwrites every parameter and all its state at once, the instant the fence opens."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"scale": 1.0})
        self._dice = torch.Generator().manual_seed(7)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": torch.zeros(()), "memory": torch.zeros_like(p)}

    def step(self, closure: Any = None) -> None:
        self.overwrite()

    @torch.no_grad()
    def overwrite(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(torch.rand(p.shape, generator=self._dice, dtype=p.dtype))
                held = self.state[p]
                held["memory"].copy_(torch.rand(p.shape, generator=self._dice, dtype=p.dtype))
                held["step"] += 1


class Loop:
    """Trains one model with any optimizers; `seen` has the digests of each step's forward start."""

    def __init__(self, model: nn.Module, *optimizers: Optimizer, width: int = 64) -> None:
        self.model, self.optimizers, self.width = model, optimizers, width
        real = (p.dtype for p in model.parameters() if p.is_floating_point())
        self.dtype = next(real, torch.float32)
        self.seen: dict[int, Digests] = {}
        self.step = 0

    def forward(self) -> torch.Tensor:
        """Run a forward, with what stands at its start written down just before."""
        self.note()
        return self.model(torch.ones(2, self.width, dtype=self.dtype)).square().mean()

    def note(self) -> None:
        """Write down what the snapshot of the last complete step must hold."""
        self.seen.setdefault(self.step, of_live(self.model, self.optimizers))

    def update(self) -> None:
        """Every optimizer steps."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.model.zero_grad()

    def run(self, steps: int, between: Callable[[int], None] = lambda step: None) -> None:
        """Train; `between` is called inside every window, after the backward."""
        for _ in range(steps):
            self.forward().backward()
            between(self.step)
            self.update()

    def check(self, path: Path, steps: Sequence[int]) -> None:
        """Every given step is there and holds what was seen."""
        assert steps_at(path) == sorted(steps)
        for step in steps:
            stored = of_stored(path, step)
            wrong = [
                k for k in {*stored, *self.seen[step]} if stored.get(k) != self.seen[step].get(k)
            ]
            assert not wrong, f"step {step}: {wrong}"


def mlp(width: int = 64, depth: int = 3) -> nn.Sequential:
    """Linear layers of one width."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by their path in a snapshot."""
    for name, parameter in model.named_parameters():
        yield f"model/{name}", parameter


# ---- Runs with AdamW on a small model, which many tests share ----------------------------------


def adam_loop(width: int = 16) -> Loop:
    """A loop that is made the same way wherever it is restored."""
    model = mlp(width, 2)
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=width)


def attach(path: Path, loop: Loop, **settings: Any) -> lightck.Handle:
    """`lightck.attach` with what the loop holds."""
    return lightck.attach(loop.model, list(loop.optimizers), path, **settings)


def train(path: Path, loop: Loop, steps: int, **settings: Any) -> None:
    """Attach, train with every snapshot committed before the next step, and close."""
    with attach(path, loop, **settings) as handle:
        for _ in range(steps):
            loop.run(1)
            handle.wait()
        loop.note()


def restored(path: Path) -> tuple[lightck.RestoreInfo | None, Loop]:
    """Restore a fresh loop; return what `lightck.restore` says, and that loop."""
    loop = adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), path)
    if info is not None:
        loop.step = info.step
    return info, loop


def still_there(elsewhere: tuple[Path, Loop]) -> None:
    """The fixture's snapshots are as they were."""
    path, loop = elsewhere
    loop.check(path, [2, 3])
    info, again = restored(path)
    assert info is not None and info.step == 3 and info.fell_back == ()
    assert of_live(again.model, again.optimizers) == loop.seen[3]


class SilentPredictor(PreFencePredictor):
    """A predictor that is told of no gradient, and so predicts nothing."""

    def gradient(self) -> bool | None:
        return None


def with_peers(handle: lightck.Handle) -> Any:
    """Write as if other ranks could read what it leaves: then it has an entry at its fence, too."""
    checkpointer = internals.checkpointer(handle)
    kept = checkpointer.step_journal
    assert kept is not None and kept.predictor is None
    kept.predictor = checkpointer.predictor = SilentPredictor(
        kept.boundary_state, checkpointer.lock, 1
    )
    with checkpointer.lock:
        kept.step_ended(checkpointer.steps.step)  # the first entry, which attach writes with peers
    return handle
