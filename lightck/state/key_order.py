"""The order of the keys in an optimizer's state dicts: noted, checked, and restored.

Tensors and other values of a state are saved apart, and tensors of one state by several ranks. So
their order is saved beside them, in short: most parameters of an optimizer have the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightck.errors import CorruptSnapshotError


def noted(states: Mapping[str, Sequence[Any]], usual: Iterable[str]) -> dict[str, Any]:
    """Describe the order of an optimizer's state, in few words.

    Args:
        states: per label, in the order of `optimizer.state`, its keys in their order.
        usual: the labels in the order of the groups, which is not said again where it holds.

    Returns:
        `keys`: the orders that there are; `others`: number of the order of each label that has not
        the first one; `labels`: all of them, where they are not in the usual order.
    """
    keys: dict[tuple[Any, ...], int] = {}
    which = {label: keys.setdefault(tuple(each), len(keys)) for label, each in states.items()}
    said: dict[str, Any] = {
        "keys": [list(each) for each in keys],
        "others": {label: number for label, number in which.items() if number},
    }
    labels, first = list(states), [label for label in usual if label in states]
    if labels[: len(first)] != first:
        said["labels"] = labels
    return said


def check(said: Any, label: str) -> None:
    """Refuse an order that `noted` could not have made.

    Raises:
        CorruptSnapshotError: it has not that form.
    """
    try:
        keys, others, labels = said["keys"], said["others"], said.get("labels", [])
        plain = all(type(each) is list for each in keys) and all(type(n) is str for n in labels)
        numbers = all(0 <= number < len(keys) for number in others.values())
        if not (plain and numbers and type(keys) is type(labels) is list):
            raise ValueError(f"{len(keys)} orders, numbers {sorted(set(others.values()))}")
        for each in keys:
            dict.fromkeys(each)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{label}: no order of its state: {error!r}") from error


def arranged(said: Mapping[str, Any], label: str, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return one parameter's state in its saved order; as it is if none was saved."""
    keys = said.get("keys") or [[]]
    order = keys[said["others"].get(label, 0)] if "others" in said else []
    return {key: state[key] for key in order if key in state} | dict(state)


def outer(said: Mapping[str, Any], usual: Iterable[str]) -> list[str]:
    """Return all labels in the order of `optimizer.state`."""
    return list(said.get("labels") or usual)
