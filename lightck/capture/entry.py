"""An entry of the boundary journal, sealed: what is in it is said in `journaled.py`.

Code and data are cold when a step ends: whatever is done costs ten times what it does in a loop, so
as little as possible is done. Most of a state is what it was at the instant before; while all of it
are the same objects, nothing but the bytes of generators and tensors is put in anew.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.capture import parcel
from lightck.capture.live import Live
from lightck.capture.parcel import Kept, Parcel, form, part
from lightck.capture.shelf import Shelf
from lightck.errors import CorruptSnapshotError, RegionFullError
from lightck.region.journal import JournalEntry

MOST_EXTRA_BYTES = 1 << 20
"""Of extras in an entry at most: more would cost every step a millisecond."""
_AS_BYTES = ("torch", "cuda")
"""Generators that give tensors; those of others are the same objects until somebody draws."""


class ExtrasFullError(RegionFullError):
    """Extras have more bytes than may be written at every step; the largest is named."""


@dataclass(frozen=True, eq=False)
class _Last:
    """The pickles that served last time, and what they were made of, the very objects."""

    objects: list[Any]
    at: list[int]
    """Where the bytes of torch's generators begin, and end."""
    pickles: list[bytes]


@dataclass(frozen=True, eq=False)
class _Extras:
    """What was said of extras last, and what it was made of, the very objects."""

    objects: list[Any]
    at: int
    """Where their bytes begin."""
    pickled: bytes
    parts: list[memoryview | bytes]


@dataclass(eq=False)
class Sealing:
    """Makes entries. For one thread at a time."""

    _kept: Kept = field(default_factory=Kept)
    _last: dict[int, _Last] = field(default_factory=dict)
    """By the number of instants whose generators are in it."""
    _extras: dict[int, _Extras] = field(default_factory=dict)
    """Likewise."""
    _names: dict[int, list[list[str]]] = field(default_factory=dict)
    """Of each optimizer's parameters, by group."""
    _states: dict[int, tuple[torch.Tensor, bytes]] = field(default_factory=dict)
    """Bytes of torch's generators at each of them."""

    def sealed(
        self,
        shelf: Shelf,
        copies: Mapping[str, torch.Tensor],
        trees: tuple[dict[str, Any], dict[str, Any]],
        share_digest: bytes,
    ) -> bytes:
        """The bytes of an entry, without the step, which the journal has beside it.

        Args:
            shelf: has just been filled with the rank's own small tensors.
            copies: what was filled in, by name.
            trees: values of (a) and (b), plain.
            share_digest: of the share map.

        Raises:
            ExtrasFullError: extras have more than `MOST_EXTRA_BYTES`.
        """
        first, second = trees
        held = Parcel(self._kept)
        said = shelf.packed(held, copies)
        drawn = [first["rng"], second["rng"]] if "rng" in second else [first["rng"]]
        objects = [said, second["optimizers"], second.get("share"), share_digest]
        at = []
        for i, states in enumerate(drawn):
            objects += [state for name, state in states.items() if name not in _AS_BYTES]
            at.append(held.size)
            held.add(self._bytes(i, states["torch"]))
        at.append(held.size)
        changing = self._changing(held, first["extras"], second["extras"], drawn)
        last = self._last.get(len(drawn))
        if last is None or last.at != at or not _identical(last.objects, objects):
            fixed = [said, second["optimizers"], second.get("share"), share_digest]
            last = _Last(objects, at, self._pickled(fixed, drawn, at))
            self._last[len(drawn)] = last
        return held.sealed([changing, *last.pickles])

    def _changing(
        self,
        held: Parcel,
        first: dict[str, Any],
        second: dict[str, Any],
        drawn: list[dict[str, Any]],
    ) -> bytes:
        """Extras, and generators that give tensors, pickled."""
        cuda = [states.get("cuda") for states in drawn]
        objects, at = [*first.values(), *second.values(), *cuda], held.size
        known = self._extras.get(len(drawn))
        if known is not None and known.at == at and _identical(known.objects, objects):
            for each in known.parts:
                held.add(each)
            return known.pickled
        begun = len(held.parts)
        pickled = held.pickled({"first": first, "second": second, "cuda": cuda})
        if len(pickled) + held.size - at > MOST_EXTRA_BYTES:
            raise ExtrasFullError(_too_much(first, second))
        self._kept.parcels = held.parcels or {}
        self._extras[len(drawn)] = _Extras(objects, at, pickled, held.parts[begun:])
        return pickled

    def _bytes(self, i: int, state: torch.Tensor) -> bytes:
        """(b) has the generators of (a), too, the very tensor."""
        known = self._states.get(i)
        if known is None or known[0] is not state:
            known = self._states[i] = state, state.numpy().tobytes()
        return known[1]

    def _pickled(self, fixed: list[Any], drawn: list[dict[str, Any]], at: list[int]) -> list[bytes]:
        """All but what changes at every instant."""
        said, optimizers, share, digest = fixed
        held = Parcel(self._kept)
        held.bare(None)  # number 0 is what changes
        tree = {
            "tensors": held.part("tensors", said),
            "optimizers": self._optimizers(held, optimizers),
            "share": share if share is None else held.part("share", share),
            "share_digest": digest,
            "rng": [
                self._generators(held, i, states, at[i]) for i, states in enumerate(drawn)
            ],
            "changing": part(0),
        }  # fmt: skip
        held.bare(tree)
        return held.pickles[1:]

    def _optimizers(self, held: Parcel, trees: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With their parameters' names, which are the most, apart from what a schedule changes."""
        said = []
        for i, tree in enumerate(trees):
            names = [group["params"] for group in tree["groups"]]
            known = self._names.get(i)
            if known is None or not _identical(known, names):
                self._names[i] = names  # one part, however many groups there are
            options = [group["options"] for group in tree["groups"]]
            said.append({**tree, "groups": options, "params": held.part(f"{i}", self._names[i])})
        return said

    def _generators(self, held: Parcel, i: int, states: dict[str, Any], at: int) -> dict[str, Any]:
        plain = {
            name: held.part(f"{i}/{name}", state)
            for name, state in states.items()
            if name not in _AS_BYTES
        }
        return {"torch": form(states["torch"], at), **plain}


@dataclass(frozen=True)
class Unpacked:
    """What an entry of the journal holds."""

    at_step: bytes
    """As in a manifest; likewise below."""
    at_forward: bytes
    lives: tuple[Live, ...]
    """The rank's own small tensors."""
    share_digest: bytes


def unpacked(found: JournalEntry, *, context: str) -> Unpacked:
    """Read an entry; runs no code.

    Raises:
        CorruptSnapshotError: it is not what `sealed` makes.
    """
    tree = parcel.opened(found.blob, context=context)
    try:
        tensors, first, second, digest = _arranged(tree, found.step)
        lives = tuple(_live(name, said) for name, said in tensors.items())
        if type(digest) is bytes:
            return Unpacked(parcel.closed(first), parcel.closed(second), lives, digest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{context}: no boundary state: {error!r}") from error
    raise CorruptSnapshotError(f"{context}: no boundary state")


def _live(name: str, said: dict[str, Any]) -> Live:
    role, layer, tensor = said["role"], said["layer"], said["tensor"]
    if not isinstance(tensor, torch.Tensor) or {type(name), type(role), type(layer)} != {str}:
        raise TypeError(f"{name!r} is no tensor")
    return Live(name, role, layer, tensor, frozenset(map(int, said["holders"])), sync=True)


def _arranged(tree: Any, step: int) -> tuple[Any, Any, Any, Any]:
    """Tensors, both instants, and the share digest, of what `sealed` made.

    Raises:
        KeyError, TypeError, ...: it is not what `sealed` makes.
    """
    changing, rng = tree["changing"], [dict(states) for states in tree["rng"]]
    for states, cuda in zip(rng, changing["cuda"], strict=True):
        if cuda is not None:
            states["cuda"] = cuda
    optimizers = [_arranged_optimizer(said) for said in tree["optimizers"]]
    second = {"optimizers": optimizers, "extras": changing["second"]}
    if tree["share"] is not None:
        second["share"] = tree["share"]
    second["step"] = step
    if len(rng) > 1:
        second["rng"] = rng[1]
    return (
        tree["tensors"],
        {"rng": rng[0], "extras": changing["first"]},
        second,
        tree["share_digest"],
    )


def _arranged_optimizer(said: dict[str, Any]) -> dict[str, Any]:
    """As `Options.take` gives it."""
    rows = zip(said["params"], said["groups"], strict=True)
    groups = [{"params": names, "options": options} for names, options in rows]
    return {**{k: v for k, v in said.items() if k != "params"}, "groups": groups}


def _too_much(first: dict[str, Any], second: dict[str, Any]) -> str:
    sizes = {name: parcel.weight((first.get(name), second.get(name))) for name in first | second}
    name, most = max(sizes.items(), key=operator.itemgetter(1))
    return (
        f"extras[{name!r}] has {most} bytes of {sum(sizes.values())} that extras have beside large"
        f" tensors: more than the {MOST_EXTRA_BYTES} that are written at every step"
    )


def _identical(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
