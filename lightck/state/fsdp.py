"""Find the sharded parameters of FSDP2's modules while gathered copies are in their place.

From a module's forward to its backward (`reshard_after_forward=False`: after any forward) its
`_parameters` hold gathered copies, which optimizers do not know and no update reaches. What a
snapshot names is always the sharded parameter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightck.state import tensor_support

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
