"""Encode and decode entries of the boundary journal; `step_journal.py` describes their content.

When a step ends, code and data are out of the caches: whatever is done costs ten times what it does
in a loop, so as little as possible is done. Most of a state is what it was at the instant before:
parts that are the same objects are pickled once (`boundary_blob.Kept`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.errors import CorruptSnapshotError, RegionFullError
from lightck.journal.copy_buffer import CopyBuffer
from lightck.region.native_region import JournalEntry
from lightck.state import boundary_blob
from lightck.state.boundary_blob import BlobWriter, Kept, form, part
from lightck.state.inventory import StateTensor

MOST_EXTRA_BYTES = 1 << 20
"""Bytes of extras in an entry at most: more would cost every step a millisecond."""
_AS_BYTES = ("torch", "cuda")
"""Generators with tensors as state; other states are the same objects until somebody draws."""


class ExtrasFullError(RegionFullError):
    """Raised when extras have more bytes than may be written at every step; names the largest."""


@dataclass(eq=False)
class EntryEncoder:
    """Encodes entries. For one thread at a time."""

    _kept: Kept = field(default_factory=Kept)
    _names: dict[int, list[list[str]]] = field(default_factory=dict)
    """Names of each optimizer's parameters by group, by the optimizer's index."""

    def sealed(
        self,
        copy_buffer: CopyBuffer,
        copies: Mapping[str, torch.Tensor],
        trees: tuple[dict[str, Any], dict[str, Any]],
        share_digest: bytes,
    ) -> bytes:
        """Encode an entry, without the step, which the journal has beside it.

        Args:
            copy_buffer: just filled with the rank's own small tensors.
            copies: the copies in it, by name.
            trees: plain values of step end and of forward start.
            share_digest: digest of the share map.

        Raises:
            ExtrasFullError: extras have more than `MOST_EXTRA_BYTES`.
        """
        first, second = trees
        held = BlobWriter(self._kept)
        said = copy_buffer.packed(held, copies)
        drawn = [first["rng"], second["rng"]] if "rng" in second else [first["rng"]]
        at = []
        for states in drawn:
            at.append(held.size)
            held.add(states["torch"].numpy().tobytes())
        changing = self._changing(held, first["extras"], second["extras"], drawn)
        fixed = [said, second["optimizers"], second.get("share"), share_digest]
        return held.sealed([changing, *self._pickled(fixed, drawn, at)])

    def _changing(
        self,
        held: BlobWriter,
        first: dict[str, Any],
        second: dict[str, Any],
        drawn: list[dict[str, Any]],
    ) -> bytes:
        """Pickle the extras and the states of CUDA generators.

        Raises:
            ExtrasFullError: extras have more than `MOST_EXTRA_BYTES`.
        """
        at = held.size
        cuda = [states.get("cuda") for states in drawn]
        pickled = held.pickled({"first": first, "second": second, "cuda": cuda})
        if len(pickled) + held.size - at > MOST_EXTRA_BYTES:
            raise ExtrasFullError(_too_much(first, second))
        self._kept.parcels = held.parcels or {}
        return pickled

    def _pickled(self, fixed: list[Any], drawn: list[dict[str, Any]], at: list[int]) -> list[bytes]:
        """Pickle all but what changes at every instant."""
        said, optimizers, share, digest = fixed
        held = BlobWriter(self._kept)
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

    def _optimizers(self, held: BlobWriter, trees: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split the parameters' names, which are the most, from what a schedule changes."""
        said = []
        for i, tree in enumerate(trees):
            names = [group["params"] for group in tree["groups"]]
            known = self._names.get(i)
            if known is None or not _identical(known, names):
                self._names[i] = names  # one part, however many groups there are
            options = [group["options"] for group in tree["groups"]]
            said.append({**tree, "groups": options, "params": held.part(f"{i}", self._names[i])})
        return said

    def _generators(
        self, held: BlobWriter, i: int, states: dict[str, Any], at: int
    ) -> dict[str, Any]:
        plain = {
            name: held.part(f"{i}/{name}", state)
            for name, state in states.items()
            if name not in _AS_BYTES
        }
        return {"torch": form(states["torch"], at), **plain}


@dataclass(frozen=True)
class Unpacked:
    """Content of a journal entry."""

    at_step: bytes
    """Encoded values of step end, as in a manifest."""
    at_forward: bytes
    """Encoded values of forward start, as in a manifest."""
    lives: tuple[StateTensor, ...]
    """Small tensors of the rank's own."""
    share_digest: bytes


def unpacked(found: JournalEntry, *, context: str) -> Unpacked:
    """Decode an entry, running no code.

    Raises:
        CorruptSnapshotError: it is not what `sealed` makes.
    """
    tree = boundary_blob.opened(found.blob, context=context)
    try:
        tensors, first, second, digest = _arranged(tree, found.step)
        lives = tuple(_live(name, said) for name, said in tensors.items())
        if type(digest) is bytes:
            return Unpacked(
                boundary_blob.closed(first), boundary_blob.closed(second), lives, digest
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{context}: no boundary state: {error!r}") from error
    raise CorruptSnapshotError(f"{context}: no boundary state")


def _live(name: str, said: dict[str, Any]) -> StateTensor:
    role, layer, tensor = said["role"], said["layer"], said["tensor"]
    if not isinstance(tensor, torch.Tensor) or {type(name), type(role), type(layer)} != {str}:
        raise TypeError(f"{name!r} is no tensor")
    return StateTensor(name, role, layer, tensor, frozenset(map(int, said["holders"])), sync=True)


def _arranged(tree: Any, step: int) -> tuple[Any, Any, Any, Any]:
    """Return tensors, both instants and the share digest, from a tree that `sealed` made.

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
    """Rebuild an optimizer's values as `OptimizerOptions.take` gives them."""
    rows = zip(said["params"], said["groups"], strict=True)
    groups = [{"params": names, "options": options} for names, options in rows]
    return {**{k: v for k, v in said.items() if k != "params"}, "groups": groups}


def _too_much(first: dict[str, Any], second: dict[str, Any]) -> str:
    sizes = {
        name: boundary_blob.weight((first.get(name), second.get(name))) for name in first | second
    }
    name, most = max(sizes.items(), key=operator.itemgetter(1))
    return (
        f"extras[{name!r}] has {most} bytes of {sum(sizes.values())} that extras have beside large"
        f" tensors: more than the {MOST_EXTRA_BYTES} that are written at every step"
    )


def _identical(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
