"""Predicts optimizer state that does not exist yet: a tiny clone of the optimizer is stepped.

Only sizes are wanted, to make room at attach. The clone's parameters have small, pairwise different
dimensions, so that a state tensor's shape tells which of the parameter's dimensions it follows.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from lightck.journal import step_journal
from lightck.journal.boundary_state import BoundaryState
from lightck.journal.entry import MAX_EXTRA_BYTES
from lightck.region import allocator
from lightck.region.layout import Entry
from lightck.region.native_region import JOURNAL_BYTES
from lightck.state import boundary_blob, tensor_layout, tensor_support
from lightck.state.boundary_codec import join
from lightck.state.inventory import Inventory, StateTensor, parameter_names

_SMALL = (2, 3, 5, 7, 11, 13)
_Made = tuple[str, torch.dtype, tuple[int, ...]]
"""Key, dtype and shape of a tensor in a state."""
BOUNDARY_RESERVE_BYTES = 64 << 10
"""Bytes for random generators (about 20 KiB) and small extras, which attach does not measure."""


def expected(inventory: Inventory, *, whole: bool = False) -> tuple[tuple[Entry, ...], int]:
    """Return the first snapshot's entries, as far as known, and the bytes its manifest needs.

    With `whole` other ranks' shares are among them.
    """
    collected = inventory.collect()
    everything = inventory.everything()
    names = inventory.names()
    missing = [
        live
        for i, optimizer in enumerate(inventory.optimizers)
        for live in missing_state(i, optimizer, names) or ()
    ]
    known = {live.name for live in everything}
    others = [live for live in collected.lives if live.name not in known]
    all_ranks = [*everything, *missing]
    lives = [*(all_ranks if whole else inventory.share(all_ranks).lives), *others]
    blob = len(boundary_blob.closed(collected.tree))
    capacity = allocator.manifest_capacity(len(lives), blob + BOUNDARY_RESERVE_BYTES)
    return tuple(map(tensor_layout.describe, lives)), capacity


def journal_bytes(inventory: Inventory) -> int:
    """Return the bytes of the boundary journal: three entries, each twice what one would be now."""
    collected = inventory.collect()
    rest = {**collected.tree, "extras": {}}
    size = len(boundary_blob.closed(rest)) + BOUNDARY_RESERVE_BYTES
    # Larger extras are not written to the journal.
    extras = BoundaryState(inventory).step_end_now()["extras"], collected.tree["extras"]
    size += min(len(boundary_blob.closed(extras)), MAX_EXTRA_BYTES)
    size += sum(live.local.nbytes for live in collected.lives if step_journal.is_copied(live))
    return max(JOURNAL_BYTES, 6 * min(size, 2 * step_journal.MAX_COPIED_BYTES))


def missing_state(
    i: int, optimizer: Optimizer, names: dict[int, str]
) -> tuple[StateTensor, ...] | None:
    """Make tensors without bytes for the state that `optimizer` will create in its first step.

    Returns:
        The tensors, or None when the clone cannot be made or stepped, or makes state that cannot be
        scaled: then sizes are settled at the end of the first step. Draws nothing from the
        global generators and changes nothing of the optimizer.
    """
    wanted = [
        (g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]
        if p not in optimizer.state and p.requires_grad
    ]  # fmt: skip
    kinds: dict[Any, list[_Made]] = {}
    known = parameter_names(i, optimizer, names)
    lives: list[StateTensor] = []
    for g, parameter in wanted:
        if parameter.dim() > len(_SMALL):
            return None
        kind = (g, parameter.dtype, parameter.dim())
        if kind not in kinds:
            found = _step_clone(optimizer, g, parameter)
            if found is None:
                return None
            kinds[kind] = found
        base = f"optim/{i}/{join('', known[parameter])}"
        sharded = tensor_support.is_dtensor(parameter)
        if sharded and any(len(shape) not in (0, parameter.dim()) for *_, shape in kinds[kind]):
            return None  # state of fewer dimensions need not be sharded like the parameter
        held = tensor_support.local(parameter)
        for key, dtype, shape in kinds[kind]:
            # Small dimensions become the real ones.
            sizes = dict(zip(_SMALL, held.shape, strict=False))
            scaled = [sizes.get(size, size) for size in shape]
            tensor = torch.empty(scaled, dtype=dtype, device="meta")
            if sharded and shape:
                tensor = tensor_support.like(parameter, tensor)
            layer = known[parameter].rpartition(".")[0]  # the layout table tells it, too
            lives.append(StateTensor(join(base, key), "optimizer", layer, tensor, frozenset((i,))))
    return tuple(lives)


def _step_clone(optimizer: Optimizer, group: int, parameter: torch.Tensor) -> list[_Made] | None:
    """Return the state that one step makes for a tiny parameter like this one; None on failure."""
    options = {k: v for k, v in optimizer.param_groups[group].items() if k != "params"}
    tiny = torch.zeros(_SMALL[: parameter.dim()], dtype=parameter.dtype, requires_grad=True)
    tiny.grad = torch.zeros_like(tiny)
    states = (torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())
    try:
        kind: Any = type(optimizer)
        clone = kind([{"params": [tiny], **_detached(options)}])
        # The class's own step: hooks on steps are for the user's optimizers.
        step = getattr(type(clone).step, "__wrapped__", type(clone).step)
        with torch.no_grad():
            step(clone)
        state = dict(clone.state[tiny])
    # Any error of a foreign optimizer only means that the prediction is not possible.
    except Exception:  # noqa: BLE001
        return None
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
    found = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            if any(size != 1 and size not in tiny.shape for size in shape):
                return None
            found.append((str(key), value.dtype, shape))
        elif isinstance(value, list | tuple | dict):
            return None
    return found


def _detached(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
