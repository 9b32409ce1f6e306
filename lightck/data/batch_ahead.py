"""Detect loops that take batches ahead of the step that they are for, as far as can be told.

It cannot be told for sure: a batch that a function makes looks like dropout, one from a second
loader like one for the next step. So nothing is refused here; what the first steps show is logged
once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightck.events import event
from lightck.state import rng

STEPS = 4
"""Number of steps watched after the first, where loops of every kind draw a batch of their own."""

_FETCHED = (
    "NAMES move(s) during each step and at no other time, as where the next step's batch is fetched"
    " before this one's update (nanoGPT): a resume would then train on other batches. If so, take"
    " them from lightck.Prefetched(fn), and give it in extras; if the model or the loss draws"
    " these numbers, all is well"
)
_LATE = (
    "each batch is taken when the forward of a step has begun, as where it is for the next step: a"
    " resume would then leave it out. If so, take it at the top of the iteration; if it is learnt"
    " from in the same step, all is well"
)
_MORE = (
    "before the first step ended the loader gave MORE batches more than for each of the next"
    " ones, as where something draws ahead of the loop: a resume would then leave them out. If so,"
    " iterate over the DataLoader itself; if the loop left batches out, all is well"
)


@dataclass(eq=False)
class Draws:
    """Watches what is drawn in the first steps after attach."""

    model: nn.Module
    on: bool = True
    """True while steps are still watched."""
    _counts: list[tuple[int, int]] = field(default_factory=list)
    """For each step, the numbers of batches drawn before its forward began, and after."""
    _before: int = 0
    _after: int = 0
    _loads: bool = False
    """True once a loader was iterated: the data come from it."""
    _end: dict[str, Any] | None = None
    _forward: dict[str, Any] | None = None
    _outside: set[str] = field(default_factory=set)
    """Generators that moved between a step's end and the next forward."""
    _inside: set[str] = field(default_factory=lambda: {"torch", "numpy", "python"})
    """Generators that moved between the forward and the end of every step."""

    def iterating(self, *, drawing: bool, inside: bool) -> None:
        """Note that a pass begins or ends, or if `drawing` that a followed loader gives a batch."""
        if not drawing:
            self._loads = True
            self._counts.clear()
            # A pass that ends was asked for one batch more than it had.
            self._before = self._after = 0
        elif inside:
            self._after += 1
        else:
            self._before += 1

    def forward_begins(self) -> None:
        """Take the generators where the forward of a step begins."""
        self._forward = rng.capture()
        if self._end is not None:
            self._outside |= _moved(self._end, self._forward)

    def step_ended(self, states: dict[str, Any]) -> None:
        """Note that a step has ended with these generators; after enough steps, log the finding."""
        if self._forward is None:  # at attach; or the forward went unseen
            return
        self._inside &= _moved(self._forward, states)
        self._end, self._forward = states, None
        self._counts.append((self._before, self._after))
        self._before = self._after = 0
        if len(self._counts) > STEPS:
            self.on = False
            why = self._why()
            if why:
                event("batch_ahead", logging.WARNING, why=why)

    def _why(self) -> str:
        first, *rest = self._counts
        drawn = [before + after for before, after in rest]
        if all(before == 0 < after for before, after in rest):
            return _LATE
        if sum(first) > drawn[0] > 0 and len({*drawn}) == 1:
            return _MORE.replace("MORE", str(sum(first) - drawn[0]))
        names = self._inside - self._outside
        if self._loads or any(drawn) or not names:
            return ""
        if names == {"torch"} and _drops(self.model):
            return ""
        return _FETCHED.replace("NAMES", f"the global generator(s) of {', '.join(sorted(names))}")


def _moved(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    names = {"torch"} if not torch.equal(before["torch"], now["torch"]) else set()
    return names | {n for n in ("numpy", "python") if now[n] != before[n]}


def _drops(model: nn.Module) -> bool:
    """Tell whether a module has a rate of dropout, by the names that modules use for it."""
    for module in model.modules():
        named = {k.lower(): v for k, v in vars(module).items() if isinstance(v, int | float)}
        if "drop" in type(module).__name__.lower() and named.get("p", 0) > 0:
            return True
        if any("drop" in name and value > 0 for name, value in named.items()):
            return True
    return False
