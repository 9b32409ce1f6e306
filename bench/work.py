"""The training that is measured: a model, an optimizer, endless random batches; and their state."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from bench.emulated import place
from bench.models import MODELS, built

State = dict[str, Any]
_LINE = 64  # bytes


@dataclass(frozen=True)
class Work:
    """A training job, as a definition describes it.

    Attributes:
        model: a key of `MODELS`.
        optimizer: a key of `OPTIMIZERS`.
        batch: sequences (or pictures) per step, of each rank.
        sequence: tokens per sequence; models without tokens ignore it.
        tensors: number of state tensors, for the model `bag`.
        width: elements of each of them except counters; 0: a few.
        world: ranks that train it together, data parallel.
        link: Mbit/s of the network between them, each way; 0: loopback.
        saved_by: ranks that wrote the snapshot that `world` ranks restore; 0: as many.
        forks: ranks that the measuring process, which is alone, forks and lets fail.
        emulated: a key of `bench.emulated.DEVICES` that replaces forward, backward and update.
        step_ms: milliseconds of a step on that device.
        loader_workers: workers of a DataLoader whose items take 4 ms of CPU each, 16 in a batch.
        hogs: processes beside the training that compute without end.
        device: where model, optimizer and batches are: `cpu` or `cuda`.
    """

    model: str
    optimizer: str = "adamw"
    batch: int = 1
    sequence: int = 64
    tensors: int = 450
    width: int = 0
    world: int = 1
    link: int = 0
    saved_by: int = 0
    forks: int = 0
    emulated: str = ""
    step_ms: float = 0.0
    loader_workers: int = 0
    hogs: int = 0
    device: str = "cpu"


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True),
    "streamed adamw": lambda parameters: lightck.optim.AdamW(parameters, lr=1e-4),
}


# Tensors of a parameter's size that the optimizer keeps for it.
_MOMENTS = {"adamw": 2, "sgd": 1, "streamed adamw": 2}
_COUNTER = 4  # bytes of AdamW's step counter, for each parameter


def state_bytes(work: Work) -> int:
    """Return the bytes of model and optimizer state after a first step; no memory is touched."""
    with torch.device("meta"):
        model = built(work.model, work.tensors, work.width)
    parameters = list(model.parameters())  # a tied one once
    weights: int = sum(p.nbytes for p in parameters)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers: int = sum(t.nbytes for name, t in model.state_dict().items() if name not in names)
    counters = _COUNTER * len(parameters) if work.optimizer != "sgd" else 0
    return weights * (1 + _MOMENTS[work.optimizer]) + counters + buffers


class Training:
    """A model, its optimizer and endless random batches; one per process side of a comparison.

    Attributes:
        plain: the model itself.
        model: the trained module: the model, or DistributedDataParallel around it.
        rank: number of this rank, of `world` that train together.
    """

    def __init__(self, work: Work, seed: int = 0, *, rank: int | None = None) -> None:
        """Build the training; with `rank` it trains together with torch.distributed's ranks.

        Each rank has its own batches.
        """
        torch.manual_seed(seed)
        self.work = work
        self.rank, self.world = rank or 0, 1 if rank is None else dist.get_world_size()
        with torch.device(work.device):
            self.plain = self.model = built(work.model, work.tensors, work.width).train()
        if work.emulated:
            step_s, name = work.step_ms / 1e3, work.optimizer
            self.optimizer: torch.optim.Optimizer = place(self.plain, work.emulated, step_s, name)
        else:
            self.optimizer = OPTIMIZERS[work.optimizer](self.plain.parameters())
        self._random = torch.Generator(work.device).manual_seed(seed + self.rank)
        if rank is not None:
            self.model = DistributedDataParallel(self.plain)

    def compute(self) -> None:
        """Run forward and backward of a new batch.

        Gradients are there then, reduced over the ranks.
        """
        self.model(self._batch()).backward()

    def compute_alone(self) -> float:
        """Run forward and backward on this rank alone and drop the gradients.

        Return the seconds.
        """
        model = self.model
        alone = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
        begin = time.perf_counter()
        with alone:
            self.compute()
        spent = time.perf_counter() - begin
        self.optimizer.zero_grad()
        return spent

    def _batch(self) -> torch.Tensor:
        model, work = MODELS[self.work.model], self.work
        if work.emulated:
            return torch.zeros(())  # nothing reads it
        drawn: dict[str, Any] = {"generator": self._random, "device": work.device}
        if model.vocabulary:
            return torch.randint(model.vocabulary, (work.batch, work.sequence), **drawn)
        return torch.rand(work.batch, 3, model.pixels, model.pixels, **drawn)

    def update(self) -> None:
        """Make the optimizer's step; the gradients are gone then."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        """Run whole steps without an engine: for warming up, or to have optimizer state."""
        for _ in range(count):
            self.compute()
            self.update()

    def need_optimizer_state(self) -> None:
        """Make optimizer state for a restore into existing tensors: a fresh optimizer has none."""
        if not self.optimizer.state:
            self.steps(1)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return what is saved of the model and is no parameter.

        A forward may change it (BatchNorm).
        """
        names = {name for name, _ in self.plain.named_parameters(remove_duplicate=False)}
        return {name: t for name, t in self.plain.state_dict().items() if name not in names}

    def state(self) -> State:
        """Return model and optimizer state, which share memory with the live tensors."""
        return {"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict()}

    def bytes(self) -> int:
        """Return the bytes of the state; each memory counts once."""
        return sum(t.nbytes for t in tensors(self.state()))

    def load(self, state: State) -> None:
        """Load a state."""
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def copied(state: State) -> State:
    """Return a state that shares nothing with the live one."""
    return copy.deepcopy(state)


def leaves(state: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a nested state under its path, in order."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from leaves(value, f"{name}.{i}")
    else:
        yield name, state


def with_leaves(state: object, values: Mapping[str, object], name: str = "") -> Any:
    """Return a nested state like the given one, with other values; the inverse of `leaves`."""
    if isinstance(state, Mapping):
        return {
            key: with_leaves(value, values, f"{name}.{key}" if name else str(key))
            for key, value in state.items()
        }
    if isinstance(state, list | tuple):
        return type(state)(with_leaves(v, values, f"{name}.{i}") for i, v in enumerate(state))
    return values[name]


def tensors(state: State) -> list[torch.Tensor]:
    """Return the tensors of a state, each memory once (tied weights have two names)."""
    found: dict[int, torch.Tensor] = {}
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            found.setdefault(value.data_ptr(), value)
    return list(found.values())


def digests(state: State) -> State:
    """Return a state to compare others with, with a digest in place of each tensor's bytes."""
    found: State = {}
    for name, value in leaves(state):
        if isinstance(value, torch.Tensor):
            content = hashlib.blake2b(_bits(value).cpu().numpy().data, digest_size=16)
            value = f"{value.dtype} {tuple(value.shape)} {content.hexdigest()}"
        found[name] = value
    return found


def share(tensors: Sequence[torch.Tensor], rank: int, world: int) -> list[tuple[int, int, int]]:
    """Return one rank's part of tensors that all ranks hold, as (index, begin, end) in bytes.

    Together the ranks' parts are everything once; their sizes differ by two lines at most. A tensor
    may be cut.
    """
    total = sum(t.nbytes for t in tensors)
    low, high = (total * r // world // _LINE * _LINE for r in (rank, rank + 1))
    if rank == world - 1:
        high = total
    parts, at = [], 0
    for index, tensor in enumerate(tensors):
        begin, end = max(low - at, 0), min(high - at, tensor.nbytes)
        if begin < end:
            parts.append((index, begin, end))
        at += tensor.nbytes
    return parts


def part(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return a range of bytes of a dense tensor; they share its memory."""
    return tensor.detach().view(-1).view(torch.uint8)[begin:end]


def difference(expected: State, found: State) -> str | None:
    """Describe the first difference between two states, bit for bit; None when there is none."""
    wanted, here = dict(leaves(expected)), dict(leaves(found))
    if wanted.keys() != here.keys():
        odd = sorted(wanted.keys() ^ here.keys())
        return f"{len(odd)} names are only on one side, first {odd[0]}"
    for name, value in wanted.items():
        other = here[name]
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            if value != other:
                return f"{name}: expected {value!r}, found {other!r}"
        elif (value.dtype, value.shape) != (other.dtype, other.shape):
            return f"{name}: expected {value.dtype} {tuple(value.shape)}, found {other.dtype}" + (
                f" {tuple(other.shape)}"
            )
        elif not torch.equal(_bits(value), _bits(other)):
            wrong = int((_bits(value) != _bits(other)).sum())
            return f"{name}: {wrong} of {value.nbytes} bytes differ"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)  # bytes, so that NaN equals NaN
