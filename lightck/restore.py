"""Restore: the newest snapshot that is whole, verified, back into the live tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightck.capture import boundary, parts, rng
from lightck.capture.extras import parse
from lightck.capture.filling import Filling
from lightck.capture.hooks import before_next_forward
from lightck.capture.modules import innermost
from lightck.capture.optimizer import Saved
from lightck.capture.state import Inventory
from lightck.capture.steps import Steps
from lightck.config import Config
from lightck.errors import CorruptSnapshotError, LightckError
from lightck.events import event
from lightck.region import backing, place
from lightck.region.choice import first_whole
from lightck.region.pool import usual_threads
from lightck.region.region import Candidate, Region
from lightck.types import RestoreInfo


@dataclass(eq=False)
class Progress:
    """How far this process has brought a model: attach goes on from here."""

    step: int = 0
    pending: list[Saved] = field(default_factory=list)
    """Restored state of optimizers that are not there yet."""
    forward_hook: Any = None
    attached: list[Steps] = field(default_factory=list)
    """Step counters of the handles on the model; `step` is the last one's that was closed."""


_progress: weakref.WeakKeyDictionary[nn.Module, Progress] = weakref.WeakKeyDictionary()


def progress(model: nn.Module) -> Progress:
    """What restore or an earlier handle left for this model; made on first use."""
    inner = _lasting(model)
    if inner not in _progress:
        _progress[inner] = Progress()
    return _progress[inner]


def _lasting(model: nn.Module) -> nn.Module:
    """What lives as long as the user's model."""
    if isinstance(model, nn.ModuleList) and len(model):
        model = model[0]  # the list is made anew by each call
    return innermost(model)


def restore(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
    step: int | Literal["latest"] = "latest",
    strict: bool = True,
) -> RestoreInfo | None:
    """Bring back a snapshot into live objects, bit for bit.

    On return the model's tensors are filled in place, the optimizers' state is complete (what did
    not exist yet is made; without `optimizer` it is kept until `attach` finds the optimizer),
    extras are loaded, and the random generators stand where the step ended; at the first training
    forward they are set once more to what they were at that forward.

    Args:
        model: a module, or several.
        optimizer: one or several; their order does not matter.
        path: as for `attach`.
        extras: the objects given to `attach` under the same names.
        step: which snapshot; the newest that is whole by default.
        strict: refuse when names, shapes or dtypes differ; False restores the rest and says what
            was skipped.

    Returns:
        What was restored, or None when there is nothing at all at `path`.

    Raises:
        NoSnapshotError: snapshots were there, none is whole, or not the wanted step.
        RestoreMismatchError: the state differs; nothing was changed.
        RegionError: the place is not safe or not a region.
        LightckError: a handle is attached to the model.

    Thread: the training thread; blocks for as long as reading and checking takes.
    """
    root = as_module(model)
    if progress(root).attached:
        raise LightckError("a handle records this model: close() or detach() the handle first")
    config = Config.resolve(path=path)
    where = place.locate(config.path, 0, create=False)
    if not where.exists or backing.is_blank(where):
        return None
    live = Inventory(root, as_list(optimizer), parse(extras))

    def take(region: Region, candidate: Candidate, fell_back: list[str]) -> RestoreInfo:
        info = _restore_from(region, candidate, live, strict, fell_back)
        region.close()
        return info

    return first_whole(where, step, take)


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """One module for one or several."""
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Zero, one or several optimizers as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _restore_from(
    region: Region, candidate: Candidate, live: Inventory, strict: bool, fell_back: list[str]
) -> RestoreInfo:
    record, label = candidate.record, f"{region.place.file} step {candidate.record.step}"
    first, second = parts.read(candidate, context=label)
    region.native.lease(record.slot, True)
    try:
        if region.native.read_record(record.slot) != record:
            raise CorruptSnapshotError(f"{label}: overwritten while it was read")
        filling = Filling(candidate, live, second, strict)
        filling.check(first)
        reads, names = filling.reads(verify_only=True)
        region.fetch(candidate, reads, names, threads=usual_threads())
        reads, names = filling.reads(verify_only=False)
        region.fetch(candidate, reads, names, threads=usual_threads())
    finally:
        region.native.lease(record.slot, False)
    filling.finish(first)
    _arm_forward(live, second, filling.targets.__getitem__)
    region.carry_on(record)
    state = progress(live.model)
    state.step, state.pending = record.step, filling.pending
    info = RestoreInfo(
        step=record.step,
        slot=record.slot,
        sequence=record.sequence,
        wall_time=datetime.fromtimestamp(record.wall_time_ns / 1e9, UTC),
        path=region.place.path,
        early=record.early,
        suspect=record.suspect,
        timeline=record.timeline,
        leftover=filling.leftover(first),
        skipped=filling.skipped,
        fell_back=tuple(fell_back),
    )
    event("restored", step=info.step, slot=info.slot, path=info.path)
    return info


def _arm_forward(
    live: Inventory, second: dict[str, Any], tensors: Callable[[str], torch.Tensor]
) -> None:
    """Set the generators at the first training forward to what they were there (b).

    However the loop drew its first batch, the forward then draws what it drew before.
    """
    state = progress(live.model)
    if state.forward_hook is not None:
        state.forward_hook.remove()
        state.forward_hook = None
    if "rng" not in second:
        return
    generators = [
        (extra, boundary.rebuild(second["extras"][extra.name], tensors))
        for extra in live.extras
        if extra.instant == "both" and extra.name in second["extras"]
    ]
    states = boundary.rebuild(second["rng"])

    def action() -> None:
        rng.restore(states)
        for extra, value in generators:
            extra.load(value)

    state.forward_hook = before_next_forward(live.model, action)
    weakref.finalize(_lasting(live.model), state.forward_hook.remove)
