"""When gradients are final, and what an update was made from, so that a later change is seen."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightck.capture import staging
from lightck.capture.hooks import untraced

SAMPLES = 64
"""Elements of a gradient that are compared: what multiplies or zeroes it changes most of them."""
_dice = random.Random()
"""The global generators belong to the user."""


class Listener(Protocol):
    """Hears of gradients; on the thread that runs the backward."""

    def come(self, parameter: torch.Tensor, *, final: bool) -> None:
        """A gradient was added to the parameter's; `final`: with what other ranks add to it.

        Raises:
            ConfigError: layer-wise update cannot follow.
        """

    def filled(self, parameter: torch.Tensor, final: torch.Tensor) -> None:
        """`p.grad` should hold, from now on, what `come` has called final.

        Raises:
            ConfigError: it does not.
        """


class Finality(Protocol):
    """Says when a parameter's gradient has come. Data parallel says it after the reduction."""

    def refusal(self) -> str | None:
        """Why it cannot, in words."""

    def listen(
        self, parameters: Iterable[torch.Tensor], listener: Listener
    ) -> list[RemovableHandle]:
        """Tell of each of these parameters, every time that a gradient was added to it."""

    def in_place(self, parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Inside it `p.grad` is what is final."""

    def step_begins(self) -> None:
        """Tell of what was added and will not become final in this step.

        Raises:
            ConfigError: the listener's.
        """

    def stop(self) -> None:
        """Listen no more."""


class Accumulated:
    """`Finality` of a single process: autograd has accumulated it."""

    def refusal(self) -> str | None:
        """It always can."""
        return None

    def listen(
        self, parameters: Iterable[torch.Tensor], listener: Listener
    ) -> list[RemovableHandle]:
        """A hook each."""

        @untraced
        def hook(parameter: torch.Tensor) -> None:
            listener.come(parameter, final=True)

        return [p.register_post_accumulate_grad_hook(hook) for p in parameters]

    def in_place(self, parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    def step_begins(self) -> None:
        """Nothing is left."""

    def stop(self) -> None:
        """Nothing was begun."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A parameter and its gradient as they were when its update was made, or could have been."""

    parameter_version: int
    gradient: torch.Tensor
    gradient_version: int
    first: int
    sample: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Noted:
        """Note what is there now."""
        gradient = parameter.grad
        assert gradient is not None, "a gradient has come"
        first = _dice.randrange(_stride(gradient))
        sample = _sample(gradient, first)
        return cls(parameter._version, gradient, gradient._version, first, sample)

    def changed(self, parameter: torch.Tensor) -> str | None:
        """What has changed since, in words."""
        if parameter.grad is None:
            return "its gradient was cleared"
        if parameter.grad is not self.gradient:
            return "its gradient was replaced"
        if self.gradient._version != self.gradient_version or not torch.equal(
            _sample(self.gradient, self.first), self.sample
        ):
            return "its gradient was changed"
        if parameter._version != self.parameter_version:
            return "its value was changed"
        return None


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether elements drawn at random hold the same bytes."""
    first = _dice.randrange(_stride(one))
    return torch.equal(_sample(one, first), _sample(other, first))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The elements, one after the other, without copying where that is possible."""
    held = gradient.detach()
    held = held._values() if held.is_sparse else held
    if staging.is_dense(held):
        return held.as_strided((held.numel(),), (1,))
    return held.reshape(-1)


def _stride(gradient: torch.Tensor) -> int:
    count = gradient._values().numel() if gradient.is_sparse else gradient.numel()
    return max(1, count // SAMPLES)


def _sample(gradient: torch.Tensor, first: int) -> torch.Tensor:
    """Bytes of some elements, a copy: NaNs are equal to themselves."""
    some = _values(gradient)[first :: _stride(gradient)][: SAMPLES + 1]
    return some.resolve_conj().clone().view(torch.uint8)


Options = list[dict[str, Any]]


def options_of(optimizer: Optimizer) -> Options:
    """Every group's options now: learning rate, weight decay, ..."""
    return [
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def option_changed(then: Options, now: Options) -> str | None:
    """The first option that differs, in words."""
    for g, (before, after) in enumerate(zip(then, now, strict=False)):
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key):
                return f"{key} of group {g} went from {before.get(key)!r} to {after.get(key)!r}"
    return None if len(then) == len(now) else f"{len(then)} groups became {len(now)}"
