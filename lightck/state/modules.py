"""The module tree as the user wrote it: names do not depend on what wraps a module.

`DistributedDataParallel` instances are looked through wherever they are. torch.compile and
activation checkpointing put prefixes into names, which are taken off. FSDP2's sharded parameters
are found while gathered copies stand in.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightck.state import tensor_support

# ---- FSDP2: sharded parameters while gathered copies are in their place --------------------------
# From a module's forward to its backward (`reshard_after_forward=False`: after any forward) its
# `_parameters` hold gathered copies, which optimizers do not know and no update reaches. What a
# snapshot names is always the sharded parameter.

_sharded: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""Sharded parameters by key, only its own, of each module below `fully_shard`."""


def remember(model: nn.Module) -> None:
    """Note the sharded parameters; to be called between a step and the next forward.

    Modules that a forward left gathered are resharded, which communicates nothing.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    roots = [module for module in model.modules() if isinstance(module, kind)]
    for root in roots:
        root.reshard()
    for module in {each for root in roots for each in root.modules()}:
        own = {k: p for k, p in module._parameters.items() if p is not None}
        found = {key: p for key, p in own.items() if tensor_support.is_dtensor(p)}
        if found:
            _sharded[module] = found


def parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own parameters by key; where FSDP2 has gathered them, the sharded ones."""
    known = _sharded.get(module) if _sharded else None
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        sharded = known.get(key) if known else None
        if known is None or sharded is None or parameter is sharded:
            yield key, parameter
        elif _alike(parameter, sharded):  # replaced, as by load_state_dict(assign=True)
            known[key] = parameter
            yield key, parameter
        else:
            yield key, sharded


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether both are sharded alike; gathered ones, on fewer ranks or on all, are not."""
    if not tensor_support.is_dtensor(one):
        return False
    a, b = one._spec, other._spec  # type: ignore[attr-defined]
    return bool(a.mesh == b.mesh and a.placements == b.placements)


# ---- modules and names, whatever wraps them ------------------------------------------------------

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing put into names; they come and go."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of `DistributedDataParallel`, else itself."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def trains(module: nn.Module) -> bool:
    """Tell whether a module is in training mode: of a DDP what is inside of it, which is what runs.

    Behind a validation Lightning's DDP stays in evaluation mode.
    """
    return module.training or unwrapped(module).training


def innermost(module: nn.Module) -> nn.Module:
    """Return the user's own module, under every wrapper."""
    while True:
        module = unwrapped(module)
        within = (getattr(module, prefix[:-1], None) for prefix in WRAPPERS)
        inner = next((each for each in within if isinstance(each, nn.Module)), None)
        if inner is None:
            return module
        module = inner


def named_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under every path it has, parents first."""
    model = unwrapped(model)
    yield strip(path), model
    for name, child in model._modules.items():
        if child is not None:
            yield from named_modules(child, f"{path}.{name}" if path else name)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's parameters under every name; of FSDP2 always the sharded ones."""
    for path, module in named_modules(model):
        for name, parameter in parameters(module):
            yield f"{path}.{name}" if path else name, parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's persistent buffers under every name they have."""
    for path, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return every module once.

    It runs at every step, so it avoids the nested generators of `nn.Module.modules`.
    """
    found, seen = [model], {id(model)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def persistent_buffers(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the buffers that belong to the model's state."""
    return [
        buffer
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def strip(path: str) -> str:
    """Remove what torch.compile and activation checkpointing add to a path."""
    return ".".join(part for part in path.split(".") if f"{part}." not in WRAPPERS)
