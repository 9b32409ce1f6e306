"""Keep the boundary state of every step, due or not, while the failure path is armed.

That is I10 (the boundary journal). The state is taken at step end and at forward start, and kept in
private memory, for a just-in-time snapshot that this process makes. With several ranks it goes to
the region's journal, too, for one that a survivor makes when this process has been killed. What
only an update changes is not in it: that stays live.

An entry of the journal is this tree as a blob (`boundary_blob.py`); `decode_entry` decodes one.

    first         as `BoundaryState.trees` gives it: what `at_step` of a manifest decodes to
    second        what `at_forward` decodes to. Of kind STEP_END: values as they are where the step
                  ends, without generators; of kind FORWARD: as at forward start, with generators
                  if one was seen; of kind FENCE: as of STEP_END, as if the step ended at the fence
    tensors       name -> {role, layer, holders, tensor}: this rank's own small tensors as they are
                  then: all that a snapshot copies at forward start (buffers, small tensors of
                  extras, what was found torn twice), and small ones of optimizers' options and
                  attributes. Neither ties, which have no bytes, nor shares, shards, large tensors
                  of extras, and what a device holds
    share_digest  digest of the share map then
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightck.errors import LightckError, RegionFullError, RegionIOError, TornSnapshotError
from lightck.events import event
from lightck.journal.boundary_state import BoundaryState, user_code, with_copies
from lightck.journal.copy_buffer import CopyBuffer, is_readable
from lightck.journal.entry import EntryEncoder, ExtrasFullError
from lightck.journal.pre_fence import PreFencePredictor
from lightck.journal.weight_guard import WeightGuard
from lightck.pipeline.copy_plan import TensorReading
from lightck.pipeline.pipeline import Pipeline
from lightck.region.native_region import FENCE, FORWARD, RECORD_EARLY, STEP_END, JournalEntry
from lightck.region.region import Region
from lightck.state import tensor_support
from lightck.state.inventory import SMALL_EXTRA_BYTES, CollectedState, StateTensor

# ---- the state of one instant, and whether the live state is still of it -------------------------


@dataclass(frozen=True, eq=False)
class BoundaryCapture:
    """State that is kept of one instant of one step."""

    kind: int
    """Kind of the instant: STEP_END or FORWARD."""
    step: int
    step_end_values: dict[str, Any]
    """Values of step end, see `BoundaryState.trees`; below, those of forward start."""
    forward_values: dict[str, Any]
    collected: CollectedState
    """All state at forward start; at step end a new parameter or its state may be missing."""
    copies: dict[str, torch.Tensor] | None
    """Private copies, by name, of what changes in the window; None: too much for every step."""
    reading: TensorReading | None = None
    """Addresses and versions of the tensors of `collected` at forward start. None: of step end, or
    the tensors are not the live ones."""
    options: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Private copies, of a step end only, of what no forward changes, but the loop before it may:
    a learning rate that is a tensor."""
    looked_up: bool = True
    """False: these are the tensors of an earlier look-up, and some may have been replaced since."""

    @property
    def early(self) -> bool:
        """Tell whether forward start was still to come."""
        return self.kind == STEP_END

    @property
    def watched(self) -> TensorReading | None:
        """Addresses and versions at forward start of the tensors that are watched for changes."""
        read, lives = self.reading, self.collected.lives
        if read is None or self.copies is None:
            return read
        at = [i for i, live in enumerate(lives) if not live.sync]
        tensors = [live.tensor for live in lives if not live.sync]
        return TensorReading(tensors, read.pointers[at], read.versions[at])

    @property
    def kept_copies(self) -> dict[str, torch.Tensor]:
        """Return all private copies, by name."""
        return {**self.options, **(self.copies or {})}

    @property
    def flags(self) -> int:
        """Flags for the commit record of a snapshot of this instant."""
        return RECORD_EARLY if self.early else 0

    def changed(self, shared: Sequence[StateTensor]) -> str:
        """Name what is seen to have changed since forward start; empty if nothing is.

        Args:
            shared: tensors of model and optimizers, just looked up.
        """
        private = self.copies is not None
        then = watched_tensors(self.collected.lives[: len(shared)], private=private)
        now = watched_tensors(shared, private=private)
        if [(v.name, id(v.tensor)) for v in now] != [(v.name, id(v.tensor)) for v in then]:
            return "the set of tensors has changed"
        watched = self.watched
        if watched is None:
            return "" if private else "what a forward changes is not kept"
        changed = watched.changed()
        lives = watched_tensors(self.collected.lives, private=private)
        return f"{lives[changed[0]].name} was changed" if changed else ""


def watched_tensors(lives: Sequence[StateTensor], *, private: bool) -> list[StateTensor]:
    """Return all tensors; if `private`, without those that are copied privately."""
    return [live for live in lives if not (private and live.sync)]


MAX_COPIED_BYTES = 8 << 20
"""Bytes copied at each instant at most: more would cost every step a millisecond."""

RECHECK_STEPS = 8
"""All tensors are looked up once in so many steps, and in each of so many after a change."""

RETRY_STEPS = 64
"""Steps without an entry after one that was too large: finding that out costs, too."""


def _torn(step: int, why: str) -> TornSnapshotError:
    return TornSnapshotError(f"step {step} cannot be saved any more: {why}")


@dataclass(eq=False)
class _Sorted:
    """Tensors sorted by what is done with them, for as long as the tuple is the same."""

    lives: tuple[StateTensor, ...]
    copied: list[StateTensor] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    """All of the tensors."""

    def __post_init__(self) -> None:
        """Sort the tensors."""
        self.copied = [live for live in self.lives if is_copied(live)]
        self.tensors = [live.tensor for live in self.lives]


def is_copied(live: StateTensor) -> bool:
    """Tell whether it is copied at each instant: it changes in the window, or is a small option."""
    option = "/@group/" in live.name or "/@attribute/" in live.name
    small = option and live.local.nbytes <= SMALL_EXTRA_BYTES and is_readable(live.local)
    return live.alias_of is None and (live.sync or small)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare the tensors; False also if a device, which may hang, holds one."""
    readable = all(is_readable(tensor_support.local(each)) for each in (one, other))
    return readable and torch.equal(one, other)


@dataclass(eq=False)
class StepJournal:
    """Keeps the boundary state of each step, on the training thread and under the lock."""

    boundary_state: BoundaryState
    pipeline: Pipeline
    region_failed: Callable[[LightckError], None]
    """Called with the error when the region takes no more."""
    predictor: PreFencePredictor | None
    """Says whether an iteration that is left off has come to its fence. With several ranks, of
    which others may have to finish the update that this one is killed in; else None."""
    step: int = -1
    """Step that the kept state is of, or whose state could not be kept."""
    step_end: BoundaryCapture | None = None
    """The step end of the last step that ended; None: taking it failed."""
    forward_start: BoundaryCapture | None = None
    """The forward start after it; None: that has not come, or taking it failed."""
    last_error: LightckError | None = None
    """The last error that kept an instant, or its entry, from being taken."""
    weight_guard: WeightGuard = field(default_factory=WeightGuard)
    _writes: bool = False
    """True once the timeline is durable: entries can be of it."""
    _rechecks: int = 0
    """Number of steps for which all tensors are still looked up, since some were replaced."""
    _base: _Sorted = field(default_factory=lambda: _Sorted(()))
    """Tensors of model and optimizers."""
    _more: _Sorted = field(default_factory=lambda: _Sorted(()))
    """Tensors of extras, and of optimizers' options and attributes."""
    _copy_buffer: CopyBuffer | None = None
    """Copy buffer for what changes in the window, and what an entry has besides; None: too much."""
    _encoder: EntryEncoder = field(default_factory=EntryEncoder)
    _reported_kinds: set[type[LightckError]] = field(default_factory=set)
    reporting: _ErrorReports = field(init=False)
    _retry_step: int = 0
    """Step from which on entries are written again."""
    _fence_step: int = -1
    """Step that the last update completes, or is to complete."""
    _pre_fence: tuple[int, bytes] = (-1, b"")
    """Step and blob of the last entry written before a fence; no blob if it is void."""
    _update_entries: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Step and blob, by kind, of the last fence entry and of a step's first step-end entry."""

    def __post_init__(self) -> None:
        """Make the context that reports errors."""
        self.reporting = _ErrorReports(self._report)

    @property
    def region(self) -> Region:
        """The region whose journal has the entries."""
        return self.pipeline.region

    def entry(self, kind: int) -> JournalEntry | None:
        """Return the entry before the last update (FENCE), or the first one behind it (STEP_END).

        None: there is none. The journal has these no more where position and generators have been
        taken again since. Any thread.
        """
        step, blob = self._update_entries.get(kind, (0, b""))
        timeline = self.region.timeline
        return JournalEntry(kind, step, timeline, 0, 0, RECORD_EARLY, blob) if blob else None

    def forget(self, step: int) -> None:
        """Forget what is kept of an older step: `step` has ended."""
        self.step, self.step_end, self.forward_start = step, None, None
        self.weight_guard.forget()

    def step_ended(self, step: int) -> None:
        """Take the step end; once more where position and generators have been taken again.

        Not while others, an average say, stand in for the weights: the first one serves then.
        """
        before, self.step_end = self.step_end, None
        if self.predictor is not None and self._fence_step != step:  # a scaler left the update out
            self.predictor.skip_fence()
            if self._pre_fence[0] == step:
                self._update_entries[FENCE] = self._pre_fence
        with self.reporting:
            with user_code():
                collected = self.boundary_state.inventory.collect_cached()
            own_weights = self.weight_guard.step_ended(collected.base)
            self.step_end = (
                self._take(STEP_END, step, collected, seen=False, looked_up=False)
                if own_weights
                else before
            )

    def forward_started(self, step: int, *, seen: bool, full: bool) -> BoundaryCapture | None:
        """Take the forward start, where it is seen or was missed; None if that failed.

        Unless `full`, which the due snapshot needs, tensors that were the same for some steps are
        looked up only once in `RECHECK_STEPS`; `as_of_boundary` finds one that was replaced.
        """
        self.forward_start = None
        full = full or self._rechecks > 0 or step % RECHECK_STEPS == 0
        with self.reporting:
            before = self._base
            collected = self.boundary_state.collect(full=full)
            self.forward_start = self._take(FORWARD, step, collected, seen=seen, looked_up=full)
            if full:
                same = before is self._base
                self._rechecks = max(self._rechecks - 1, 0) if same else RECHECK_STEPS
        return self.forward_start

    def as_of_boundary(self, *, early: bool = False) -> BoundaryCapture:
        """Return the last step as it was, though its next forward has begun.

        Args:
            early: as of step end, even if forward start is kept, too.

        Raises:
            TornSnapshotError: that state is not known any more.
        """
        kept = self.step_end if early or self.forward_start is None else self.forward_start
        if kept is None:
            raise _torn(self.step, f"its boundary state is not kept: {self.last_error}")
        newest = self.forward_start or kept
        why = newest.changed(self.boundary_state.inventory.shared())
        name = "" if why else self.changed_weight(early=kept.early)
        if why or name:
            raise _torn(self.step, why or f"{name} is not what it was at the instant to be saved")
        state = newest.collected
        copies = kept.kept_copies
        if not copies:
            return replace(kept, collected=state)
        return replace(kept, collected=with_copies(state, copies), reading=None)

    def changed_weight(self, *, early: bool) -> str:
        """Name a weight that is not what it was at forward start, or if `early` at step end.

        For forward start only bytes are compared. Empty: none, as far as can be seen.
        """
        return self.weight_guard.changed_weight(self.boundary_state.inventory.shared(), early=early)

    def is_unchanged(self) -> bool:
        """Tell whether what a forward may change is as at forward start: all is of one instant."""
        if self.forward_start is None or self.forward_start.copies is None:
            return False
        live = {each.name: each.tensor for each in self.boundary_state.inventory.collect().lives}
        kept = self.forward_start.copies
        same = (name in live and _equal(live[name], kept[name]) for name in kept)
        return all(same)

    def record_fence(self, step: int) -> None:
        """Write the fence entry: an update begins that completes `step`.

        It has what the end of `step` will have, as it is now, for survivors of a process that is
        killed inside the update; without other ranks nothing is written. What is kept of the last
        step stays as it is.
        """
        if self.predictor is not None:
            self.predictor.fence(step)
            self._fence_step = step
            self._write_fence(step)

    def write_pre_fence(self, step: int) -> None:
        """Write the fence entry of `step` before its fence: nothing should change in between.

        If training goes on, its fence writes again only if something has changed after all. `entry`
        still gives that of the last update: a rank that waits here, with all of its own gradients,
        may wait for one that is killed in that update.
        """
        if self._pre_fence[0] != step:
            self._pre_fence = step, b""
        self._write_fence(step)

    def void_pre_fence(self, step: int) -> None:
        """Void the entry written before the fence of `step`: it is not what the fence will have.

        Peers cannot be ahead yet: the gradient that shows this is in no allreduce.
        """
        if self._pre_fence[0] == step and self._pre_fence[1]:
            self._pre_fence = step, b""
            with self.reporting:
                self.region.native.write_journal(FENCE, step, self.region.timeline, b"")

    def _write_fence(self, step: int) -> None:
        if self.predictor is None or not self._writes:
            return
        with self.reporting:
            with user_code():
                collected = self.boundary_state.inventory.collect_cached()
            trees = self.boundary_state.step_end_now(), {**collected.tree, "step": step}
            copy_buffer = self._sorted_buffer(collected)
            if copy_buffer is not None:
                copies = copy_buffer.fill(journal_only=True)
                self._write(FENCE, step, trees, collected.share_digest, copy_buffer, copies)

    def _take(
        self, kind: int, step: int, collected: CollectedState, *, seen: bool, looked_up: bool
    ) -> BoundaryCapture:
        trees = self.boundary_state.trees(collected, step, seen=seen)
        copy_buffer = self._sorted_buffer(collected)
        copies = reading = None
        options: dict[str, torch.Tensor] = {}
        if kind == FORWARD:
            self.weight_guard.forward_started()
            more = self._more.tensors
            reading = TensorReading.of([*self._base.tensors, *more] if more else self._base.tensors)
        if copy_buffer is not None:
            every = copy_buffer.fill()
            copies = copy_buffer.changing(every)
            if kind == STEP_END:
                options = {name: every[name] for name in copy_buffer.options}
            with self.reporting:
                self._write(kind, step, trees, collected.share_digest, copy_buffer, every)
        self.pipeline.note_instant(at_forward=kind == FORWARD)
        return BoundaryCapture(kind, step, *trees, collected, copies, reading, options, looked_up)

    def _sorted_buffer(self, collected: CollectedState) -> CopyBuffer | None:
        """Sort the tensors, as far as they are others now, and return a copy buffer for them.

        It is the last one if that fits. None: an entry would have too much.
        """
        base, more = collected.base, collected.lives[len(collected.base) :]
        if self._base.lives is not base:
            self._base = _Sorted(base)
        if len(more) != len(self._more.lives) or not all(map(operator.is_, more, self._more.lives)):
            self._more = _Sorted(more)
        copied = [*self._base.copied, *self._more.copied]
        if self._copy_buffer is None or not self._copy_buffer.fits(copied):
            small = sum(live.local.nbytes for live in copied) <= MAX_COPIED_BYTES
            self._copy_buffer = CopyBuffer(copied) if small else None
        return self._copy_buffer

    def _write(
        self,
        kind: int,
        step: int,
        trees: tuple[dict[str, Any], dict[str, Any]],
        share_digest: bytes,
        copy_buffer: CopyBuffer,
        copies: Mapping[str, torch.Tensor],
    ) -> None:
        """Write an entry of what has just been copied to the buffer, and the rest.

        Only where there are other ranks: nobody else reads it.
        """
        if self.predictor is None or not self._writes or step < self._retry_step:
            return
        try:
            blob = self._encoder.encode(copy_buffer, copies, trees, share_digest)
            is_first = kind == STEP_END and self._update_entries.get(kind, (-1,))[0] != step
            if is_first or (kind == FENCE and step == self._fence_step):
                self._update_entries[kind] = step, blob
            if kind == FENCE and self._pre_fence == (step, blob):
                return  # the journal has it
            self.region.native.write_journal(kind, step, self.region.timeline, blob)
            if kind == FENCE and self._pre_fence[0] == step:
                self._pre_fence = step, blob
        except RegionFullError:
            self._retry_step = step + RETRY_STEPS
            raise

    def start(self, step: int) -> None:
        """Write the first entry, as the timeline is durable, and warn of what cannot be kept."""
        self._writes = True
        self.step_ended(step)
        if isinstance(self.last_error, RegionFullError):
            what = "a region that is made anew has room for it"
            if isinstance(self.last_error, ExtrasFullError):
                what = "give what they are made of instead (a seed and a position, not an order)"
            warnings.warn(
                f"lightck: {self.last_error}: what a killed process leaves cannot be completed;"
                f" {what}",
                stacklevel=5,
            )
        if self.step_end is not None and self.step_end.copies is None:
            warnings.warn(
                "lightck: what a forward changes (buffers, extras) is more than"
                f" {MAX_COPIED_BYTES >> 20} MiB, too much to be kept at every step: once a"
                " forward has changed it, nothing can be saved until the step ends",
                stacklevel=5,
            )

    def _report(self, raised: Exception) -> None:
        """Report an error, and warn of each kind once: it would come at every step.

        It is only logged, for nothing is lost yet: a due snapshot will fail by itself, and a
        just-in-time save says why it fails. A region that takes no more is reported as well.
        """
        error = raised
        if not isinstance(error, LightckError):
            error = LightckError(f"the boundary state cannot be kept: {raised!r}")
        self.last_error = error
        new = type(error) not in self._reported_kinds
        self._reported_kinds.add(type(error))
        event("not_kept", logging.WARNING if new else logging.DEBUG, step=self.step, why=error)
        if new and isinstance(error, RegionIOError):
            self.region_failed(error)


@dataclass(frozen=True, eq=False)
class _ErrorReports:
    """Context that reports errors and does not raise them: nobody asked for this work."""

    report: Callable[[Exception], None]

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Report every error that is no interrupt, and suppress it."""
        if isinstance(error, Exception):
            self.report(error)
            return True
        return False
