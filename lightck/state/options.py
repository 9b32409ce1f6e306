"""An optimizer's values besides parameters and their state: groups' options, and attributes.

They are taken at every instant of every step. A value that is immutable and still the same object
is not looked at again, and the last result is returned.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.errors import StateError
from lightck.state.boundary import join, plain
from lightck.state.live import Live, Placing

BASE_ATTRIBUTES = frozenset({"defaults", "state", "param_groups"})
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(eq=False)
class _Entries:
    """The keys and values of a dict when they were taken (the very objects), and the result.

    With one group per parameter, 112 of them, taking all of them anew at each instant would cost a
    step 1.5 ms more (busy machine); with two groups 0.1 to 0.2 ms.
    """

    keys: list[str]
    values: list[Any]
    taken: Any
    """The result that was made of them."""
    constant: bool
    """True if nothing in them can change, except that one of `empty` may get content."""
    empty: list[Any] = field(default_factory=list)

    def serve(self, entries: Mapping[str, Any]) -> bool:
        """Tell whether these entries still give the same result."""
        return (
            self.constant
            and self.keys == list(entries)
            and all(map(operator.is_, self.values, entries.values()))
            and not any(map(bool, self.empty))
        )


@dataclass(eq=False)
class Options:
    """Takes the options and attributes of one optimizer, and remembers the last result."""

    index: int
    optimizer: Optimizer
    sync: set[str]
    """Names of tensors that are always copied at forward start."""
    _groups: list[_Entries] = field(default_factory=list)
    _attributes: _Entries | None = None
    _lives: dict[str, Live] = field(default_factory=dict)

    def take(
        self,
        held: Sequence[list[str]],
        state: dict[str, Any],
        order: dict[str, Any],
        lives: list[Live],
    ) -> dict[str, Any]:
        """Return everything of the optimizer that is no tensor; add the tensors found to `lives`.

        Args:
            held: the names of each group's parameters.
            state: what its state holds besides tensors.
            order: the order of all of the state's keys, found together with `state`.
            lives: receives the tensors of options and attributes.
        """
        groups = self._take_groups(held, lives)
        known = self._attributes
        if known is None or not known.serve(vars(self.optimizer)):
            known = self._attributes = self._take_attributes(lives)
        kind = type(self.optimizer)
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "groups": groups,
            "state": state,
            "order": order,
            "attributes": known.taken,
        }

    def _take_groups(self, held: Sequence[list[str]], lives: list[Live]) -> list[dict[str, Any]]:
        now = self.optimizer.param_groups
        if len(self._groups) != len(now):
            self._groups = [_Entries([], [], None, constant=False) for _ in now]
        place = self._placing(lives)
        for g, (group, names, known) in enumerate(zip(now, held, self._groups, strict=True)):
            if known.serve(group) and known.taken["params"] is names:
                continue
            base = f"optim/{self.index}/@group/{g}"
            options = {k: plain(v, join(base, k), place) for k, v in group.items() if k != "params"}
            constant = all(_is_constant(v) for k, v in group.items() if k != "params")
            taken = {"params": names, "options": options}
            self._groups[g] = _Entries(list(group), list(group.values()), taken, constant)
        return [known.taken for known in self._groups]

    def _take_attributes(self, lives: list[Live]) -> _Entries:
        """Take what custom optimizers keep as attributes: public plain values, and any tensor."""
        i, optimizer = self.index, self.optimizer
        kept: dict[str, Any] = {}
        empty, constant = [], True
        for name, value in vars(optimizer).items():
            if name in BASE_ATTRIBUTES or callable(value):
                continue
            constant_one = _is_constant(value)
            if (
                name[0] == "_"
                and not isinstance(value, torch.Tensor)
                and (not value or value is True)
            ):
                if not constant_one:
                    empty.append(value)
                continue  # nothing that could hold a tensor
            constant = constant and constant_one
            found: list[Live] = []
            try:
                tree = plain(value, f"optim/{i}/@attribute/{name}", self._placing(found))
            except StateError as error:
                self._must_hold_no_tensors(name, value, error)
                continue  # configuration objects (process groups, hooks): nothing a step computes
            tensors = {id(live.tensor) for live in found}
            own = (id(p) for group in optimizer.param_groups for p in group["params"])
            if tensors and not tensors.isdisjoint(own):
                continue  # LBFGS keeps its parameters again
            if found or not name.startswith("_"):
                lives += found
                kept[name] = tree
        held = vars(optimizer)
        return _Entries(list(held), list(held.values()), kept, constant, empty)

    def _must_hold_no_tensors(self, name: str, value: Any, why: StateError) -> None:
        """Refuse to leave out an attribute that a step may have computed.

        Raises:
            StateError: containers hold tensors that are neither parameters nor in the state.
        """
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for state in self.optimizer.state.values():
            known.update(map(id, state.values() if isinstance(state, dict) else ()))
        if all(id(tensor) in known for tensor in _tensors_in(value)):
            return
        kind, path = type(self.optimizer).__qualname__, f"optim/{self.index}/@attribute/{name}"
        raise StateError(
            f"{kind}.{name} holds tensors and could not be restored: {why}. Keep them in"
            f" {kind}.state[parameter], or in lists and dicts with strings as keys",
            path=path,
        ) from why

    def _placing(self, lives: list[Live]) -> Placing:
        return Placing(lives, "optimizer", "", frozenset((self.index,)), self.sync, self._lives)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, also among their keys; each container once."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping | list | tuple | set | frozenset | deque):
            if id(each) not in seen:
                seen.add(id(each))
                waiting += each
                waiting += each.values() if isinstance(each, Mapping) else ()


def _is_constant(value: Any) -> bool:
    """Tell whether nothing that is done to a value later can change it."""
    return type(value) in _CONSTANT or (type(value) is tuple and all(map(_is_constant, value)))
