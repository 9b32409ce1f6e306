"""A training job as the tests see it, and the trainer process that runs (and kills) one.

A `Job` builds models, optimizers and extras and defines one training step. The trainer runs it
plain, under lightck, or resumed, dies by SIGKILL where it is told to, and writes down the loss and
a digest of the whole state after every step.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import lightck

SEED = 20_240_917


class Job:
    """One training program. Subclasses override `setup` and `step`, sometimes `train`."""

    steps = 8
    expected_warnings: tuple[str, ...] = ()
    """Starts of warnings that lightck is right to give for this job."""
    settings: dict[str, Any] = {}
    """`attach` is given these settings."""

    def __init__(self, **params: Any) -> None:
        self.params = params
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.extras: dict[str, Any] = {}

    @property
    def model(self) -> nn.Module:
        """The first model."""
        return self.models[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer."""
        return self.optimizers[0]

    def setup(self) -> None:
        """Fill models, optimizers and extras."""
        raise NotImplementedError

    def step(self, t: int, run: Run) -> Any:
        """One training step; returns the loss."""
        raise NotImplementedError

    def more(self) -> dict[str, Any]:
        """Further state that must be equal after a resume."""
        return {}

    def restore(self, run: Run) -> lightck.RestoreInfo | None:
        """Bring the state back."""
        return lightck.restore(
            self._models(), self.optimizers or None, run.path, extras=self.extras
        )

    def attach(self, run: Run) -> lightck.Handle:
        """Start the engine."""
        return lightck.attach(
            self._models(), self.optimizers or None, run.path, extras=self.extras, **self.settings
        )

    def _models(self) -> Any:
        return self.models[0] if len(self.models) == 1 else self.models

    def finished(self, run: Run) -> None:
        """The last step has ended; lightck still runs, if it ever did."""

    def resumed(self, t: int) -> None:
        """Restored to step t, before attach."""

    def train(self, run: Run) -> None:
        """Run the training loop."""
        self.setup()
        run.arm_kill()
        begin = run.begin()
        for t in range(begin + 1, run.last + 1):
            run.now = t
            run.done(t, self.step(t, run))
        run.finish()


class Run:
    """One process's run of a job: what the job may ask, what is written down, when it dies."""

    def __init__(self, job: Job, request: dict[str, Any]) -> None:
        self.job = job
        self.path = request["path"]
        self.mode: str = request["mode"]
        self.last: int = request["last"]
        self.kill_step: int | None = request.get("kill_step")
        self.kill_where: str | None = request.get("kill_where")
        self.settle: bool = request.get("settle", True)
        self.out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self.now = 0
        self.handle: lightck.Handle | None = None
        self.restored: int | None = None
        self._fired = 0

    # ---- engine ----

    def begin(self) -> int:
        """Restore and attach as the mode says; returns the step that the state is of."""
        if self.mode == "plain":
            return 0
        info = self.job.restore(self)
        self.restored = info.step if info else None
        self.write(restored=self.restored, early=bool(info and info.early))
        self.job.resumed(info.step if info else 0)
        self.handle = self.job.attach(self)
        return info.step if info else 0

    def finish(self) -> None:
        """Close and write down the final state."""
        self.job.finished(self)
        if self.handle is not None:
            self.handle.close()
            stats = self.handle.stats()
            self.write(committed=stats.committed, torn=stats.torn, failed=stats.failed)
            assert stats.torn == 0 and stats.failed == 0, stats
        self.write(final=state_of(self.job), draws=draws())

    # ---- log ----

    def write(self, **fields: Any) -> None:
        """One line of JSON, in the page cache before this returns."""
        os.write(self.out, json.dumps(fields).encode() + b"\n")

    def done(self, t: int, loss: Any) -> None:
        """Step t has ended."""
        value = float(loss).hex()
        self.write(
            t=t, loss=value, state=digest(json.dumps(state_of(self.job, rng=True), sort_keys=True))
        )
        if self.handle is not None and not self.settle:
            handle = self.handle
            self.write(acked=handle.last_committed_step, captured=handle.last_captured_step)
        if self.handle is not None and self.settle:
            self.handle.wait()  # what is captured is committed: which step resumes is then known
        self.die("after")

    # ---- death ----

    def die(self, where: str) -> None:
        """SIGKILL, if this is the place."""
        if self.kill_where == where and self.now == self.kill_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def arm_kill(self) -> None:
        """Install the hook that kills where the request says."""
        if self.kill_where == "forward":
            for model in self.job.models:
                _first_layer(model).register_forward_hook(self._in_forward)
        elif self.kill_where == "backward":
            parameters = [p for m in self.job.models for p in m.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.register_hook(lambda grad: self._in_backward(len(parameters)))
        elif self.kill_where == "update":
            for optimizer in self.job.optimizers:
                optimizer.register_step_pre_hook(self._in_update)

    def _in_forward(self, module: nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.die("forward")

    def _in_backward(self, count: int) -> None:
        if self.now == self.kill_step:
            self._fired += 1
            if self._fired >= max(1, count // 2):
                self.die("backward")

    def _in_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The worst update: everything it holds has been changed when the process dies."""
        if self.now == self.kill_step:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.fill_(1)
                        for value in optimizer.state.get(parameter, {}).values():
                            if isinstance(value, torch.Tensor):
                                value.fill_(1)
            self.die("update")


def _first_layer(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if any(True for _ in module._parameters) and not list(module.children()):
            return module
    return model


def digest(data: bytes | str) -> str:
    """Return a short SHA-256."""
    raw = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(raw).hexdigest()[:16]


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest dtype, shape and bytes as they read."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{tensor.dtype}{list(tensor.shape)}:{digest(raw)}"


def flat(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every leaf of a tree as text that is equal only for equal bits."""
    if isinstance(tree, torch.Tensor):
        yield path, tensor_digest(tree)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path}/{key}")
        yield path, f"{type(tree).__name__} of {len(tree)}"
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from flat(value, f"{path}/{i}")
        yield path, f"{type(tree).__name__} of {len(tree)}"
    elif isinstance(tree, np.ndarray):
        yield path, f"{tree.dtype}{tree.shape}:{digest(tree.tobytes())}"
    elif isinstance(tree, set | frozenset):
        yield path, repr(sorted(map(repr, tree)))
    elif isinstance(tree, float):
        yield path, tree.hex()
    else:
        yield path, repr(tree)


def state_of(job: Job, *, rng: bool = False) -> dict[str, str]:
    """Every bit that decides how training goes on, by path."""
    found: dict[str, str] = {}
    for m, model in enumerate(job.models):
        found |= flat({k: v for k, v in model.state_dict().items()}, f"model{m}")
    for o, optimizer in enumerate(job.optimizers):
        held = [p for g in optimizer.param_groups for p in g["params"]]
        for k, parameter in enumerate(held):
            found |= flat(parameter, f"optim{o}/{k}/value")
            found |= flat(dict(optimizer.state.get(parameter, {})), f"optim{o}/{k}")
        for g, group in enumerate(optimizer.param_groups):
            options = {k: v for k, v in group.items() if k != "params"}
            found |= flat(options, f"optim{o}/group{g}")
    for name, extra in job.extras.items():
        subject = getattr(extra, "subject", extra)
        found |= flat(extra_state(subject), f"extras/{name}")
    found |= flat(job.more(), "more")
    if rng:
        found |= flat(torch.get_rng_state(), "rng/torch")
        found |= flat(repr(np.random.get_state()[2:]), "rng/numpy")
        found |= flat(repr(random.getstate()), "rng/python")
    return found


def extra_state(subject: Any) -> Any:
    """State of one extra, by its kind."""
    if isinstance(subject, dict):
        return subject
    if isinstance(subject, torch.Generator):
        return subject.get_state()
    if isinstance(subject, np.random.Generator):
        return repr(subject.bit_generator.state)
    if isinstance(subject, random.Random):
        return repr(subject.getstate())
    return subject.state_dict()


def draws() -> list[str]:
    """The next draw of every global generator."""
    return [
        float(torch.rand(())).hex(),
        float(np.random.random()).hex(),
        float(random.random()).hex(),
    ]


def seed_all(seed: int = SEED) -> None:
    """Fixed seeds for every global generator."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def main(request: dict[str, Any]) -> None:
    """Run one request in this process."""
    module = importlib.import_module(request["module"])
    job: Job = getattr(module, request["job"])(**request["params"])
    warnings.simplefilter("error")
    for kind in (DeprecationWarning, FutureWarning):  # torch's own
        warnings.simplefilter("ignore", kind)
    for text in job.expected_warnings:
        warnings.filterwarnings("ignore", message=text)
    # A resumed process has other seeds and so other weights: only restore can make them equal.
    seed_all(SEED if request["mode"] != "resume" else SEED + 1)
    job.train(Run(job, request))
