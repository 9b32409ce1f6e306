"""The gradients that are final, and records of those an update was made from."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightck.loop.hooks import untraced
from lightck.state import tensor_layout

SAMPLES = 64
"""Number of a gradient's elements that are compared: scaling or zeroing changes most of them."""
_dice = random.Random()
"""Generator of our own, since the global ones belong to the user."""


class GradientListener(Protocol):
    """Receiver of gradients; called on the thread that runs the backward."""

    def gradient_added(self, parameter: torch.Tensor, *, final: bool) -> None:
        """Note that a gradient was added to the parameter's.

        `final`: that includes what other ranks add to it.

        Raises:
            ConfigError: layer-wise update cannot follow.
        """

    def gradient_placed(self, parameter: torch.Tensor, final: torch.Tensor) -> None:
        """Check that `p.grad` holds, from now on, what `gradient_added` has called final.

        Raises:
            ConfigError: it does not.
        """


class FinalGradients(Protocol):
    """The report of gradients that are final; in data parallel they are after the reduction."""

    def refusal(self) -> str | None:
        """Say why it cannot report that; None if it can."""

    def listen(
        self, parameters: Iterable[torch.Tensor], listener: GradientListener
    ) -> list[RemovableHandle]:
        """Report each of these parameters, every time that a gradient was added to it."""

    def in_place(self, parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Make `p.grad` what is final, inside the block."""

    def step_begins(self) -> None:
        """Report gradients that were added and will not become final in this step.

        Raises:
            ConfigError: the listener has raised it.
        """

    def stop(self) -> None:
        """Stop listening."""


class LocalGradients:
    """`FinalGradients` of a single process: one is final once autograd has accumulated it."""

    def refusal(self) -> str | None:
        """Return None: it can always report that."""
        return None

    def listen(
        self, parameters: Iterable[torch.Tensor], listener: GradientListener
    ) -> list[RemovableHandle]:
        """Register a hook on each parameter."""

        @untraced
        def hook(parameter: torch.Tensor) -> None:
            listener.gradient_added(parameter, final=True)

        return [p.register_post_accumulate_grad_hook(hook) for p in parameters]

    def in_place(self, parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Do nothing: `p.grad` always is what is final."""
        return nullcontext()

    def step_begins(self) -> None:
        """Do nothing: every gradient has become final."""

    def stop(self) -> None:
        """Do nothing: there is nothing to stop but the hooks, which the caller has."""


@dataclass(frozen=True, slots=True)
class GradientRecord:
    """A record of a parameter and its gradient when its update was made, or could have been."""

    parameter_version: int
    gradient: torch.Tensor
    gradient_version: int
    first: int
    sample: torch.Tensor

    @classmethod
    def take(cls, parameter: torch.Tensor) -> GradientRecord:
        """Record the parameter and its gradient as they are now."""
        gradient = parameter.grad
        assert gradient is not None, "a gradient was added"
        first = _dice.randrange(_stride(gradient))
        sample = _sample(gradient, first)
        return cls(parameter._version, gradient, gradient._version, first, sample)

    def change(self, parameter: torch.Tensor) -> str | None:
        """Say what has changed since; None if nothing has."""
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


def same_samples(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether elements drawn at random hold the same bytes in both tensors."""
    first = _dice.randrange(_stride(one))
    return torch.equal(_sample(one, first), _sample(other, first))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements, one after the other, without copying where that is possible."""
    held = gradient.detach()
    held = held._values() if held.is_sparse else held
    if tensor_layout.is_dense(held):
        return held.as_strided((held.numel(),), (1,))
    return held.reshape(-1)


def _stride(gradient: torch.Tensor) -> int:
    count = gradient._values().numel() if gradient.is_sparse else gradient.numel()
    return max(1, count // SAMPLES)


def _sample(gradient: torch.Tensor, first: int) -> torch.Tensor:
    """Copy some elements as bytes, so that NaNs are equal to themselves."""
    some = _values(gradient)[first :: _stride(gradient)][: SAMPLES + 1]
    return some.resolve_conj().clone().view(torch.uint8)


GroupOptions = list[dict[str, Any]]


def options_of(optimizer: Optimizer) -> GroupOptions:
    """Return every group's options as they are: learning rate, weight decay, ..."""
    return [
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def option_changed(then: GroupOptions, now: GroupOptions) -> str | None:
    """Describe the first option that differs; None if none does."""
    for g, (before, after) in enumerate(zip(then, now, strict=False)):
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key):
                return f"{key} of group {g} went from {before.get(key)!r} to {after.get(key)!r}"
    return None if len(then) == len(now) else f"{len(then)} groups became {len(now)}"
