"""Match a snapshot with the live objects by name, then fill them: tensors, optimizers, extras."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from lightck.device.lookup import holder
from lightck.errors import RestoreMismatchError
from lightck.reader.assembly import AssembledSnapshot, Snapshot
from lightck.reader.device_fill import copy_to_devices
from lightck.region.layout import Entry
from lightck.state import boundary_codec, key_order, rng, tensor_support
from lightck.state.boundary_codec import TAG, join, rebuild
from lightck.state.extras import Extra, is_own
from lightck.state.inventory import (
    Inventory,
    StateTensor,
    labelled_key,
    parameter_names,
    torch_class,
)
from lightck.state.tensor_layout import fill, is_dense

# ---- optimizers: matched by parameter names, filled in place or made anew ------------------------
# torch's `load_state_dict` is not used: it casts state to the parameter's dtype and replaces
# tensors.


@dataclass(frozen=True)
class SavedOptimizer:
    """One optimizer of a snapshot: its tree, and its tensors by their saved names."""

    index: int
    tree: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    beside: frozenset[str]
    """The names of the tensors that belong on the device of their parameter."""

    @property
    def order(self) -> dict[str, Any]:
        """The saved order of its state's keys; empty if it is not known."""
        found: dict[str, Any] = self.tree.get("order", {})
        return found

    def tensor(self, name: str, near: torch.Tensor | None) -> torch.Tensor:
        """Return a saved tensor, on the device of `near` if it belongs there."""
        found = self.tensors[name]
        if near is not None and name in self.beside and near.device.type != found.device.type:
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
    live_class = torch_class(optimizer)
    kind = f"{live_class.__module__}.{live_class.__qualname__}"
    return kind == tree["class"] and live == [group["params"] for group in tree["groups"]]


def install(saved: SavedOptimizer, j: int, optimizer: Optimizer, names: dict[int, str]) -> None:
    """Make the optimizer's state equal to the saved one.

    A live tensor of the same name and geometry is filled and kept; others are the saved tensors
    themselves, on the parameter's device where they belong there.
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
    pending: list[SavedOptimizer], j: int, optimizer: Optimizer, names: dict[int, str]
) -> None:
    """Give an optimizer the state that restore has kept for it, if there is any."""
    for saved in pending:
        if fits(saved.tree, optimizer, j, names):
            install(saved, j, optimizer, names)
            pending.remove(saved)
            return


def tell_unfilled(pending: Sequence[SavedOptimizer]) -> None:
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


def _path(saved: SavedOptimizer, name: str) -> str:
    return f"optim/{saved.index}/{join('', name)}"


def _state_keys(saved: SavedOptimizer, by_name: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return each name's key in `optimizer.state`: the parameter, or the key behind an @."""
    keys: dict[str, Any] = dict(by_name)
    for name in saved.tree["state"]:
        if name not in keys and name.startswith("@"):
            keys[name] = labelled_key(name)
    return keys


def _install_one(
    saved: SavedOptimizer, found: dict[str, str], name: str, key: Any, optimizer: Optimizer
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


def _arrange(saved: SavedOptimizer, keys: dict[str, Any], optimizer: Optimizer) -> None:
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


# ---- everything that a snapshot has --------------------------------------------------------------

_DIFFERS = "does not fit (strict=False restores the rest)"
_OTHER_RANKS = (
    ": restore it on as many ranks as wrote it, for what these did not hold alike has no place on"
    " another number of them"
)


class StateFiller:
    """Matches one snapshot with the live objects, then fills them: check, verify, copy, finish."""

    def __init__(
        self,
        snapshot: Snapshot,
        live: Inventory,
        strict: bool,
        *,
        foreign_reason: str = "",
        unequal: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Match by name; nothing is changed until `finish`.

        Args:
            snapshot: the state that is filled in.
            live: the objects that are filled.
            strict: refuse what differs.
            foreign_reason: why the snapshot's own state is another rank's, so that generators,
                which must not draw alike on two ranks, stay as they are; empty if it is this
                rank's.
            unequal: tensors by their saved names that belong to other ranks as well, each with
                another content, and why: never filled in.
        """
        self.snapshot, self.live, self.strict = snapshot, live, strict
        self.foreign_reason, self.unequal = foreign_reason, unequal
        self.step_end, self.forward_start = snapshot.trees()
        self.live_tensors = {v.name: v for v in live.collect().lives}
        self.meshes = tensor_support.meshes(v.tensor for v in self.live_tensors.values())
        self.targets: dict[str, torch.Tensor] = {}
        """Tensors that entries' bytes are read to, by saved name."""
        self.new_tensors: set[str] = set()
        """Saved names of the targets that were made for this restore."""
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Live tensors that cannot be read into directly, each with the one to copy from."""
        self.skipped: dict[str, str] = {}
        self.skipped_state: set[tuple[int, str]] = set()
        """Saved optimizer's index and part of the path of each parameter whose state is skipped."""
        self._counted_beside = {
            (str(i), join("", name))
            for i, saved in enumerate(self.forward_start["optimizers"])
            for group in saved["groups"]
            if group["options"].get("fused") or group["options"].get("capturable")
            for name in group["params"]
        }
        """Optimizer and name of each parameter whose counts of steps lie where it lies."""
        self.matched = match(self.forward_start["optimizers"], live.optimizers, live.names())
        self.pending: list[SavedOptimizer] = []

    def check(self) -> None:
        """Find what differs between the snapshot and the live objects.

        Raises:
            RestoreMismatchError: something differs, when strict, or no name is in both, or a shard
                fits no mesh here; has every name. Nothing was changed.
        """
        index, entries = self.snapshot.index, self.snapshot.entries
        missing, different = self._compare_model()
        for entry in entries:  # parameters in no module but in an optimizer
            name = self._live_name(entry.name)
            live = self.live_tensors.get(name)
            if live is not None and name.startswith("optim/") and entry.role == "parameter":
                difference = tensor_support.difference(entry, live.tensor)
                if difference:
                    different[name] = difference
        unexpected = [
            name for name in index if name.startswith("model/") and name not in self.live_tensors
        ]
        held = {**self.forward_start["extras"], **self.step_end["extras"]}
        missing += [f"extras/{e.name}" for e in self.live.extras if e.name not in held]
        for i, optimizer in enumerate(self.live.optimizers):
            if i not in self.matched.values():
                missing.append(f"optim/{i} ({type(optimizer).__name__} over these parameters)")
        different |= {self._live_name(name) or name: why for name, why in self.unequal.items()}
        why = ""
        if self.strict and (missing or unexpected or different):
            why = _DIFFERS + (_OTHER_RANKS if self.unequal else "")
        elif missing and index.keys().isdisjoint(self.live_tensors):
            why = "has nothing of this model: is it that of another run?"
        if why:
            raise RestoreMismatchError(
                f"the snapshot of step {self.snapshot.record.step} {why}",
                missing=missing,
                unexpected=unexpected,
                different=different,
            )
        self.skipped |= dict.fromkeys(missing, "not in the snapshot")
        self.skipped |= dict.fromkeys(unexpected, "not in the live model")
        self.skipped |= different
        self._skip_tied()
        self._skip_state(different)
        lost = tensor_support.homeless(
            (e for e in entries if e.name not in self.skipped), self.meshes
        )
        if lost:
            raise RestoreMismatchError("sharded state has no place to go to", different=lost)

    def _compare_model(self) -> tuple[list[str], dict[str, str]]:
        """Return the model's tensors that the snapshot lacks, and those that differ, with why."""
        missing, different = [], {}
        roots: dict[str, str] = {}
        """Name of the saved tensor whose bytes each live tensor takes."""
        index, entries = self.snapshot.index, self.snapshot.entries
        for name, live in self.live_tensors.items():
            if not name.startswith("model/"):
                continue
            if name not in index:
                missing.append(name)
                continue
            entry = entries[index[name]]
            difference = tensor_support.difference(entry, live.tensor)
            if not difference:  # one memory can take the bytes of one saved tensor only
                tied, own = live.alias_of or name, entry.alias_of or name
                if roots.setdefault(tied, own) != own:
                    difference = f"tied to {tied} here, not in the snapshot"
            if difference:
                different[name] = difference
        return missing, different

    def _skip_tied(self) -> None:
        """Skip saved aliases, which have no bytes of their own, of tensors that are skipped."""
        for entry in self.snapshot.entries:
            if entry.name in self.live_tensors and entry.alias_of in self.skipped:
                why = f"the snapshot has it as {entry.alias_of}, which was not restored"
                self.skipped.setdefault(entry.name, why)

    def _skip_state(self, different: Iterable[str]) -> None:
        """Skip the state of parameters that are not restored: it does not fit them either."""
        for path in different:
            kind, _, rest = path.partition("/")
            for i in range(len(self.forward_start["optimizers"])):
                owner = f"optim/{self.matched.get(i)}/"
                if kind == "model":
                    self.skipped_state.add((i, rest))
                elif path.startswith(owner):
                    self.skipped_state.add((i, path.removeprefix(owner)))
        unequal = (path.split("/") for path in self.unequal)
        of_optimizers = (parts for parts in unequal if parts[0] == "optim")
        self.skipped_state |= {(int(parts[1]), parts[2]) for parts in of_optimizers}
        for entry in self.snapshot.entries:
            if self._has_skipped_state(entry.name):
                self.skipped.setdefault(entry.name, "its parameter was not restored")

    def _has_skipped_state(self, name: str) -> bool:
        parts = name.split("/")
        return parts[0] == "optim" and (int(parts[1]), parts[2]) in self.skipped_state

    def verify(self) -> None:
        """Verify every byte of the snapshot; nothing live changes.

        Tensors that are new, as the state of an optimizer that has none yet, are read while they
        are verified, also onto a device: no live object has them before all is known to be whole.

        Raises:
            CorruptSnapshotError: a checksum differs; names file, slot, step and tensor.
            RegionIOError: the medium cannot read the bytes.
        """
        self._make_targets()
        done = self._copy_to_devices(new=True)
        self.snapshot.verify(self._addresses(new=True), done)

    def copy(self) -> None:
        """Read the bytes into the live tensors, and verify them again on the way.

        Raises:
            CorruptSnapshotError, RegionIOError: as `verify`; the tensors are then undefined.
        """
        self.snapshot.read(self._addresses(new=False))
        self._copy_to_devices(new=False)

    def _addresses(self, *, new: bool) -> npt.NDArray[np.uint64]:
        """Return, per entry, where its bytes go in memory; 0: nowhere.

        Args:
            new: only tensors that nobody but this object has yet; if False, the rest. A snapshot
                that is in memory already is not to be there twice: all of it is the rest.
        """
        found = np.zeros(len(self.snapshot.entries), np.uint64)
        index = self.snapshot.index
        for name, target in self.targets.items():
            is_new = name in self.new_tensors and name not in self.snapshot.in_memory
            if holder(target) is None and new == is_new:
                found[index[name]] = target.data_ptr()
        return found

    def _copy_to_devices(self, *, new: bool) -> npt.NDArray[np.bool_]:
        """Fill tensors that devices hold, checking bytes on the way.

        Args:
            new: only tensors that nobody but this object has yet, which need not be verified
                beforehand; if False, the rest.

        Returns:
            Per entry, whether it was filled.
        """
        index, entries = self.snapshot.index, self.snapshot.entries
        filled = np.zeros(len(entries), np.bool_)
        held = {
            index[name]: target
            for name, target in self.targets.items()
            if holder(target) and new == (name in self.new_tensors)
        }
        if held:
            assert isinstance(self.snapshot, AssembledSnapshot)
            copy_to_devices(self.snapshot.parts, held, [entry.name for entry in entries])
            filled[[*held]] = True
        return filled

    def _make_targets(self) -> None:
        """Choose what is read to: live memory if the bytes fit as they are, else new tensors."""
        for entry in self.snapshot.entries:
            name = self._live_name(entry.name)
            live = self.live_tensors.get(name)
            if name in self.skipped or self._has_skipped_state(entry.name):
                continue
            fits = live is not None and not tensor_support.difference(entry, live.tensor)
            if live is not None and fits and not entry.alias_of and self._direct(entry, live.local):
                self.targets[entry.name] = live.local
                continue
            if entry.alias_of is None:
                self.targets[entry.name] = self._new_tensor(entry, name)
                self.new_tensors.add(entry.name)
            if live is not None and fits:
                source = self.targets.get(entry.alias_of or entry.name)
                if source is not None and source is not live.local:
                    self.copies.append((live.local, source))

    def _direct(self, entry: Entry, tensor: torch.Tensor) -> bool:
        """Tell whether the bytes can be read straight into the tensor's memory."""
        in_region = entry.name not in self.snapshot.in_memory
        reach = tensor.device.type == "cpu" or (in_region and holder(tensor) is not None)
        return reach and is_dense(tensor) and tuple(tensor.stride()) == entry.strides

    def _new_tensor(self, entry: Entry, live_name: str) -> torch.Tensor:
        """Make an empty tensor, on the device of its parameter if it belongs there."""
        near = self.live_tensors.get("model/" + "/".join(live_name.split("/")[2:3]))
        in_region = entry.name not in self.snapshot.in_memory
        device = holder(near.local) if near is not None and in_region else None
        if entry.role != "optimizer" or device is None or not self._belongs_beside(entry):
            return empty_tensor(entry)
        return device.empty(entry.shape, getattr(torch, entry.dtype), entry.strides)

    def _belongs_beside(self, entry: Entry) -> bool:
        """Tell whether a tensor of an optimizer belongs on the device of its parameter.

        It lived on one; or the parameter was on the CPU, and only counts of steps stay there.
        """
        if entry.device != "cpu":
            return True
        _, i, name, *_ = entry.name.split("/")
        at = self.snapshot.index.get(f"model/{name}")
        if at is None or self.snapshot.entries[at].device != "cpu":
            return False
        return bool(entry.shape) or (i, name) in self._counted_beside

    def _live_name(self, name: str) -> str:
        """Return the live name of a saved tensor, whose optimizer may have another index now."""
        if name.startswith("optim/"):
            _, i, rest = name.split("/", 2)
            if int(i) in self.matched:
                return f"optim/{self.matched[int(i)]}/{rest}"
            return ""  # kept until its optimizer is found
        return name

    def finish(self) -> None:
        """Fill what could not be read into, then optimizers and extras, once all bytes are read."""
        with torch.no_grad():
            for held, source in self.copies:
                fill(held, source)
            for name, target in self.targets.items():
                live = self.live_tensors.get(self._live_name(name))
                whole = target if live is None else live.tensor
                torch.autograd.graph.increment_version({target, whole})
        for i, saved in enumerate(self.forward_start["optimizers"]):
            kept = {
                name: tree
                for name, tree in saved["state"].items()
                if (i, boundary_codec.join("", name)) not in self.skipped_state
            }
            holding = SavedOptimizer(i, {**saved, "state": kept}, *self._optimizer_tensors(i))
            if i in self.matched:
                j = self.matched[i]
                install(holding, j, self.live.optimizers[j], self.live.names())
            else:
                self.pending.append(holding)
        for extra in self.live.extras:
            if self.foreign_reason and extra.is_generator:
                self.skipped[f"extras/{extra.name}"] = self.foreign_reason
            else:
                self._load_extra(extra)
        if self.foreign_reason:
            self.skipped["rng"] = self.foreign_reason
        else:
            why = rng.restore(boundary_codec.rebuild(self.step_end["rng"]))
            if why:
                self.skipped["rng/cuda"] = why

    def _optimizer_tensors(self, i: int) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """Return saved optimizer i's tensors by saved name, and which belong with a parameter."""
        prefix = f"optim/{i}/"
        found, beside = {}, set()
        for name in self.targets:
            if name.startswith(prefix):
                live: StateTensor | None = self.live_tensors.get(self._live_name(name))
                entry = self.snapshot.entries[self.snapshot.index[name]]
                usable = live is not None and not tensor_support.difference(entry, live.tensor)
                found[name] = live.tensor if live is not None and usable else self.tensor(name)
                if self._belongs_beside(entry):
                    beside.add(name)
        return found, frozenset(beside)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that was read, by its saved name: the live one if that was filled."""
        part, live = self.targets[name], self.live_tensors.get(self._live_name(name))
        if live is not None and live.local is part:
            return live.tensor
        return tensor_support.whole(
            self.snapshot.entries[self.snapshot.index[name]], part, self.meshes
        )

    def _load_extra(self, extra: Extra) -> None:
        early, late = self.step_end["extras"], self.forward_start["extras"]
        order = (early, late) if extra.instant != "forward" else (late, early)
        for held in order:
            if extra.name in held:
                extra.load(boundary_codec.rebuild(held[extra.name], self.tensor))
                return

    def unused_extras(self) -> tuple[str, ...]:
        """Return the names of extras in the snapshot that no live extra has."""
        given = {extra.name for extra in self.live.extras}
        saved = {*self.step_end["extras"], *self.forward_start["extras"]} - given
        return tuple(sorted(name for name in saved if not is_own(name)))


def empty_tensor(entry: Entry) -> torch.Tensor:
    """Make an empty CPU tensor for an entry."""
    dtype = getattr(torch, entry.dtype)
    return torch.empty_strided(entry.shape, entry.strides, dtype=dtype, device="cpu")
