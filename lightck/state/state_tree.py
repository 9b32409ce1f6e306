"""Take a plain state dict apart, into tensors and the values around them, and put it together.

Names of tensors are paths below `extras/state`, so that whoever reads a region reads this one.
Tensors of one memory, place and form are kept once, under the first one's name.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.errors import CorruptSnapshotError, StateError
from lightck.state.boundary_codec import plain, reference
from lightck.state.inventory import StateTensor
from lightck.state.tensor_support import is_dtensor, must_be_dense

STATE, VERSIONS = "state", "versions"
"""Names of the extras that hold the tree, and what its ordered dicts say of modules' versions."""
_NEVER_SKIPPED = frozenset((0,))
"""Holders of every tensor. With none, one whose version is the last one's might be skipped if its
checksum is, too; here another tensor of the same version may have come in its place."""
_KINDS = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class StateTree:
    """A state dict taken apart."""

    lives: tuple[StateTensor, ...]
    extras: dict[str, Any]
    """Everything but the tensors, as a plain tree: private copies."""


def taken(state: Any) -> StateTree:
    """Take a state dict apart; its tensors are the caller's own, its values are copied.

    Raises:
        StateError: a value or a tensor that would not come back as it is; its path is named.
    """
    place = _Tensors()
    extras = {STATE: plain(state, STATE, place)}
    versions = [getattr(each, "_metadata", None) for each in _ordered(state)]
    if any(versions):
        extras[VERSIONS] = plain(versions, VERSIONS)
    return StateTree(tuple(place.lives), extras)


def joined(extras: dict[str, Any]) -> Any:
    """Put a state dict together again, as it was taken apart.

    Args:
        extras: the values that `boundary_codec.rebuild` made of those of a `StateTree`.

    Raises:
        CorruptSnapshotError: they are not those of a state dict.
    """
    if STATE not in extras:
        raise CorruptSnapshotError("the snapshot holds no state dict")
    state = extras[STATE]
    if VERSIONS in extras:
        versions, ordered = extras[VERSIONS], [*_ordered(state)]
        if type(versions) is not list or len(versions) != len(ordered):
            raise CorruptSnapshotError(f"versions of others than {len(ordered)} ordered dicts")
        for each, said in zip(ordered, versions, strict=True):
            if isinstance(said, dict):
                vars(each)["_metadata"] = said
    return state


def _ordered(tree: Any) -> Iterator[collections.OrderedDict[Any, Any]]:
    """Yield every ordered dict: those that `Module.state_dict` makes have versions in them."""
    if type(tree) is collections.OrderedDict:
        yield tree
    if isinstance(tree, dict | list | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _ordered(each)


@dataclass(eq=False)
class _Tensors:
    """Collects the tensors of a tree, and leaves references in their place."""

    lives: list[StateTensor] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _first: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Name of the first tensor of each memory, place and form."""

    def __call__(self, path: str, tensor: torch.Tensor) -> dict[str, str]:
        _must_come_back(path, tensor)
        if any("\ud800" <= letter <= "\udfff" for letter in path):
            raise StateError(f"{path!r} has a key that is no text in UTF-8", path=path)
        name = self._unused(f"extras/{path}")
        form = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        known = (str(tensor.device), tensor.data_ptr(), *form)
        first = self._first.setdefault(known, name) if tensor.numel() else name
        if first == name:
            live = StateTensor(name, "extra", "extras.state", tensor, _NEVER_SKIPPED)
            self.lives.append(live)
        return reference(first)

    def _unused(self, name: str) -> str:
        """Return the name, or with a number that no key can have: 1 and "1" have the same path."""
        found, number = name, 1
        while found in self._names:
            number += 1
            found = f"{name}%{number}"
        self._names.add(found)
        return found


def _must_come_back(path: str, tensor: torch.Tensor) -> None:
    if is_dtensor(tensor):
        raise StateError(
            f"{path} is a DTensor, of which a store keeps no part: give its `full_tensor()`, or"
            " keep the training itself with lightck.attach, each rank its part",
            path=path,
        )
    must_be_dense(path, tensor)
    if type(tensor) not in _KINDS:
        kind = type(tensor).__qualname__
        raise StateError(f"{path} is a {kind} and would come back as a plain tensor", path=path)
