"""What is trained: models with random weights, random tokens, an optimizer; and their state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.errors import BenchError

State = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A training job, as a definition describes it.

    Attributes:
        model: a key of `MODELS`.
        optimizer: a key of `OPTIMIZERS`.
        batch: sequences (or rows) per step.
        sequence: tokens per sequence; models without tokens ignore it.
        tensors: of state, for the model `bag`.
    """

    model: str
    optimizer: str = "adamw"
    batch: int = 1
    sequence: int = 64
    tensors: int = 450


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

    def __init__(self) -> None:
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise BenchError(
                f"model gpt2 needs transformers ({error}): pip install '.[bench]'"
            ) from error
        self.inner = GPT2LMHeadModel(GPT2Config())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next token."""
        loss: torch.Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


MODELS: dict[str, Callable[[Work], nn.Module]] = {
    "tiny": lambda work: Tiny(),
    "bag": lambda work: Bag(work.tensors),
    "gpt2": lambda work: Gpt2(),
}
VOCABULARY = {"tiny": 64, "bag": 8, "gpt2": 50257}
NEEDS = {"gpt2": "transformers"}  # model -> package beyond torch
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
}


class Training:
    """A model, its optimizer and endless random tokens; one per process side of a comparison."""

    def __init__(self, work: Work, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.work = work
        self.model = MODELS[work.model](work).train()
        self.optimizer = OPTIMIZERS[work.optimizer](self.model.parameters())
        self._tokens = torch.Generator().manual_seed(seed)

    def compute(self) -> None:
        """Forward and backward of a new batch; gradients are then there."""
        shape = (self.work.batch, self.work.sequence)
        high = VOCABULARY[self.work.model]
        loss = self.model(torch.randint(high, shape, generator=self._tokens))
        loss.backward()

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
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: State) -> None:
        """Take a state over."""
        self.model.load_state_dict(state["model"])
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
