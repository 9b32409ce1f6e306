"""Restore the newest snapshot that is whole, verified, into the live tensors."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Never, SupportsIndex

from torch import nn
from torch.optim import Optimizer

from lightck.config import Config
from lightck.data import lookahead
from lightck.distributed import ddp_buckets
from lightck.distributed.rendezvous import Joining, Rendezvous, meeting, note_restored
from lightck.distributed.restore.healing import ReceivedSnapshot
from lightck.distributed.restore.local_state import FailureSnapshot
from lightck.distributed.restore.protocol import RestoreAttempt, restore_attempts
from lightck.distributed.restore.selection import Key
from lightck.distributed.restore.survey import RegionSurvey
from lightck.errors import ConfigError, CoordinationError, LightckError
from lightck.events import event
from lightck.loop.hooks import before_next_forward
from lightck.loop.policy_state import text_of
from lightck.loop.steps import Steps
from lightck.reader.assembly import AssembledSnapshot, Snapshot
from lightck.reader.fill import SavedOptimizer, StateFiller
from lightck.region import location
from lightck.region.native_region import Record
from lightck.region.region import Continuation
from lightck.state import boundary_codec, rng
from lightck.state.arguments import check, refuse_unknown
from lightck.state.extras import Epochs, is_own, parse
from lightck.state.inventory import Inventory
from lightck.state.module_extra_state import extra_states
from lightck.state.modules import innermost
from lightck.types import RestoreInfo

_ARGUMENTS = ("model", "optimizer", "path", "extras", "step", "strict")
_EARLY = (
    "what the loop does between the end of this step and the next forward (scheduler.step(), EMA,"
    " evaluation) is not in it, or not all of it: make up for it if RestoreInfo.early says so, or"
    " take an older exact snapshot with restore(step=...)"
)


@dataclass(eq=False)
class ModelProgress:
    """The progress that this process made with a model, from which attach goes on."""

    others: tuple[weakref.ref[nn.Module], ...] = ()
    """The models beside the first, where there are several: the progress holds only for all
    together."""
    continuation: Continuation = field(default_factory=Continuation)
    step: int = 0
    restored: tuple[int, int] | None = None
    """(timeline, step) of the snapshot that was restored last; the same on every rank."""
    early: bool = False
    """The restored snapshot was finished before forward start; the same on every rank."""
    healed: bool = False
    """Ranks were given what was restored by others; the same on every rank."""
    extras: frozenset[str] = frozenset()
    """Names of the extras in the snapshots that the model continues."""
    learned: str | None = None
    """The policies' state in the snapshot, as text; None: it has none."""
    epochs: int = 0
    """The number of epochs that were marked."""
    restored_from: Path | None = None
    """The place of the snapshot that was restored last; None since a handle has left the model."""
    pending: list[SavedOptimizer] = field(default_factory=list)
    """Restored state of optimizers that have not been found yet."""
    arrangements: dict[str, ddp_buckets.Arrangement] | None = None
    """The restored arrangements of DDP modules, while the model is in none yet; None: there is
    nothing to bring."""
    forward_hook: Any = None
    attached: list[Steps] = field(default_factory=list)
    """Step counters of the handles on the model; `step` is that of the handle that was closed
    last."""

    def has_extras(self, names: frozenset[str]) -> None:
        """Note which extras the next snapshots have."""
        self.extras = names

    def bring_arrangements(self, ranks: Rendezvous, model: nn.Module) -> None:
        """Bring the model's DDP modules, if it is in any yet, to the restored arrangements."""
        if self.arrangements is not None and ddp_buckets.by_path(model):
            ddp_buckets.bring(ranks, model, self.arrangements)
            self.arrangements = None

    def left_at(self, step: int, steps: Steps, learned: str | None, epochs: int) -> None:
        """Note that a handle, which counted with `steps`, has left the model at `step`.

        `learned`: what policies have learned until then; `epochs`: how many were marked.
        """
        self.step, self.learned, self.epochs = step, learned or self.learned, epochs
        self.early = self.healed = False
        self.restored_from = None
        self.attached.remove(steps)


_progress: weakref.WeakKeyDictionary[nn.Module, list[ModelProgress]] = weakref.WeakKeyDictionary()
"""The progress by first model: alone, and together with others beside it."""


def progress(model: nn.Module) -> ModelProgress:
    """Return what restore or an earlier handle left for this very model; made on first use.

    A new model has none, whatever the process did before with another model of the same form.
    """
    first, *rest = _lasting(model)
    known = _progress.setdefault(first, [])
    found = next((each for each in known if [other() for other in each.others] == rest), None)
    if found is None:
        attached = known[0].attached if known else []
        found = ModelProgress(tuple(map(weakref.ref, rest)), attached=attached)
        known.append(found)
    return found


def _lasting(model: nn.Module) -> list[nn.Module]:
    """Return the modules that live as long as the user's models, inside all wrappers."""
    # Each call makes a new module list of several models.
    models = list(model) if isinstance(model, nn.ModuleList) and len(model) else [model]
    return [innermost(each) for each in models]


def restore(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    path: str | os.PathLike[str] | None = None,
    *more: Never,
    extras: Mapping[str, Any] | None = None,
    step: int | Literal["latest", "exact"] = "latest",
    strict: bool = True,
    **unknown: Never,
) -> RestoreInfo | None:
    """Restore a snapshot into live objects, bit for bit.

    On return the model's tensors are filled in place, the optimizers' state is complete (what did
    not exist yet is made; without `optimizer` it is kept until `attach` finds the optimizer),
    extras are loaded, and the random generators are set to where the step ended; at the first
    training forward they are set once more, to what they were at that forward.

    Under torch.distributed every rank calls this. They take the newest snapshot of which each can
    read its whole state, or receive it: replicated state goes from a rank that has it to those that
    lack it, over gloo (`info.healed`). All take the same; nothing is changed on any rank before
    each has checked all of it. On another number of ranks than wrote it replicated state is found
    by name; buffers, extras and data positions of rank r are those of rank r modulo that number.

    Args:
        model: a module, or several.
        optimizer: one or several, in any order; over tensors of no module in that of `attach`.
        path: as for `attach`.
        *more: nothing; further arguments are given by name.
        extras: the objects given to `attach` under the same names.
        step: which snapshot; by default the newest that is whole, but none that was finished early
            (a warning is logged if it is) while an exact one is a step older at most; by "exact" no
            early one while any exact one is there, for loops that cannot make up for what it lacks.
        strict: refuse when names, shapes or dtypes differ; False skips these (see `skipped`).
        **unknown: nothing; refused with the argument that may be meant.

    Returns:
        A description of what was restored, or None when there is nothing at all at `path`.

    Raises:
        ConfigError: an argument is of the wrong type, misplaced or unknown; it says what to write.
        NoSnapshotError: snapshots are there, but none is whole, or not the wanted step.
        RestoreMismatchError: the state differs; nothing was changed.
        CoordinationError: another rank failed, named with its reason, or did not come.
        RegionError, LightckError: no safe place, or no region; a handle is attached to the model.

    Thread: the training thread; blocks for as long as reading and checking takes.
    """
    with meeting("restore") as ranks:
        refuse_unknown("restore", unknown, _ARGUMENTS)
        root, optimizers = check("restore", model, optimizer, path, extras, more)
        place, known = Config.resolve(path=path).path, _unattached(root)
        wanted = _wanted(step, strict, place, ranks.joining)
        where = location.locate(place, ranks.rank, create=False)
        live = Inventory(root, optimizers, parse(extras) + extra_states(root))
        attempts = restore_attempts(ranks, where, wanted, known.continuation, step == "exact")
        nothing = ranks.joining is not None and wanted is None  # nor was there at first
        info = None if nothing else _exact(ranks, place, _first_restored(attempts, live, strict))
        ranks.leave()
    note_restored(place, None if info is None else info.step)
    return info


def _unattached(model: nn.Module) -> ModelProgress:
    """Return the progress of a model.

    Raises:
        LightckError: a handle is attached to it.
    """
    found = progress(model)
    if found.attached:
        raise LightckError("a handle records this model: close() or detach() the handle first")
    return found


def _wanted(step: object, strict: object, path: Path, joining: Joining | None) -> int | None:
    """Return the wanted step, None for the newest; of a replacement that of the other ranks."""
    if not isinstance(strict, bool):
        raise ConfigError(f"restore: strict must be True or False, found {strict!r}")
    if joining is not None:
        return joining.step_at(path)
    if step in ("latest", "exact"):
        return None
    if not isinstance(step, SupportsIndex) or isinstance(step, bool) or int(step) < 0:
        raise ConfigError(
            f"restore: step must be the number of a step, 'latest' or 'exact', found {step!r}"
        )
    return int(step)


def _exact(ranks: Rendezvous, path: Path, info: RestoreInfo | None) -> RestoreInfo | None:
    """Return `info`; refuse to join the other ranks with a state of another instant than theirs.

    Raises:
        CoordinationError: says what all ranks have to do.
    """
    joining = ranks.joining
    if joining is None or os.fspath(path) != joining.path:
        return info
    if info is None or info.early:
        raise CoordinationError(
            f"rank {ranks.rank} replaces one that was lost, and its own state at the forward of"
            f" step {joining.step} is not known: all ranks have to be restarted"
        )
    return info


def _first_restored(
    attempts: Generator[RestoreAttempt, None, None], live: Inventory, strict: bool
) -> RestoreInfo | None:
    """Restore the first snapshot that all ranks can; return None if there is nothing at all."""
    with contextlib.closing(attempts):
        for attempt in attempts:
            info = _restored(attempt, live, strict)
            if info is not None:
                progress(live.model).bring_arrangements(attempt.ranks, live.model)
                return info
    return None


def _restored(attempt: RestoreAttempt, live: Inventory, strict: bool) -> RestoreInfo | None:
    """Restore one snapshot, on all ranks; return None if a rank finds that it needs another one."""
    with attempt.verifying():
        snapshot = attempt.assemble()
        reason, unequal = _foreign_reason(attempt, snapshot), attempt.unequal_tensors(snapshot)
        filler = StateFiller(snapshot, live, strict, foreign_reason=reason, unequal=unequal)
        filler.check()
        context = f"step {attempt.key.step}"
        arrangements = ddp_buckets.opened(filler.forward_start, context=context)
        filler.verify()
    if not attempt.is_verified():
        return None
    state = progress(live.model)
    with attempt.copying():
        state.continuation.clear()  # the live state is no longer what was restored before
        filler.copy()
        filler.finish()
        _arm_forward(live, filler)
        _note_progress(state, attempt, filler)
        state.arrangements = arrangements
        info = _described(attempt, filler)
    return info if attempt.is_copied() else None


def _note_progress(state: ModelProgress, attempt: RestoreAttempt, filler: StateFiller) -> None:
    """Note what attach goes on from, and what the next batches are compared with."""
    key, snapshot = attempt.key, filler.snapshot
    first, second = filler.step_end["extras"], filler.forward_start["extras"]
    held = None if filler.foreign_reason else first.get(lookahead.NAME)
    lookahead.expect(lookahead.Redraw(key.step, held, filler.live.extras))
    _carry_on(attempt, snapshot, state.continuation)
    state.step, state.pending = key.step, filler.pending
    state.restored = (key.timeline, key.step)
    state.restored_from = attempt.survey.where.path
    state.early, state.healed = snapshot.early, bool(attempt.healed)
    state.extras = frozenset(name for name in (*first, *second) if not is_own(name))
    state.learned, state.epochs = text_of(first), Epochs.held({**second, **first})


def _foreign_reason(attempt: RestoreAttempt, snapshot: Snapshot) -> str:
    """Describe why this rank's own state is another rank's; return "" if it is not."""
    rank, world, taken = attempt.ranks.rank, attempt.key.world, snapshot.record.rank
    if rank >= world:
        why = f"{world} rank(s) wrote the snapshot"
    elif isinstance(snapshot, ReceivedSnapshot) and snapshot.local is None:
        step = attempt.key.step
        why = f"neither region nor journal has what was rank {rank}'s own in step {step}"
    else:
        return ""
    return (
        f"{why}: rank {rank} takes over the state of rank {taken}, but no random numbers: its"
        " generators stay as they are"
    )


def _carry_on(attempt: RestoreAttempt, snapshot: Snapshot, continuation: Continuation) -> None:
    """Record what attach may continue in this rank's region, and what it must protect there.

    A rank that has a part of the snapshot keeps it until a newer one is whole, also in another
    world. A rank that received all of it keeps its newest older one, for the others to fall back
    to. A rank that has none gives up what its region holds.
    """
    survey, own = attempt.survey, attempt.survey.own
    if survey.unreadable is not None:
        continuation.given_up.add(survey.where.file)
    kept = None
    if isinstance(snapshot, ReceivedSnapshot):
        kept = snapshot.own_record or _newest_before(survey, attempt.key)
    elif isinstance(snapshot, FailureSnapshot):
        kept = snapshot.local.record or _newest_before(survey, attempt.key)
    elif isinstance(snapshot, AssembledSnapshot) and own is not None:
        kept = snapshot.record if own.region is snapshot.parts[0].region else None
    if own is not None and kept is not None:
        continuation.mark_continued(own.region, kept)
    elif own is not None:
        continuation.disown(own.region)


def _newest_before(survey: RegionSurvey, key: Key) -> Record | None:
    """Return the snapshot in this rank's region with the newest step before; it must count."""
    every = [c.record for c in survey.own.recovery.candidates] if survey.own is not None else []
    older = [each for each in every if each.step < key.step and not survey.excludes(Key.of(each))]
    return max(older, key=lambda record: record.sequence, default=None)


def _described(attempt: RestoreAttempt, filler: StateFiller) -> RestoreInfo:
    """Return the description of what was restored, and log it."""
    snapshot = filler.snapshot
    record = snapshot.record
    info = RestoreInfo(
        step=record.step,
        slot=record.slot,
        sequence=record.sequence,
        wall_time=datetime.fromtimestamp(record.wall_time_ns / 1e9, UTC),
        path=attempt.survey.where.path,
        early=snapshot.early,
        suspect=snapshot.suspect,
        timeline=record.timeline,
        leftover=filler.unused_extras(),
        skipped=filler.skipped,
        fell_back=attempt.fell_back,
        why=attempt.choice.why,
        world=record.world,
        rank=record.rank,
        healed=attempt.healed,
    )
    for text in info.healed:
        event("healed", logging.WARNING, step=info.step, what=text)
    event(
        "restored",
        sentence=f"restored step {info.step}, next is {info.step + 1}: {info.path}",
        step=info.step,
        early=info.early,
        slot=info.slot,
        path=info.path,
    )
    if info.early:
        event("restored_early", logging.WARNING, step=info.step, why=info.why, text=_EARLY)
    return info


def _arm_forward(live: Inventory, filler: StateFiller) -> None:
    """Set the generators at the first training forward to what they were at forward start.

    However the loop drew its first batch, the forward then draws what it drew before.
    """
    state = progress(live.model)
    if state.forward_hook is not None:
        state.forward_hook.remove()
        state.forward_hook = None
    saved = filler.forward_start
    if filler.foreign_reason or "rng" not in saved:
        return
    generators = [
        (extra, boundary_codec.rebuild(saved["extras"][extra.name], filler.tensor))
        for extra in live.extras
        if extra.instant == "both" and extra.name in saved["extras"]
    ]
    states = boundary_codec.rebuild(saved["rng"])

    def action() -> None:
        rng.restore(states)
        for extra, value in generators:
            extra.load(value)

    state.forward_hook = before_next_forward(live.model, action)
    weakref.finalize(_lasting(live.model)[0], state.forward_hook.remove)
