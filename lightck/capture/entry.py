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

from lightck.capture import peek
from lightck.capture.parcel import Kept, Parcel, form, part
from lightck.capture.shelf import Shelf

_AS_BYTES = ("torch", "cuda")
"""Generators that give tensors; those of others are the same objects until somebody draws."""


@dataclass(frozen=True, eq=False)
class _Last:
    """The pickles that served last time, and what they were made of, the very objects."""

    objects: list[Any]
    at: list[int]
    """Where the bytes of torch's generators begin, and end."""
    pickles: list[bytes]


@dataclass(eq=False)
class Sealing:
    """Makes entries. For one thread at a time."""

    _kept: Kept = field(default_factory=Kept)
    _last: dict[int, _Last] = field(default_factory=dict)
    """By the number of instants whose generators are in it."""
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
        """
        first, second = trees
        held = Parcel()
        said = shelf.packed(held, copies)
        drawn = [first["rng"], second["rng"]] if "rng" in second else [first["rng"]]
        objects = [said, second["optimizers"], second.get("share"), share_digest]
        at = []
        for i, states in enumerate(drawn):
            objects += [state for name, state in states.items() if name not in _AS_BYTES]
            at.append(held.size)
            held.add(self._bytes(i, states["torch"]))
        at.append(held.size)
        changing = held.pickled({
            "first": first["extras"],
            "second": second["extras"],
            "cuda": [states.get("cuda") for states in drawn],
        })  # fmt: skip
        last = self._last.get(len(drawn))
        if last is None or last.at != at or not _identical(last.objects, objects):
            fixed = [said, second["optimizers"], second.get("share"), share_digest]
            last = _Last(objects, at, self._pickled(fixed, drawn, at))
            self._last[len(drawn)] = last
        return held.sealed([changing, *last.pickles])

    def _bytes(self, i: int, state: torch.Tensor) -> bytes:
        """(b) has the generators of (a), too, the very tensor."""
        known = self._states.get(i)
        if known is None or known[0] is not state:
            known = self._states[i] = state, peek.bytes_of(state)
        return known[1]

    def _pickled(self, fixed: list[Any], drawn: list[dict[str, Any]], at: list[int]) -> list[bytes]:
        """All but what changes at every instant."""
        said, optimizers, share, digest = fixed
        held = Parcel(self._kept)
        held.pickled(None)  # number 0 is what changes
        tree = {
            "tensors": held.part("tensors", said),
            "optimizers": _optimizers(held, optimizers),
            "share": share if share is None else held.part("share", share),
            "share_digest": digest,
            "rng": [
                self._generators(held, i, states, at[i]) for i, states in enumerate(drawn)
            ],
            "changing": part(0),
        }  # fmt: skip
        held.pickled(tree)
        return held.pickles[1:]

    def _generators(self, held: Parcel, i: int, states: dict[str, Any], at: int) -> dict[str, Any]:
        plain = {
            name: held.part(f"{i}/{name}", state)
            for name, state in states.items()
            if name not in _AS_BYTES
        }
        return {"torch": form(states["torch"], at), **plain}


def arranged(tree: Any, step: int) -> tuple[Any, Any, Any, Any]:
    """Tensors, both instants, and the share digest, of what `sealed` made.

    Raises:
        KeyError, TypeError, ...: it is not what `sealed` makes.
    """
    changing, rng = tree["changing"], [dict(states) for states in tree["rng"]]
    for states, cuda in zip(rng, changing["cuda"], strict=True):
        if cuda is not None:
            states["cuda"] = cuda
    second = {"optimizers": tree["optimizers"], "extras": changing["second"]}
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


def _optimizers(held: Parcel, trees: list[dict[str, Any]]) -> Any:
    """With their parameters' names, which are the most, apart from what a schedule changes."""
    return [
        {
            **tree,
            "groups": [
                {**group, "params": held.part(f"{i}/{g}", group["params"])}
                for g, group in enumerate(tree["groups"])
            ],
        }
        for i, tree in enumerate(trees)
    ]


def _identical(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
