"""Collects what a snapshot captures: every tensor by name, and the values around them.

Names are paths: `model/<parameter>`, `optim/<i>/<parameter>/<key>`, `extras/<name>/<path>`. A
tensor in an optimizer but in no module is `optim/<i>/@<group>.<position>`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from lightck.errors import StateError
from lightck.region.native_region import HOLDS_ALL
from lightck.state import tensor_support
from lightck.state.boundary_codec import identical, join, plain, reference
from lightck.state.extras import Extra
from lightck.state.key_order import noted
from lightck.state.modules import (
    every_module,
    named_buffers,
    named_parameters,
    persistent_buffers,
    remember,
)
from lightck.state.tensor_support import must_be_dense

# ---- one live tensor: its name, its role, and which optimizers change it -------------------------

SMALL_EXTRA_BYTES = 64 << 10
"""An extra's tensor up to this size is copied at forward start: cheaper than finding it torn."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One live tensor and what is known about the optimizers that change it."""

    name: str
    role: str
    layer: str
    tensor: torch.Tensor = field(compare=False)
    holders: frozenset[int] = frozenset()
    """Optimizers whose step changes the tensor; with none, any optimizer's step ends its window."""
    sync: bool = False
    """True if the tensor changes inside the window, as buffers do, and is copied at forward
    start."""
    alias_of: str | None = None
    span: tuple[int, int] | None = None
    """First byte and end of what this rank captures of a tensor that other ranks hold, too; None:
    all."""

    @property
    def local(self) -> torch.Tensor:
        """The tensor that holds the bytes: of a DTensor this rank's part, else itself."""
        return tensor_support.local(self.tensor)


@dataclass(eq=False)
class TensorCollector:
    """Collects the tensors found in a tree for the region, and leaves references in their place."""

    lives: list[StateTensor]
    role: str
    layer: str
    holders: frozenset[int]
    always_sync: set[str]
    known: dict[str, StateTensor] = field(default_factory=dict)
    """The last `StateTensor` of each path; it serves while the tensor is the same object."""

    def __call__(self, path: str, tensor: torch.Tensor) -> dict[str, str]:
        """Collect one tensor; return what stands for it in the tree, see `boundary_codec.Place`."""
        must_be_dense(path, tensor)
        small = self.role == "extra" and tensor_support.local(tensor).nbytes <= SMALL_EXTRA_BYTES
        sync = small or path in self.always_sync
        live = self.known.get(path)
        if live is None or live.tensor is not tensor or live.sync is not sync:
            live = StateTensor(path, self.role, self.layer, tensor, self.holders, sync)
            self.known[path] = live
        self.lives.append(live)
        return reference(path)


def refuse_twins(lives: Sequence[StateTensor]) -> None:
    """Refuse two tensors of one name, as of the keys 1 and "1": none could be found again.

    Raises:
        StateError: names the first.
    """
    seen: set[str] = set()
    for live in lives:
        if live.name in seen:
            raise StateError(
                f"{live.name} is the name of two tensors: their keys have the same text, as 1 and"
                " '1' have; rename one",
                path=live.name,
            )
        seen.add(live.name)


# ---- an optimizer's groups' options and attributes, beside parameters and their state ------------
# They are taken at every instant of every step. A value that is immutable and still the same
# object is not looked at again, and the last result is returned.

BASE_ATTRIBUTES = frozenset({"defaults", "state", "param_groups"})
_OF_A_SCALER = frozenset({"grad_scale", "found_inf"})
"""The attributes by which torch's GradScaler tells an optimizer for the length of a step."""
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
class OptimizerOptions:
    """Takes the options and attributes of one optimizer, and remembers the last result."""

    index: int
    optimizer: Optimizer
    sync: set[str]
    """Names of tensors that are always copied at forward start."""
    _groups: list[_Entries] = field(default_factory=list)
    _attributes: _Entries | None = None
    _lives: dict[str, StateTensor] = field(default_factory=dict)
    _taken: dict[str, Any] = field(default_factory=dict)
    """The last result of `take`; empty before the first."""

    def take(
        self,
        held: Sequence[list[str]],
        state: dict[str, Any],
        order: dict[str, Any],
        lives: list[StateTensor],
    ) -> dict[str, Any]:
        """Return everything of the optimizer that is no tensor; add the tensors found to `lives`.

        It is the same object as last time if nothing of it has changed.

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
        last = self._taken
        if last and last["state"] is state and last["order"] is order:
            if last["attributes"] is known.taken and identical(last["groups"], groups):
                return last
        kind = torch_class(self.optimizer)
        self._taken = {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "groups": groups,
            "state": state,
            "order": order,
            "attributes": known.taken,
        }
        return self._taken

    def _take_groups(
        self, held: Sequence[list[str]], lives: list[StateTensor]
    ) -> list[dict[str, Any]]:
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

    def _take_attributes(self, lives: list[StateTensor]) -> _Entries:
        """Take what custom optimizers keep as attributes: public plain values, and any tensor."""
        i, optimizer = self.index, self.optimizer
        kept: dict[str, Any] = {}
        empty, constant = [], True
        scaled = _OF_A_SCALER if getattr(optimizer, "_step_supports_amp_scaling", False) else ()
        for name, value in vars(optimizer).items():
            if name in BASE_ATTRIBUTES or name in scaled or callable(value):
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
            found: list[StateTensor] = []
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

    def _placing(self, lives: list[StateTensor]) -> TensorCollector:
        return TensorCollector(
            lives, "optimizer", "", frozenset((self.index,)), self.sync, self._lives
        )


def torch_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return an optimizer's class; of one of `lightck.optim`, torch's own, whose state it has."""
    kind: type[Optimizer] = getattr(type(optimizer), "torch_class", type(optimizer))
    return kind


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


# ---- all of the state ----------------------------------------------------------------------------

_TOLD_BY_IDENTITY = (torch.Tensor, int, float, str, type(None))
"""Types of which this is known: while an optimizer's state holds the same object, what is captured
of it is the same."""


@dataclass(frozen=True)
class RankShare:
    """The tensors that this rank captures, where other ranks capture the rest."""

    lives: tuple[StateTensor, ...]
    digest: bytes = HOLDS_ALL
    """The digest of the share map, for the commit record."""
    form: bytes = b""
    """A fingerprint of the state that all ranks hold alike; every rank must have the same one."""
    told: dict[str, Any] | None = None
    """The ranks that share, and whether all that could be held alike is, for the boundary state."""


class Division(Protocol):
    """The division of what several ranks hold alike."""

    def __call__(self, lives: Sequence[StateTensor]) -> RankShare:
        """Choose what this rank captures; asked again after `Inventory.invalidate`."""

    def depends(self) -> Sequence[Any]:
        """Return other objects that the choice depends on."""


@dataclass(frozen=True)
class CollectedState:
    """The tensors and other values of the state at one instant."""

    lives: tuple[StateTensor, ...]
    tree: dict[str, Any]
    """Everything but the tensors, in types that the restricted loader takes."""
    share_digest: bytes = HOLDS_ALL
    form: bytes = b""
    """A fingerprint of the state that all ranks hold alike, see `RankShare`."""
    base: tuple[StateTensor, ...] = ()
    """The first part of `lives`, of model and optimizers: the same object while they are the same.
    Empty: not known."""


@dataclass(eq=False)
class _Cache:
    """The tensors and names found before; they serve while `objects` are the same ones."""

    modules: list[nn.Module]
    objects: npt.NDArray[np.object_]
    addresses: bytes
    """The addresses of `objects`."""
    everything: tuple[StateTensor, ...]
    shared: RankShare
    """This rank's share of `everything`."""
    states: list[dict[str, Any]]
    orders: list[dict[str, Any]]
    """The order of the keys of each of these states."""
    held: list[list[list[str]]]
    """The names of the parameters, per optimizer and group."""
    bare: list[dict[str, Any]]
    """The buffer dicts of the modules that had no buffer."""
    holding: list[dict[str, Any]]
    """The buffer dicts of the modules that had buffers."""
    buffers: list[Any]
    """The buffers in `holding`, persistent or not."""
    persistent: list[torch.Tensor]
    """The buffers that a snapshot holds."""
    sizes: list[int]
    """The sizes of the optimizers' groups and states."""


@dataclass(eq=False)
class Inventory:
    """The objects whose state is captured. Used by the training thread."""

    model: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)
    extras: tuple[Extra, ...] = ()
    always_sync: set[str] = field(default_factory=set)
    """Names of tensors that were found torn twice: they are copied before the forward goes on."""
    division: Division | None = None
    """Chooses what this rank captures; None: everything."""
    buckets: Callable[[], dict[str, Any]] | None = None
    """Gives the arrangement of DDP's buckets, plain: the same object while it is the same."""
    _taken: dict[str, Any] = field(default_factory=dict, init=False)
    """The state of each extra, by name, as it was last taken for forward start."""
    _cache: _Cache | None = field(default=None, init=False)
    _options: list[OptimizerOptions] = field(default_factory=list, init=False)
    _placed: dict[str, dict[str, StateTensor]] = field(default_factory=dict, init=False)
    """The tensors of each extra, by the extra's name and the tensor's path."""
    _last_joined: tuple[tuple[StateTensor, ...], tuple[StateTensor, ...]] = field(
        default=((), ()), init=False
    )

    def __post_init__(self) -> None:
        """Note what is sharded, before a forward gathers it."""
        remember(self.model)

    def collect(self) -> CollectedState:
        """Return every tensor and value, as of now.

        Raises:
            StateError: something could not be restored; its path is named.
        """
        return self._collected(self._known())

    def collect_cached(self) -> CollectedState:
        """Collect as `collect` does, but look only at values and buffers, where that is enough.

        Other tensors are returned as they were found last, if there are as many.
        """
        cache = self._cache
        if cache is None or any(cache.states) or _sizes(self.optimizers) != cache.sizes:
            cache = self._known()
        elif not _same_buffers(cache):
            cache = self._known()
        return self._collected(cache)

    def _collected(self, cache: _Cache) -> CollectedState:
        more: list[StateTensor] = []
        optimizers = self._optimizer_trees(cache, more)
        extras = {e.name: self._extra(e, more) for e in self.extras if e.instant != "step"}
        shared = cache.shared
        tree: dict[str, Any] = {"optimizers": optimizers, "extras": extras}
        if shared.told is not None:
            tree["share"] = shared.told
        if self.buckets is not None:
            tree["buckets"] = self.buckets()
        lives = self._joined(shared.lives, more)
        return CollectedState(lives, tree, shared.digest, shared.form, shared.lives)

    def _optimizer_trees(self, cache: _Cache, more: list[StateTensor]) -> list[dict[str, Any]]:
        if [options.optimizer for options in self._options] != self.optimizers:
            each = enumerate(self.optimizers)
            self._options = [
                OptimizerOptions(i, optimizer, self.always_sync) for i, optimizer in each
            ]
        rows = zip(self._options, cache.held, cache.states, cache.orders, strict=True)
        return [options.take(held, state, order, more) for options, held, state, order in rows]

    def _joined(
        self, base: tuple[StateTensor, ...], more: list[StateTensor]
    ) -> tuple[StateTensor, ...]:
        """Join two sequences into one tuple; the last one made, if it is of the same tensors."""
        if not more:
            return base
        last, begun = self._last_joined, len(base)
        if last[0] is not base or not identical(last[1][begun:], more):
            self._last_joined = last = base, (*base, *more)
        return last[1]

    def everything(self) -> tuple[StateTensor, ...]:
        """Return every tensor of model and optimizers, also those that other ranks capture."""
        return self._known().everything

    def shared(self) -> tuple[StateTensor, ...]:
        """Return the tensors of model and optimizers that this rank captures."""
        return self._known().shared.lives

    def found(self) -> tuple[StateTensor, ...]:
        """Return what `everything` was at the last `collect`, which must have been just now."""
        return self._cache.everything if self._cache is not None else self.everything()

    def share(self, lives: Sequence[StateTensor]) -> RankShare:
        """Choose what this rank captures of these tensors."""
        return self.division(lives) if self.division else RankShare(tuple(lives))

    def invalidate(self) -> None:
        """Forget what was found before: tensors were added, or found torn."""
        self._cache = None

    def covered(self) -> bool:
        """Tell whether known optimizers hold every trainable parameter: no other is expected."""
        return all_covered(self.model, self.optimizers)

    def buffers(self, *, anew: bool = False) -> list[torch.Tensor]:
        """Return the model's persistent buffers.

        Unless `anew`, those of a module added since the last look may be missing.
        """
        cache = self._cache
        if anew or cache is None or not _same_buffers(cache):
            return persistent_buffers(every_module(self.model))
        return cache.persistent

    def names(self) -> dict[int, str]:
        """Return the name of each of the model's parameters, by identity; the first name counts."""
        return names_of(self.model)

    def _objects(self, modules: list[nn.Module]) -> npt.NDArray[np.object_]:
        """Return every object that the cache depends on.

        While the children of all modules are the same, `modules` are still all there are.
        """
        parts: list[Iterable[Any]] = [self.division.depends() if self.division else (), modules]
        for kept in map(operator.attrgetter, ("_parameters", "_buffers", "_modules")):
            found = list(map(kept, modules))
            filled = list(filter(None, found))
            parts += [found, chain.from_iterable(filled), _values(filled)]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                parts += [(group,), group["params"]]
            states = optimizer.state.values()
            dicts = [state for state in states if isinstance(state, dict)]
            parts += [optimizer.state, states, chain.from_iterable(dicts), _values(dicts)]
        return np.fromiter(chain.from_iterable(parts), object)

    def _is_reusable(self) -> bool:
        """Tell whether the identity of the optimizers' values proves that they are the same."""
        states = chain.from_iterable(each.state.values() for each in self.optimizers)
        dicts = (state for state in states if isinstance(state, dict))
        return all(issubclass(kind, _TOLD_BY_IDENTITY) for kind in set(map(type, _values(dicts))))

    def _known(self) -> _Cache:
        """Return what was found before if nothing has changed since, else look it up anew."""
        cache = self._cache
        if cache is not None:
            objects = self._objects(cache.modules)
            # The bytes of an array of objects are their addresses.
            if cache.addresses == objects.tobytes():
                return cache
        modules = every_module(self.model)
        cache = self._find(modules, self._objects(modules))
        self._cache = cache if self._is_reusable() else None
        return cache

    def _find(self, modules: list[nn.Module], objects: npt.NDArray[np.object_]) -> _Cache:
        """Find all tensors, values and names anew."""
        lives = list(self._model_lives())
        found = [self._optimizer_state(i, o, lives) for i, o in enumerate(self.optimizers)]
        states, orders = [state for state, _ in found], [order for _, order in found]
        names = self.names()
        known = [parameter_names(i, o, names) for i, o in enumerate(self.optimizers)]
        held = [
            [[labels[parameter] for parameter in group["params"]] for group in o.param_groups]
            for o, labels in zip(self.optimizers, known, strict=True)
        ]
        everything = tuple(lives)
        kept = [module._buffers for module in modules]
        holding = [each for each in kept if each]
        return _Cache(
            modules,
            objects,
            objects.tobytes(),
            everything=everything,
            shared=self.share(everything),
            states=states,
            orders=orders,
            held=held,
            bare=[each for each in kept if not each],
            holding=holding,
            buffers=[*_values(holding)],
            persistent=persistent_buffers(modules),
            sizes=_sizes(self.optimizers),
        )

    def _model_lives(self) -> Iterator[StateTensor]:
        holders: dict[int, set[int]] = {}
        for i, optimizer in enumerate(self.optimizers):
            for parameter in held_parameters(optimizer):
                holders.setdefault(id(parameter), set()).add(i)
        first: dict[int, str] = {}
        for name, parameter in named_parameters(self.model):
            path = join("model", name)
            alias = first.setdefault(id(parameter), path)
            layer = name.rpartition(".")[0]
            held = frozenset(holders.get(id(parameter), ()))
            sync = path in self.always_sync
            alias_of = None if alias == path else alias
            must_be_dense(path, parameter)
            yield StateTensor(path, "parameter", layer, parameter, held, sync, alias_of)
        for name, buffer in named_buffers(self.model):
            path = join("model", name)
            alias = first.setdefault(id(buffer), path)
            layer = name.rpartition(".")[0]
            alias_of = None if alias == path else alias
            must_be_dense(path, buffer)
            yield StateTensor(path, "buffer", layer, buffer, frozenset(), True, alias_of)

    def _optimizer_state(
        self, i: int, optimizer: Optimizer, lives: list[StateTensor]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Add the state's tensors to `lives`; return its other values, and the order of its keys.

        Both are by parameter name; for the order see `key_order.noted`.
        """
        names = self.names()
        known = parameter_names(i, optimizer, names)
        held = frozenset((i,))
        for parameter, name in known.items():
            if id(parameter) not in names:
                path = f"optim/{i}/{join('', name)}"
                lives.append(
                    StateTensor(path, "parameter", name, parameter, held, path in self.always_sync)
                )
        rest: dict[str, Any] = {}
        keys: dict[str, list[Any]] = {}
        for key, state in optimizer.state.items():
            label = known.get(key) if isinstance(key, torch.Tensor) else key_label(i, key)
            if label is None:
                continue  # state of a parameter that left the groups: no step can read it
            layer = label.rpartition(".")[0]
            base = f"optim/{i}/{join('', label)}"
            place = TensorCollector(lives, "optimizer", layer, held, self.always_sync)
            others = {}
            if not isinstance(state, dict):
                raise StateError(f"{base} is a {type(state).__name__}, expected a dict", path=base)
            keys[label] = list(state)
            for entry, value in state.items():
                if isinstance(value, torch.Tensor) and isinstance(entry, str):
                    place(join(base, entry), value)
                else:
                    others[entry] = plain(value, join(base, entry), place)
            # A key that is no parameter is known by its entry here.
            if others or not state or not isinstance(key, torch.Tensor):
                rest[label] = others
        return rest, noted(keys, known.values())

    def _extra(self, extra: Extra, lives: list[StateTensor]) -> Any:
        layer, known = f"extras.{extra.name}", self._placed.setdefault(extra.name, {})
        place = TensorCollector(lives, "extra", layer, frozenset(), self.always_sync, known)
        begun = len(lives)
        last = self._taken.get(extra.name)
        tree = plain(extra.state(), join("extras", extra.name), place, last)
        self._taken[extra.name] = tree
        if len(known) > len(lives) - begun:  # some are gone
            self._placed[extra.name] = {live.name: live for live in lives[begun:]}
        return tree


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the name of each of the model's parameters, by identity; the first name counts."""
    found: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        found.setdefault(id(parameter), name)
    return found


def all_covered(model: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Tell whether the optimizers hold every trainable parameter: no other is expected."""
    held = {id(p) for optimizer in optimizers for p in held_parameters(optimizer)}
    return all(id(p) in held for _, p in named_parameters(model) if p.requires_grad)


def key_label(i: int, key: Any) -> str:
    """Return the name of state that is kept under something else than a parameter.

    Raises:
        StateError: a key that could not come back.
    """
    if type(key) is int:
        return f"@#{key}"
    if type(key) is str and not key.startswith("#"):
        return f"@{key}"
    raise StateError(f"optim/{i} keeps state under {key!r}; use a parameter, string or integer")


def labelled_key(label: str) -> str | int:
    """Return the key whose name `key_label` made."""
    return int(label[2:]) if label.startswith("@#") else label.removeprefix("@")


def held_parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield every tensor that the optimizer's groups hold."""
    for group in optimizer.param_groups:
        yield from group["params"]


def parameter_names(i: int, optimizer: Optimizer, names: dict[int, str]) -> dict[torch.Tensor, str]:
    """Return the name of each held parameter: the model's, or `@<group>.<position>`."""
    found = {}
    for g, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            found[parameter] = names.get(id(parameter), f"@{g}.{k}")
    return found


def _values(dicts: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _sizes(optimizers: Sequence[Optimizer]) -> list[int]:
    found: list[int] = []
    for optimizer in optimizers:
        found += [len(group["params"]) for group in optimizer.param_groups]
        found.append(sum(map(len, filter(None, optimizer.state.values()))))
    return found


def _same_buffers(cache: _Cache) -> bool:
    """Tell whether modules hold the same buffers as before."""
    return not any(cache.bare) and identical([*_values(cache.holding)], cache.buffers)
