"""Take and restore `extras`: the user's own state, by name.

It is that of schedulers, scalers, loaders, generators, counters, ...
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lightck.errors import StateError
from lightck.state import boundary_codec, data_loaders, rng
from lightck.types import Stateful

OF_MODULES = "model/"
"""Prefix of the names of modules' extra state; behind it is the key that `state_dict` has."""

Instant = Literal["step", "forward", "both"]
_GENERATORS = (torch.Generator, np.random.Generator, random.Random)
_AT_FORWARD = (torch.nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
"""Classes of torch's own, in which nothing changes when a batch is drawn."""
_CONTAINERS = (Mapping, Sequence, Set)
"""Types that can be iterated, but not as a loop iterates over its data."""

POLICY = "@policy"
"""The name under which a snapshot has what policies learn from."""

EPOCHS = "@epochs"
"""The name under which a snapshot has the number of epochs that the loop had marked."""
_MARKED = "marked"


class Epochs:
    """The number of epochs that the loop has marked, over all lives of the run."""

    def __init__(self, marked: int) -> None:
        """Go on from what a snapshot had, or an earlier handle left; 0 at the beginning."""
        self._state = {_MARKED: marked}

    @property
    def marked(self) -> int:
        """Return the number."""
        return self._state[_MARKED]

    @property
    def extra(self) -> Extra:
        """Return the extra that it is in a snapshot: an epoch is marked behind its last step."""
        return Extra(EPOCHS, self._state, "forward")

    def mark(self) -> None:
        """Count one more."""
        self._state[_MARKED] += 1

    @staticmethod
    def held(extras: Mapping[str, Any]) -> int:
        """Return the number that a snapshot's extras have; 0 where they have none."""
        kept = extras.get(EPOCHS)
        found = kept.get(_MARKED) if isinstance(kept, dict) else None
        return found if type(found) is int and found >= 0 else 0


def is_own(name: str) -> bool:
    """Tell whether a name among a snapshot's extras is lightck's own, which no user gave."""
    return name.startswith("@")


AT_STEP = (
    "lightck.at_step(it) takes it at the end of the step: what moves when a batch is drawn (a"
    " position in the data, a counter of batches)"
)
AT_FORWARD = (
    "lightck.at_forward(it) takes it at the start of the next forward: what the loop changes in a"
    " step or after it (an average of the weights, metrics, a schedule)"
)


@dataclass(frozen=True, slots=True)
class At:
    """An extra with the instant at which it is taken."""

    subject: Any
    instant: Instant


def at_step(subject: Any) -> At:
    """Take this extra at the end of the step, because drawing a batch changes it.

    Such are data positions and counters of batches. Loaders, samplers and iterators are taken then
    without being told.
    """
    return At(subject, "step")


def at_forward(subject: Any) -> At:
    """Take this extra at the start of the next forward: a step, or the loop after it, changes it.

    Such are averages, metrics and schedules. torch's own, and dicts, are taken then without being
    told.
    """
    return At(subject, "forward")


@dataclass(frozen=True, slots=True)
class Extra:
    """One object of the user's, with its name and the instant at which its state is taken."""

    name: str
    subject: Any
    instant: Instant
    known: bool = True
    """True if the instant was given, or follows from what the object is."""

    @property
    def is_generator(self) -> bool:
        """Tell whether the object is a random generator."""
        return isinstance(self.subject, _GENERATORS)

    def state(self) -> Any:
        """Return its state now, which may alias what the subject still changes."""
        subject = self.subject
        if isinstance(subject, dict):
            return subject
        if isinstance(subject, torch.Generator):
            return subject.get_state()
        if isinstance(subject, np.random.Generator):
            return subject.bit_generator.state
        if isinstance(subject, random.Random):
            return rng.packed(subject.getstate())
        return {} if data_loaders.not_begun(subject) else data_loaders.position(subject)

    def load(self, state: Any) -> None:
        """Put a restored state into the subject; a dict is filled in place."""
        subject = self.subject
        if isinstance(subject, dict):
            subject.clear()
            subject.update(state)
        elif isinstance(subject, torch.Generator):
            subject.set_state(state)
        elif isinstance(subject, np.random.Generator):
            subject.bit_generator.state = state
        elif isinstance(subject, random.Random):
            subject.setstate(rng.unpacked(state))
        else:
            data_loaders.load(subject, state)


def generators(extras: Sequence[Extra]) -> dict[str, Any]:
    """Return the states, plain, of all generators that a batch may be made with."""
    own = {
        extra.name: boundary_codec.plain(extra.state(), boundary_codec.join("extras", extra.name))
        for extra in extras
        if extra.is_generator
    }
    return {"rng": rng.capture(), "extras": own}


def stand(held: dict[str, Any], extras: Sequence[Extra]) -> None:
    """Set the generators to states that `generators` has returned, rebuilt."""
    rng.restore(held["rng"])
    for extra in extras:
        if extra.is_generator and extra.name in held["extras"]:
            extra.load(held["extras"][extra.name])


def parse(extras: Mapping[str, Any] | None) -> tuple[Extra, ...]:
    """Name each extra and choose the instant at which its state is taken.

    Raises:
        StateError: an object that lightck cannot take state from, or a name that is no string.
    """
    every = tuple(_parse(name, given) for name, given in (extras or {}).items())
    for extra in every:
        if isinstance(extra.subject, data_loaders.Telling):
            extra.subject.draw_from(tuple(each for each in every if each.is_generator))
    return every


def _parse(name: Any, given: Any) -> Extra:
    if not isinstance(name, str):
        raise StateError(f"extras: the name {name!r} is not a string")
    if is_own(name):
        raise StateError(f"extras: {name!r} begins with '@', as names of lightck's own do")
    if name.startswith(OF_MODULES):
        raise StateError(f"extras: {name!r} begins with {OF_MODULES!r}, as what modules save does")
    subject, instant = (given.subject, given.instant) if isinstance(given, At) else (given, None)
    if isinstance(subject, _GENERATORS):
        return Extra(name, subject, instant or "both")
    if isinstance(subject, dict):
        return Extra(name, subject, instant or "forward", instant is not None)
    if isinstance(subject, Stateful):
        why = data_loaders.refusal(subject)
        if why:
            raise StateError(f"extras[{name!r}] {why}", path=f"extras/{name}")
        default: Instant = "step" if is_loader(subject) else "forward"
        known = default == "step" or isinstance(_prepared(subject), _AT_FORWARD)
        return Extra(name, subject, instant or default, known or instant is not None)
    raise StateError(
        f"extras[{name!r}] is a {type(subject).__name__}: expected state_dict/load_state_dict,"
        " a torch, NumPy or random generator, or a dict",
        path=f"extras/{name}",
    )


def _prepared(subject: Any) -> Any:
    """Return torch's scheduler inside of Accelerate's, and anything else as it is."""
    if type(subject).__module__ == "accelerate.scheduler":
        return getattr(subject, "scheduler", subject)
    return subject


def must_be_known(extras: Sequence[Extra]) -> None:
    """Refuse an extra whose right instant only the user knows, and has not said.

    Raises:
        StateError: there is one; names the first, and says what to write.
    """
    for extra in extras:
        if not (extra.known or isinstance(extra.subject, dict)):
            raise StateError(
                f"extras[{extra.name!r}] is a {type(extra.subject).__name__}, and when its state is"
                f" to be taken cannot be known. {AT_STEP}. {AT_FORWARD}. Write one of them:"
                f" extras={{{extra.name!r}: lightck.at_forward(...)}}",
                path=f"extras/{extra.name}",
            )


def is_loader(subject: Any) -> bool:
    """Tell whether the object hands out batches: its position advances before the next forward."""
    if isinstance(subject, _AT_FORWARD) or isinstance(subject, _CONTAINERS):
        return False
    return hasattr(type(subject), "__iter__") or hasattr(type(subject), "__next__")
