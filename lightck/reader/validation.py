"""A snapshot's boundary state: read, and checked before anything relies on it.

Checksums show that the bytes are those that were written, not that lightck wrote them. What does
not have the form that `boundary_state`, `inventory` and `rng` give it is damage, found before a
live object has changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightck.errors import CorruptSnapshotError
from lightck.region.layout import Entry
from lightck.region.region import Candidate
from lightck.state import boundary_blob, boundary_codec, key_order, rng, tensor_layout
from lightck.state.inventory import BASE_ATTRIBUTES

_NAME = re.compile(r"(model|extras|optim/(0|[1-9][0-9]{0,8}))/.*", re.DOTALL)
_INDEXED = re.compile(r"@#-?[0-9]{1,300}")


def read(
    candidate: Candidate, entries: Sequence[Entry], *, context: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a snapshot's states of step end and of forward start, in the form they were written.

    Args:
        candidate: of the rank whose states they are.
        entries: every tensor that they may refer to, those among them that other ranks hold.
        context: for messages.

    Raises:
        CorruptSnapshotError: these parts or the entries' names do not have it.
    """
    state = candidate.manifest
    first = boundary_blob.opened(state.at_step, context=context)
    second = boundary_blob.opened(state.at_forward, context=context)
    try:
        _check_entries(entries)
        _check(candidate, first, second, {e.name for e in entries if e.alias_of is None})
    except CorruptSnapshotError as error:
        raise CorruptSnapshotError(f"{context}: {error}") from error
    return first, second


def peers(candidate: Candidate, *, context: str) -> list[int]:
    """Return the ranks that shared the state when this one wrote its snapshot, itself included.

    Raises:
        CorruptSnapshotError: it does not say.
    """
    return share(candidate, context=context)[0]


def share(candidate: Candidate, *, context: str) -> tuple[list[int], bool]:
    """Return `peers`, and whether the snapshot says that all ranks held the state alike.

    State here means parameters and optimizers.

    Raises:
        CorruptSnapshotError: it does not say.
    """
    second = boundary_blob.opened(candidate.manifest.at_forward, context=context)
    said = second.get("share") if type(second) is dict else None
    named = said.get("peers") if type(said) is dict else None
    world = candidate.record.world
    if type(named) is not list or not all(type(r) is int and 0 <= r < world for r in named):
        raise CorruptSnapshotError(f"{context}: its share is one of ranks {named!r} of {world}")
    return named, type(said) is dict and said.get("alike") is True


def _check_entries(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if not _NAME.fullmatch(entry.name):
            raise CorruptSnapshotError(f"the layout table names a tensor {entry.name!r}")
    tensor_layout.check(entries, context="layout table")


def _check(candidate: Candidate, first: Any, second: Any, tensors: set[str]) -> None:
    _fields(first, "the state at step end", {"rng": dict, "extras": dict})
    _fields(second, "the state at the forward", {"optimizers": list, "extras": dict, "step": int})
    if not second["step"] == candidate.record.step == candidate.manifest.step:
        raise CorruptSnapshotError(
            f"record of step {candidate.record.step}, manifest of step {candidate.manifest.step},"
            f" state of step {second['step']}"
        )
    for held in (first["extras"], second["extras"]):
        _keys(held, "extras")
        boundary_codec.rebuild(held, _finder(tensors, "extras/"))
    for i, tree in enumerate(second["optimizers"]):
        _optimizer(i, tree, tensors)
    rng.check(boundary_codec.rebuild(first["rng"]))
    if "rng" in second:
        rng.check(boundary_codec.rebuild(_fields(second, "the state", {"rng": dict})["rng"]))


def _optimizer(i: int, tree: Any, tensors: set[str]) -> None:
    label = f"optimizer {i}"
    fields = {"class": str, "groups": list, "state": dict, "attributes": dict}
    _fields(tree, label, fields)
    find = _finder(tensors, f"optim/{i}/")
    for group in tree["groups"]:
        _fields(group, f"{label} group", {"params": list, "options": dict})
        if not all(type(name) is str for name in group["params"]):
            raise CorruptSnapshotError(f"{label} has parameters without a name")
        _keys(group["options"], f"{label} options")
        boundary_codec.rebuild(group["options"], find)
    for name, state in _keys(tree["state"], f"{label} state").items():
        if name.startswith("@#") and not _INDEXED.fullmatch(name):
            raise CorruptSnapshotError(f"{label} has state under {name!r}")
        boundary_codec.rebuild(_fields(state, f"{label} state", {}), find)
    if "order" in tree:
        key_order.check(tree["order"], label)
    for name, value in _keys(tree["attributes"], f"{label} attributes").items():
        taken = name in BASE_ATTRIBUTES or hasattr(torch.optim.Optimizer, name)
        if taken or not name.isidentifier():
            raise CorruptSnapshotError(f"{label} has an attribute {name!r}")
        boundary_codec.rebuild(value, find)


def _fields(tree: Any, label: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    if type(tree) is not dict or boundary_codec.TAG in tree:
        raise CorruptSnapshotError(f"{label} is a {type(tree).__name__}, expected a plain dict")
    for name, kind in kinds.items():
        if type(tree.get(name)) is not kind:
            found = type(tree.get(name)).__name__
            raise CorruptSnapshotError(f"{label}: {name} is {found}, expected {kind.__name__}")
    return tree


def _keys(tree: dict[Any, Any], label: str) -> dict[str, Any]:
    if boundary_codec.TAG in tree or not all(type(key) is str for key in tree):
        raise CorruptSnapshotError(f"{label} has a key that is no name")
    return tree


def _finder(tensors: set[str], prefix: str) -> Callable[[str], torch.Tensor]:
    """Make a lookup that stands in for the tensors; it refuses names of other parts."""
    nothing = torch.empty(0)

    def find(name: str) -> torch.Tensor:
        if name not in tensors or not name.startswith(prefix):
            raise CorruptSnapshotError(f"a state under {prefix} refers to {name!r}")
        return nothing

    return find
