"""Extras that change while a batch is drawn, though they are taken at the start of the forward.

The forward comes after the draw. A counter of batches is one ahead there, and a resumed run, which
draws the batch again, stays one ahead. Where a draw is seen this is an error in the first steps,
and a warning later. Where none is seen, what changes before the forward may or may not have changed
in a draw: a warning says so.

A batch that is drawn ahead of the step's end is drawn again by a resumed run, whenever extras are
taken: during such a draw nothing but generators may change.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from lightck.errors import StateError
from lightck.events import event
from lightck.journal.copy_buffer import is_readable
from lightck.state import tensor_support
from lightck.state.extras import AT_FORWARD, AT_STEP, Extra, is_loader

FIRST_STEPS = 3
"""The number of steps since attach in which movement is an error."""
MOST_S = 1e-4
"""Seconds: an extra that takes longer to look at is looked at in the first steps only."""
_SAMPLES = 512
"""The number of values that are looked at in a long array or list, about."""

Marks = dict[str, Any]
"""Per extra: a value that stays equal while the state does, as far as it is looked at."""


@dataclass(eq=False)
class Movement:
    """Looks at extras around each draw. Used by the training thread, from step end to forward."""

    extras: Sequence[Extra]
    count: int = 0
    """The number of movements while a batch was drawn."""
    _steps: int = 0
    """The number of steps that have ended since attach."""
    _before: Marks = field(default_factory=dict)
    """The marks from before the draw that is under way."""
    _ahead: bool = False
    """True if that draw may be for a step after the next step end."""
    _still: Marks = field(default_factory=dict)
    """The marks, from the step's end or the last draw, of extras whose instant the user did not
    give."""
    _least_s: dict[str, float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Pick the extras to look at: generators, and what is taken at the step's end, may move."""
        self._behind = [extra for extra in self.extras if extra.instant == "forward"]
        self._others = [e for e in self.extras if not e.is_generator]

    def step_ended(self) -> None:
        """Begin a window between a step's end and the forward, in which batches are drawn."""
        self._steps, self._before = self._steps + 1, {}
        unsaid = (e for e in self._looked_at(self._behind) if not (e.known or e.name in self._told))
        self._still = self._marks(unsaid)

    def forget(self) -> None:
        """Forget what was seen: extras were replaced, which is no movement."""
        self._before, self._still = {}, {}

    def drawing(self, source: Any, *, ahead: bool, within: bool) -> None:
        """Note the extras before the loop gets a batch of `source`.

        With `within`, the forward of the step has begun. With `ahead`, the batch is for a later
        step.
        """
        self._ahead, looked_at = ahead, self._behind
        if ahead:  # loaders count what they gave; a `Prefetched` makes its batch with anything
            looked_at = [
                e
                for e in self._others
                if e.subject is not source and (within or not is_loader(e.subject))
            ]
        if self._steps > 0 or within:
            self._before = self._marks(self._looked_at(looked_at))

    def drawing_none(self) -> None:
        """Take note that no batch comes: there was none left, or a pass begins."""
        self._before = {}

    def drawn(self, step: int) -> None:
        """Compare the extras after the draw with those before it.

        Raises:
            StateError: an extra moved meanwhile, in one of the first steps.
        """
        before, self._before = self._before, {}
        now = self._marks(extra for extra in self._others if extra.name in before)
        for name in now:
            if now[name] != before[name]:
                self._moved(name, step)
            if name in self._still:
                self._still[name] = now[name]

    def forward(self, step: int) -> None:
        """End the window: tell of extras that changed in it where no draw was seen."""
        still, self._still, self._before = self._still, {}, {}
        now = self._marks(extra for extra in self._behind if extra.name in still)
        for name in now:
            if now[name] != still[name]:
                self._tell(
                    name,
                    f"it moved after step {step} and before the next forward, and that no batch was"
                    f" drawn meanwhile was not seen. {AT_STEP}. {AT_FORWARD}. Say which",
                )

    def _looked_at(self, extras: Iterable[Extra]) -> Iterable[Extra]:
        if self._steps <= FIRST_STEPS:
            return extras
        return (e for e in extras if self._least_s.get(e.name, 0.0) <= MOST_S)

    def _moved(self, name: str, step: int) -> None:
        self.count += 1
        if self._ahead:
            why = (
                f"it moved after step {step} while a batch was drawn ahead of its step: a resumed"
                " run, which draws that batch again, would be ahead by one, whenever this is taken."
                " Change it in the loop, once a step, and not where the batch is made"
            )
        else:
            why = (
                f"it moved while a batch was drawn after step {step}, but is taken at the start of"
                " the forward, behind that: a resumed run, which draws the batch again, would be"
                f" ahead by one. Give it as lightck.at_step(...): {AT_STEP}"
            )
        if self._steps <= FIRST_STEPS:
            raise StateError(
                f"extras[{name!r}]: {why}. No snapshot with it was committed",
                path=f"extras/{name}",
            )
        self._tell(name, why)

    def _tell(self, name: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            event("extra_moved", logging.WARNING, name=name, why=why)

    def _marks(self, extras: Iterable[Extra]) -> Marks:
        found: Marks = {}
        for extra in extras:
            began_s = time.perf_counter()
            try:
                found[extra.name] = _mark_of(extra)
            except Exception:  # noqa: BLE001, S112 - `state_dict` fails: told where it is taken
                continue
            spent_s = time.perf_counter() - began_s
            self._least_s[extra.name] = min(spent_s, self._least_s.get(extra.name, spent_s))
        return found


def _mark_of(extra: Extra) -> Any:
    if isinstance(extra.subject, nn.Module):  # whose `state_dict` may communicate
        held = chain(extra.subject.parameters(), extra.subject.buffers())
        return [(id(tensor), tensor._version) for tensor in held]
    return _mark(extra.state())


def _mark(tree: Any) -> Any:
    """Reduce a tree to plain values that `==` compares bit by bit."""
    if isinstance(tree, torch.Tensor):
        local = tensor_support.local(tree).detach()
        said = ("tensor", local.dtype, tuple(local.shape))
        if not is_readable(local) or local.layout is not torch.strided or local.is_quantized:
            return said
        some = _sampled(local.resolve_conj().resolve_neg().reshape(-1)).contiguous()
        return (*said, some.view(torch.uint8).numpy().tobytes())
    if isinstance(tree, np.ndarray | np.generic):
        flat = np.asarray(tree).reshape(-1)
        return ("array", flat.dtype.str, _sampled(flat).tobytes())
    if isinstance(tree, dict):
        return [(key, _mark(tree[key])) for key in _sampled([*tree])], len(tree)
    if isinstance(tree, list | tuple):
        return [_mark(each) for each in _sampled(tree)], len(tree)
    if isinstance(tree, float):
        return tree.hex()
    if isinstance(tree, int | str | bytes | type(None)):
        return type(tree), tree
    if isinstance(tree, set | frozenset):
        return sorted(map(repr, tree))
    if isinstance(tree, deque):
        return _mark([*tree])
    return repr(tree) if isinstance(tree, bytearray | complex) else type(tree).__name__


def _sampled(values: Any) -> Any:
    """Return all values if they are few, else some that are evenly spread."""
    return values[:: max(1, len(values) // _SAMPLES)]
