"""Restore captured optimizer state: matched by parameter names, filled in place or made anew.

torch's `load_state_dict` is not used: it casts state to the parameter's dtype and replaces tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.state import key_order
from lightck.state.boundary import TAG, join, rebuild
from lightck.state.inventory import labelled_key, parameter_names


@dataclass(frozen=True)
class Saved:
    """One optimizer of a snapshot: its tree, and its tensors by their saved names."""

    index: int
    tree: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    devices: dict[str, str]
    """The kind of device that each tensor lived on, by name."""

    @property
    def order(self) -> dict[str, Any]:
        """The saved order of its state's keys; empty if it is not known."""
        found: dict[str, Any] = self.tree.get("order", {})
        return found

    def tensor(self, name: str, near: torch.Tensor | None) -> torch.Tensor:
        """Return a saved tensor, on the device of `near` if it lived on that kind of device."""
        found = self.tensors[name]
        if near is not None and self.devices[name] == near.device.type != found.device.type:
            return found.to(near.device)
        return found

    def children(self) -> dict[str, dict[str, str]]:
        """Return, for each parent path, the full name of each key."""
        found: dict[str, dict[str, str]] = {}
        for name in self.tensors:
            parent, _, key = name.rpartition("/")
            key = key.replace("%2F", "/").replace("%25", "%")
            found.setdefault(parent, {})[key] = name
        return found


def match(
    saved: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer], names: dict[int, str]
) -> dict[int, int]:
    """Find the live optimizer that continues each saved one: same class and parameters by group.

    Returns:
        Index of the saved one to index of the live one; those without a partner are left out.
    """
    free = list(range(len(optimizers)))
    found: dict[int, int] = {}
    for i, tree in enumerate(saved):
        for j in free:
            if fits(tree, optimizers[j], j, names):
                found[i] = j
                free.remove(j)
                break
    return found


def fits(tree: dict[str, Any], optimizer: Optimizer, j: int, names: dict[int, str]) -> bool:
    """Tell whether a live optimizer has the class and the parameters of a saved one."""
    known = parameter_names(j, optimizer, names)
    live = [[known[p] for p in group["params"]] for group in optimizer.param_groups]
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return kind == tree["class"] and live == [group["params"] for group in tree["groups"]]


def install(saved: Saved, j: int, optimizer: Optimizer, names: dict[int, str]) -> None:
    """Make the optimizer's state equal to the saved one.

    A live tensor of the same name and geometry is filled and kept; others are the saved tensors
    themselves, on the parameter's device where they lived there.
    """
    known = parameter_names(j, optimizer, names)
    by_name = {name: parameter for parameter, name in known.items()}
    children = saved.children()
    with torch.no_grad():
        for name, parameter in by_name.items():
            value = saved.tensors.get(_path(saved, name))  # of a parameter that is in no module
            if value is not None and value is not parameter:
                parameter.copy_(value)
        keys = _state_keys(saved, by_name)
        for name, key in keys.items():
            found = children.get(_path(saved, name), {})
            _install_one(saved, found, name, key, optimizer)
        _arrange(saved, keys, optimizer)
        near = next(iter(by_name.values()), None)
        for group, tree in zip(optimizer.param_groups, saved.tree["groups"], strict=True):
            options = rebuild(tree["options"], lambda name: saved.tensor(name, near))
            for option, value in options.items():
                group[option] = _placed(group.get(option), value)
        for name, tree in saved.tree["attributes"].items():
            value = rebuild(tree, lambda name: saved.tensor(name, near))
            setattr(optimizer, name, _placed(getattr(optimizer, name, None), value))


def install_pending(
    pending: list[Saved], j: int, optimizer: Optimizer, names: dict[int, str]
) -> None:
    """Give an optimizer the state that restore has kept for it, if there is any."""
    for saved in pending:
        if fits(saved.tree, optimizer, j, names):
            install(saved, j, optimizer, names)
            pending.remove(saved)
            return


def tell_unfilled(pending: Sequence[Saved]) -> None:
    """Warn of restored parameters that only an optimizer not known yet holds.

    They are not filled yet, and a forward may need them.
    """
    for saved in pending:
        names = [n for g in saved.tree["groups"] for n in g["params"] if n.startswith("@")]
        if names:
            warnings.warn(
                f"lightck restored {len(names)} parameters that are in no module but in a"
                f" {saved.tree['class']}: they are filled when it is found, after the first"
                " forward; pass the optimizer to attach or restore",
                stacklevel=4,
            )


def _path(saved: Saved, name: str) -> str:
    return f"optim/{saved.index}/{join('', name)}"


def _state_keys(saved: Saved, by_name: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return each name's key in `optimizer.state`: the parameter, or the key behind an @."""
    keys: dict[str, Any] = dict(by_name)
    for name in saved.tree["state"]:
        if name not in keys and name.startswith("@"):
            keys[name] = labelled_key(name)
    return keys


def _install_one(
    saved: Saved, found: dict[str, str], name: str, key: Any, optimizer: Optimizer
) -> None:
    """Install one parameter's state: tensors directly under its path, and the rest of the tree."""
    near = key if isinstance(key, torch.Tensor) else None
    state = rebuild(saved.tree["state"].get(name, {}), lambda n: saved.tensor(n, near))
    nested = {full for full in _references(saved.tree["state"].get(name, {}))}
    for entry, full in found.items():
        if full not in nested:
            state[entry] = saved.tensor(full, near)
    if not state and name not in saved.tree["state"]:
        optimizer.state.pop(key, None)
        return
    state = key_order.arranged(saved.order, name, state)
    live = optimizer.state[key] if key in optimizer.state else {}
    merged = {entry: _placed(live.get(entry), value) for entry, value in state.items()}
    live.clear()
    live.update(merged)
    optimizer.state[key] = live


def _arrange(saved: Saved, keys: dict[str, Any], optimizer: Optimizer) -> None:
    """Put the keys of `optimizer.state` into the order that they had."""
    labels = key_order.outer(saved.order, keys)
    ordered = [keys[name] for name in labels if keys.get(name) in optimizer.state]
    if list(map(id, ordered)) != list(map(id, optimizer.state)):
        for key in ordered:
            optimizer.state[key] = optimizer.state.pop(key)


def _references(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        if tree.get(TAG) == "tensor":
            return [tree["name"]]
        return [name for value in tree.values() for name in _references(value)]
    if isinstance(tree, list | tuple):
        return [name for value in tree for name in _references(value)]
    return []


def _placed(live: Any, value: Any) -> Any:
    """Fill and return the live tensor if its geometry is the saved one's, else the saved value."""
    if not isinstance(value, torch.Tensor) or not isinstance(live, torch.Tensor):
        return value
    if live is value or live.shape != value.shape or live.dtype != value.dtype:
        return value
    return live.copy_(value)
