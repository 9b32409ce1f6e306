"""What is trained: models with random weights, random tokens, an optimizer; and their state."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench.errors import BenchError

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
        tensors: of state, for the model `bag`.
        world: ranks that train it together, data parallel.
        link: Mbit/s of the network between them, each way; 0: loopback.
        saved_by: ranks that wrote the snapshot that `world` ranks restore; 0: as many.
        forks: ranks that the measuring process, one alone, forks and lets fail.
    """

    model: str
    optimizer: str = "adamw"
    batch: int = 1
    sequence: int = 64
    tensors: int = 450
    world: int = 1
    link: int = 0
    saved_by: int = 0
    forks: int = 0


class Tiny(nn.Module):
    """Stands in for any model where only the machinery is tested: milliseconds per step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight  # tied, as in GPT-2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next token."""
        logits = self.head(self.layers(self.embedding(tokens)))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Bag(nn.Module):
    """Very many tiny layers, so that what counts is the number of tensors, not their bytes.

    With AdamW a parameter comes with three tensors of optimizer state; buffers make up the rest.
    """

    WIDTH = 4

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(tensors // 8))
        for layer in self.layers:
            layer.weight = nn.Parameter(torch.randn(self.WIDTH))
            layer.bias = nn.Parameter(torch.randn(self.WIDTH))
        for i in range(tensors % 8):
            self.register_buffer(f"rest_{i}", torch.randn(self.WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A loss that reaches every parameter."""
        everything = torch.cat(list(self.parameters()))
        return (everything * tokens.float().mean()).square().mean()


class Gpt2(nn.Module):
    """GPT-2 small as `transformers` builds it from its default config; nothing is downloaded."""

    THIN = 36  # wide, instead of 768

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise BenchError(
                f"model gpt2 needs transformers ({error}): pip install '.[bench]'"
            ) from error
        self.inner = GPT2LMHeadModel(GPT2Config() if width is None else GPT2Config(n_embd=width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next token."""
        loss: torch.Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


class Vgg16(nn.Module):
    """VGG-16 as its paper has it (Simonyan and Zisserman, 2015, table 1, D): no BatchNorm."""

    PIXELS, CLASSES = 224, 1000
    _CHANNELS = ((3, 64, 64), (64, 128, 128), (128, 256, 256, 256), (256, *[512] * 3), [512] * 4)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block in self._CHANNELS:
            for inputs, outputs in pairwise(block):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, self.CLASSES),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Mean loss of a guess; one picture of each class in turn."""
        guess = self.classifier(self.features(pictures))
        return functional.cross_entropy(guess, torch.arange(len(guess)) % self.CLASSES)


MODELS: dict[str, Callable[[Work], nn.Module]] = {
    "tiny": lambda work: Tiny(),
    "bag": lambda work: Bag(work.tensors),
    "gpt2": lambda work: Gpt2(),
    "gpt2-thin": lambda work: Gpt2(Gpt2.THIN),
    "vgg16": lambda work: Vgg16(),
}
VOCABULARY = {"tiny": 64, "bag": 8, "gpt2": 50257, "gpt2-thin": 50257}  # others look at pictures
NEEDS = {"gpt2": "transformers", "gpt2-thin": "transformers"}  # model -> package beyond torch
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True),
}


class Training:
    """A model, its optimizer and endless random batches; one per process side of a comparison.

    Attributes:
        plain: the model itself.
        model: what is trained: the model, or DistributedDataParallel around it.
        rank: this one of `world` that train together.
    """

    def __init__(self, work: Work, seed: int = 0, *, rank: int | None = None) -> None:
        """`rank`: train together with the ranks of torch.distributed, each on its own batches."""
        torch.manual_seed(seed)
        self.work = work
        self.rank, self.world = rank or 0, 1 if rank is None else dist.get_world_size()
        self.plain = self.model = MODELS[work.model](work).train()
        self.optimizer = OPTIMIZERS[work.optimizer](self.plain.parameters())
        self._random = torch.Generator().manual_seed(seed + self.rank)
        if rank is not None:
            self.model = DistributedDataParallel(self.plain)

    def compute(self) -> None:
        """Forward and backward of a new batch; gradients are then there, those of all ranks."""
        self.model(self._batch()).backward()

    def compute_alone(self) -> float:
        """Forward and backward that no other rank hears of; gradients are gone again. Seconds."""
        model = self.model
        alone = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
        begin = time.perf_counter()
        with alone:
            self.compute()
        spent = time.perf_counter() - begin
        self.optimizer.zero_grad()
        return spent

    def _batch(self) -> torch.Tensor:
        high = VOCABULARY.get(self.work.model)
        if high is None:
            pixels = Vgg16.PIXELS
            return torch.rand(self.work.batch, 3, pixels, pixels, generator=self._random)
        return torch.randint(high, (self.work.batch, self.work.sequence), generator=self._random)

    def update(self) -> None:
        """The optimizer's step; gradients are then gone."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        """So many whole steps, with nobody looking: warming up, or having optimizer state."""
        for _ in range(count):
            self.compute()
            self.update()

    def state(self) -> State:
        """Model and optimizer state; it shares memory with the live tensors."""
        return {"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: State) -> None:
        """Take a state over."""
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def copied(state: State) -> State:
    """A state that shares nothing with the live one."""
    return copy.deepcopy(state)


def leaves(state: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Every value of a nested state under its path, in order."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from leaves(value, f"{name}.{i}")
    else:
        yield name, state


def tensors(state: State) -> list[torch.Tensor]:
    """The tensors of a state, each memory once (tied weights have two names)."""
    found: dict[int, torch.Tensor] = {}
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            found.setdefault(value.data_ptr(), value)
    return list(found.values())


def digests(state: State) -> State:
    """A state to compare others with, in which a digest stands for the bytes of each tensor."""
    found: State = {}
    for name, value in leaves(state):
        if isinstance(value, torch.Tensor):
            content = hashlib.blake2b(_bits(value).numpy().data, digest_size=16)
            value = f"{value.dtype} {tuple(value.shape)} {content.hexdigest()}"
        found[name] = value
    return found


def share(tensors: Sequence[torch.Tensor], rank: int, world: int) -> list[tuple[int, int, int]]:
    """One rank's part of tensors that all have, as (index, begin, end) in bytes.

    Together the ranks' parts are everything once, of equal size but for two lines; a tensor may be
    cut.
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
    """Some bytes of a dense tensor; they share its memory."""
    return tensor.detach().view(-1).view(torch.uint8)[begin:end]


def difference(expected: State, found: State) -> str | None:
    """The first difference between two states, bit for bit, in words; None when there is none."""
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
    return tensor.detach().contiguous().flatten().view(torch.uint8)  # so that NaN equals NaN
