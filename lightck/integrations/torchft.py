"""Checkpoint a replica group of torchft, and go on where it was before its peers heal it.

    run = lightck.integrations.torchft.attach(manager, model, optimizer, "./run")

Each replica group has regions of its own, and its step numbers are the manager's. Tried with
torchft-nightly 2026.10.26.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import lightck
from lightck.errors import ConfigError
from lightck.handle import Handle
from lightck.integrations.resumed import Resumed, joined

try:
    from torchft import Manager
    from torchft.optim import OptimizerWrapper
except ImportError as error:
    raise ImportError(
        "lightck.integrations.torchft needs torchft: pip install 'lightck[torchft]'"
    ) from error

GROUP = "REPLICA_GROUP_ID"
"""The environment variable in which torchft's launcher has the number of the replica group."""
_KEY = "lightck"
"""The name of this integration among the states that a peer sends to one that it heals."""


def attach(
    manager: Manager,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | os.PathLike[str],
    *,
    group: int | str | None = None,
    extras: Mapping[str, Any] | None = None,
    step: int | Literal["latest", "exact"] = "latest",
    **settings: Any,
) -> Resumed:
    """Restore what this replica group has at `path`, and checkpoint it from now on.

    On return model, optimizer and manager are at the restored step. If its peers have gone on
    meanwhile, torchft heals the group from them in its first step; then, as whenever it heals, the
    snapshots count from the step that the peers have.

    Args:
        manager: made with the functions that give and load the state. Attach in every replica
            group, and behind all `register_state_dict_fn`: healing looks for the same names.
        model: as for `lightck.attach`; torchft's DistributedDataParallel is looked through.
        optimizer: as for `lightck.attach`; torchft's `Optimizer` is looked through.
        path: folder for all groups, made if it is missing; each has its own below it.
        group: number or name of the replica group; default `$REPLICA_GROUP_ID`.
        extras: as for `lightck.attach`. What a peer sends does not have them: a group that is
            healed keeps its own generators and position in the data.
        step: as for `lightck.restore`.
        **settings: as for `lightck.attach`.

    Raises:
        ConfigError: the group is not known, or the manager is none.
        LightckError: as `lightck.restore` and `lightck.attach` raise.

    Thread: the training thread, before the first step.
    """
    if not isinstance(manager, Manager):
        raise ConfigError(
            f"manager must be a torchft.Manager, found an object of type {type(manager).__name__}"
        )
    where = _place_of(path, group)
    inner = _inner(model), _optimizers(optimizer), where
    # The manager counts a step just before its update: at the step's end it has counted.
    given = joined({"torchft": lightck.at_step(manager)}, extras)
    info = lightck.restore(*inner, extras=given, step=step)
    handle = lightck.attach(*inner, extras=given, **settings)
    if handle.step != manager.current_step():
        handle.replaced(manager.current_step())
    healed = _Healed(manager, handle)
    manager.register_state_dict_fn(_KEY, healed.load, healed.state)
    return Resumed(handle, info, healed.leave)


class _Healed:
    """Is loaded last when a peer heals this group, on its training thread, before the update."""

    def __init__(self, manager: Manager, handle: Handle) -> None:
        self._manager, self._handle = manager, handle
        self._left = False

    def state(self) -> dict[str, int]:
        """Return what a peer sends, on whichever thread: only that it is there counts."""
        return {"step": self._manager.current_step()}

    def load(self, state: Any) -> None:
        """Go on from the manager's step, which is the peer's by now."""
        if not self._left:
            self._handle.replaced(self._manager.current_step())

    def leave(self) -> None:
        """Take no more note: the handle is about to be closed, the manager goes on."""
        self._left = True


def _place_of(path: str | os.PathLike[str], group: int | str | None) -> Path:
    """Return the folder of a replica group, below one that is there."""
    name = os.environ.get(GROUP) if group is None else str(group)
    if not name:
        raise ConfigError(
            f"which replica group this is cannot be known: ${GROUP} is not set. Write"
            " attach(..., group=0), another in each group, the same after a restart"
        )
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"group must be letters, digits, - and _, found {name!r}")
    folder = Path(path)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"replica-{name}"


def _inner(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    several = [model] if isinstance(model, nn.Module) else list(model)
    return [m.module if isinstance(m, DistributedDataParallel) else m for m in several]


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return [each.optim if isinstance(each, OptimizerWrapper) else each for each in several]
