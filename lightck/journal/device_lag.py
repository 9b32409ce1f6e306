"""Keep what belongs to the state that a device still has when the next update is queued already.

Updates of device tensors are queued, and to the training thread they count as made. Where the
device hangs before one, mostly in a collective of that iteration, its memory is that of the step
before, for as long as it hangs. What belongs to that state but is not in the device's memory is
kept here until the device reaches the update: the boundary state, with its private copies, and
what the update changes in DRAM at once.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightck.device.base import DeviceEvent
from lightck.device.lookup import holder
from lightck.errors import LightckError, TornSnapshotError
from lightck.journal.boundary_state import holding
from lightck.journal.copy_buffer import is_readable
from lightck.journal.step_journal import MOST_BYTES, BoundaryCapture, StepJournal
from lightck.pipeline.copy_plan import CopySources, read, versions_of
from lightck.pipeline.device_offload import DeviceOffload, StreamPosition
from lightck.state import tensor_support
from lightck.state.inventory import StateTensor
from lightck.state.tensor_layout import must_own

MOST = 8
"""Number of queued updates that are remembered; who gets further ahead replays graphs."""


@dataclass(eq=False)
class PreUpdateState:
    """The state before an update that has been queued."""

    step: int
    """Step that the state is of."""
    ended: BoundaryCapture | None
    begun: BoundaryCapture
    at_end: CopySources | None
    """Addresses and versions of the weights when the step ended; None: not known."""
    standing: Sequence[StreamPosition]
    """Positions of forward start in the devices' streams."""
    counts: Counts
    """Copies of what is in DRAM, which an update changes as soon as it is queued."""
    updates: dict[tuple[str, Any], DeviceEvent] = field(default_factory=dict)
    """Event in every stream that updates are queued to, before the first update there."""

    @property
    def stands(self) -> bool:
        """Tell whether devices have reached forward start, and none of the updates.

        Raises:
            DeviceError: a device has failed.
        """
        return not self.is_past and all(each.event.query() for each in self.standing)

    @property
    def is_past(self) -> bool:
        """Tell whether a device has reached an update, or none is marked. Raises as `stands`."""
        return not self.updates or any(event.query() for event in self.updates.values())

    def instant(self, *, early: bool) -> BoundaryCapture:
        """Return the state at forward start (`early`: step end), with copies of what has changed.

        Raises:
            TornSnapshotError: that state is not known.
        """
        kept = self.ended if early else self.begun
        if kept is None or kept.copies is None:
            raise self._lost("its boundary state is not kept")
        collected = holding(self.begun.collected, {**kept.copies, **self.counts.by_name()})
        why = _not_copied(collected.lives) or (self._changed_early() if early else "")
        if why:
            raise self._lost(why)
        return replace(kept, collected=collected)

    def must_stand(self, early: bool) -> None:
        """Check that devices, and what they do not hold, are still in this state.

        Raises:
            TornSnapshotError: they are not, or it is not known.
        """
        self.instant(early=early)
        moved = self.moved()
        if moved:
            raise self._lost(f"{moved} is not what it was")

    def moved(self) -> str:
        """Name what is not as it was before the update, as far as can be seen; empty: all is."""
        watched = self.begun.watched
        assert watched is not None
        if not self.stands:
            return "what a device has updated meanwhile"
        pointers, versions = read(watched.tensors)
        held = {id(live.tensor) for live in self.begun.collected.lives if live.holders}
        for i, tensor in enumerate(watched.tensors):
            # The update has not run: what it changes is unchanged, whatever its version. Any other
            # write that the training thread has queued may have been to another stream.
            here = is_readable(tensor_support.local(tensor))
            same = versions[i] == watched.versions[i] or here or id(tensor) in held
            if not same or (pointers[i] != watched.pointers[i] and not here):
                return next(v.name for v in self.begun.collected.lives if v.tensor is tensor)
        return ""

    def _lost(self, why: str) -> TornSnapshotError:
        return TornSnapshotError(f"step {self.step}, which a device still has: {why}")

    def _changed_early(self) -> str:
        """Say how weights changed between step end and forward start; empty: they did not."""
        if self.at_end is None or self.begun.watched is None:
            return "a weight, for all that is known, was changed before the forward"
        then, now = (_known(each) for each in (self.at_end, self.begun.watched))
        same = all(now.get(key) == said for key, said in then.items())
        return "" if same else "a weight was changed before the forward"


@dataclass(eq=False)
class DeviceLag:
    """Keeps the states before queued updates, for one checkpointer.

    Under its lock, unless a method says otherwise.
    """

    kept: StepJournal
    offload: DeviceOffload
    _befores: tuple[PreUpdateState, ...] = ()
    """Oldest first; replaced and never changed, since other threads read it without the lock."""
    _taken: PreUpdateState | None = None
    _began: tuple[float, ...] = ()
    """Times (`time.monotonic`) at which the training thread began the last updates."""
    _counting: _Counting | None = None
    _shelved: tuple[Any, frozenset[str]] = ((), frozenset())
    """Names of the private copies, and those of them whose memory later instants fill anew."""

    def update_begins(self, step: int, *, first: bool, seen: bool) -> None:
        """Keep the state before an update that is about to be queued. On its thread.

        Args:
            step: the last complete step.
            first: the update is the first of its iteration.
            seen: nothing of the update has been queued yet.
        """
        with self.kept.once:  # its errors are told, and end no training
            self._forget_reached()
            if not seen:
                self._befores = ()
                return
            if first:
                self._began = (*self._began[-MOST:], time.monotonic())
                before = self._before(step)
                self._befores = (*self._befores[1 - MOST :], *filter(None, [before]))
            elif not self._befores or self._befores[-1].step != step:
                return
            if self._befores and self._befores[-1].step == step:
                last = self._befores[-1]
                last.updates = self.offload.mark_streams(last.updates)

    @property
    def pace_s(self) -> float:
        """Seconds that the longest of the last steps took.

        Where a device's steps are long, a save waits longer for it.
        """
        return max(map(operator.sub, self._began[1:], self._began), default=0.0)

    @property
    def taken(self) -> PreUpdateState | None:
        """State of hung devices that counts as the last complete step: a save has claimed it.

        None: the training thread's state counts, or counts again.
        """
        with suppress(LightckError):  # where a device has failed, it counts all the more
            if self._taken is not None and self._taken.is_past:
                self._taken = None
        return self._taken

    def forget(self) -> None:
        """Forget what devices had before: the live state was replaced."""
        self._befores, self._taken = (), None

    def take(self, before: PreUpdateState) -> None:
        """Note that a save has claimed this state, see `taken`."""
        self._taken = before

    def there(self) -> PreUpdateState | None:
        """Return the state that devices still have, though the update behind it is queued.

        None: there is none. Any thread; takes no lock. Devices may be about to reach the update:
        see `PreUpdateState.stands`.

        Raises:
            DeviceError: a device has failed.
        """
        self.offload.enter_thread()
        for before in self._befores:
            if not before.is_past:
                return before if before.stands else None
        return None

    def _forget_reached(self) -> None:
        while self._befores and self._befores[0].is_past:
            self._befores = self._befores[1:]
        if self._taken not in self._befores:
            self._taken = None

    def _before(self, step: int) -> PreUpdateState | None:
        """Collect the state before the update; None: not all of it is known."""
        kept, standing = self.kept, self.offload.stream_positions
        begun, ended = kept.begun, kept.ended
        if not standing or begun is None or begun.step != step or begun.copies is None:
            return None
        watched = begun.watched
        if watched is None or versions_of(watched.tensors) != watched.versions.tolist():
            return None  # the write may have been queued to any stream
        more = begun.collected.lives[len(begun.collected.base) :]
        lives = kept.boundary_state.inventory.found(), more
        if self._counting is None or not self._counting.serves(*lives):
            self._counting = _Counting(*lives, frozenset(begun.copies))
        counts, ended = self._counting.now(), ended and self._private(ended)
        if counts is None:
            return None
        own = self._private(begun), kept.weights.at_end
        return PreUpdateState(step, ended, *own, standing, counts)

    def _private(self, instant: BoundaryCapture) -> BoundaryCapture:
        """Return the instant with private copies that no later instant fills anew."""
        copies = instant.copies
        if copies is None:
            return instant
        if self._shelved[0] != copies.keys():
            here = (n for n, each in copies.items() if is_readable(tensor_support.local(each)))
            self._shelved = copies.keys(), frozenset(here)
        own = {name: copies[name].clone() for name in self._shelved[1]}
        return replace(instant, copies={**copies, **own})


@dataclass(frozen=True, slots=True)
class Counts:
    """Copies of small tensors, stacked by dtype and shape."""

    lives: Sequence[Sequence[StateTensor]]
    copies: Sequence[torch.Tensor]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return every copy by the name of its tensor."""
        together = zip(self.lives, self.copies, strict=True)
        pairs = (zip(lives, copies.unbind(), strict=True) for lives, copies in together)
        return {live.name: copy for each in pairs for live, copy in each}


class _Counting:
    """Copies tensors in DRAM before each update: mostly counts of steps, one for each parameter.

    They are those of all the model and its optimizers: a survivor writes dead ranks' shares, too.
    """

    def __init__(
        self, found: tuple[StateTensor, ...], more: tuple[StateTensor, ...], private: frozenset[str]
    ) -> None:
        """Group the tensors by dtype and shape, but for those in `private`, kept anyway."""
        self._found, self._more = found, more
        groups: dict[Any, list[StateTensor]] = {}
        self._plain, size = True, 0
        for live in (*found, *more):
            local = live.local
            if live.alias_of is None and live.name not in private and is_readable(local):
                groups.setdefault((local.dtype, local.shape), []).append(live)
                self._plain = self._plain and local is live.tensor
                size += local.nbytes
        self._lives = list(groups.values())
        self._tensors = [[live.tensor for live in lives] for lives in self._lives]
        self._plain = self._plain and size <= MOST_BYTES

    def serves(self, found: tuple[StateTensor, ...], more: tuple[StateTensor, ...]) -> bool:
        """Tell whether these are the tensors that this was made for."""
        same = found is self._found and len(more) == len(self._more)
        return same and all(map(operator.is_, more, self._more))

    def now(self) -> Counts | None:
        """Copy the tensors; None: there are DTensors, or too many bytes for every step."""
        if not self._plain:
            return None
        with torch.no_grad():
            return Counts(self._lives, [torch.stack(each) for each in self._tensors])


def _not_copied(lives: Sequence[StateTensor]) -> str:
    """Say which tensor should have been cloned at forward start, and was not; empty: none."""
    for live in lives:
        if not live.sync and must_own(live, holder(live.local)):
            return f"{live.name} is not dense, or out of reach"
    return ""


def _known(sources: CopySources) -> dict[int, tuple[int, int]]:
    """Return address and version of each tensor, by its identity."""
    said = zip(sources.pointers.tolist(), sources.versions.tolist(), strict=True)
    return dict(zip(map(id, sources.tensors), said, strict=True))
