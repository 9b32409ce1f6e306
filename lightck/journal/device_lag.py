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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightck.device.base import DeviceEvent
from lightck.device.lookup import holder
from lightck.errors import LightckError, TornSnapshotError
from lightck.journal.boundary_state import with_copies
from lightck.journal.copy_buffer import is_readable
from lightck.journal.step_journal import (
    MAX_COPIED_BYTES,
    BoundaryCapture,
    StepJournal,
    watched_tensors,
)
from lightck.pipeline.copy_plan import TensorReading, versions_of
from lightck.pipeline.device_offload import DeviceOffload, StreamPosition
from lightck.state import tensor_support
from lightck.state.inventory import StateTensor
from lightck.state.tensor_layout import must_own

MAX_UPDATES = 8
"""Number of queued updates that are remembered; who gets further ahead replays graphs."""


@dataclass(eq=False)
class PreUpdateState:
    """The state before an update that has been queued."""

    step: int
    """Step that the state is of."""
    step_end: BoundaryCapture | None
    forward_start: BoundaryCapture
    weights_at_step_end: TensorReading | None
    """Addresses and versions of the weights when the step ended; None: not known."""
    forward_positions: Sequence[StreamPosition]
    """Positions of forward start in the devices' streams."""
    dram_copies: TensorCopies
    """Copies of what is in DRAM, which an update changes as soon as it is queued."""
    look_up: Callable[[], Sequence[StateTensor]]
    """Looks up the live tensors of model and optimizers."""
    updates: dict[tuple[str, Any], DeviceEvent] = field(default_factory=dict)
    """Event in every stream that updates are queued to, before the first update there."""

    @property
    def is_reached(self) -> bool:
        """Tell whether devices have reached forward start, and none of the updates.

        Raises:
            DeviceError: a device has failed.
        """
        return not self.is_overtaken and all(each.event.query() for each in self.forward_positions)

    @property
    def is_overtaken(self) -> bool:
        """Tell whether a device has reached an update, or none is marked.

        Raises:
            DeviceError: a device has failed.
        """
        return not self.updates or any(event.query() for event in self.updates.values())

    def as_of_boundary(self, *, early: bool) -> BoundaryCapture:
        """Return the state at forward start (`early`: step end), with copies of what has changed.

        Raises:
            TornSnapshotError: that state is not known.
        """
        capture = self.step_end if early else self.forward_start
        if capture is None or capture.copies is None:
            raise self._torn("its boundary state is not kept")
        known = self.forward_start.collected
        copies = {**capture.copies, **self.dram_copies.by_name(), **capture.options}
        collected = with_copies(known, copies)
        why = self._replaced() or _uncopied(collected.lives)
        why = why or (self._changed_before_forward() if early else "")
        if why:
            raise self._torn(why)
        return replace(capture, collected=collected, reading=None)

    def require_instant(self, early: bool) -> None:
        """Check that devices, and what they do not hold, are still in this state.

        Raises:
            TornSnapshotError: they are not, or it is not known.
        """
        self.as_of_boundary(early=early)
        if changed := self.changed_tensor():
            raise self._torn(f"{changed} is not what it was")

    def changed_tensor(self) -> str:
        """Name what is not as it was before the update, as far as can be seen; empty: all is."""
        watched = self.forward_start.watched
        assert watched is not None
        if not self.is_reached:
            return "what a device has updated meanwhile"
        now = TensorReading.of(watched.tensors)
        held = {id(live.tensor) for live in self.forward_start.collected.lives if live.holders}
        for i, tensor in enumerate(watched.tensors):
            # The update has not run: what it changes is unchanged, whatever its version. Any other
            # write that the training thread has queued may have been to another stream.
            here = is_readable(tensor_support.local(tensor))
            same = now.versions[i] == watched.versions[i] or here or id(tensor) in held
            if not same or (now.pointers[i] != watched.pointers[i] and not here):
                return next(
                    v.name for v in self.forward_start.collected.lives if v.tensor is tensor
                )
        return ""

    def _replaced(self) -> str:
        """Say if tensors were replaced since the look-up before forward start; empty: none was.

        An optimizer that replaces its own in each update has had a look-up at this very instant.
        """
        if self.forward_start.looked_up:
            return ""
        now = self.look_up()
        then = self.forward_start.collected.lives[: len(now)]
        same = [
            [(live.name, id(live.tensor)) for live in watched_tensors(lives, private=True)]
            for lives in (now, then)
        ]
        return "" if same[0] == same[1] else "the set of tensors has changed"

    def _torn(self, why: str) -> TornSnapshotError:
        return TornSnapshotError(f"step {self.step}, which a device still has: {why}")

    def _changed_before_forward(self) -> str:
        """Say how weights changed between step end and forward start; empty: they did not."""
        if self.weights_at_step_end is None or self.forward_start.watched is None:
            return "a weight, for all that is known, was changed before the forward"
        before, now = (
            _by_identity(each) for each in (self.weights_at_step_end, self.forward_start.watched)
        )
        same = all(now.get(key) == rows for key, rows in before.items())
        return "" if same else "a weight was changed before the forward"


@dataclass(eq=False)
class DeviceLag:
    """Keeps the states before queued updates, for one checkpointer.

    Under its lock, unless a method says otherwise.
    """

    journal: StepJournal
    offload: DeviceOffload
    _pre_updates: tuple[PreUpdateState, ...] = ()
    """Oldest first; replaced and never changed, since other threads read it without the lock."""
    _claimed: PreUpdateState | None = None
    _update_times: tuple[float, ...] = ()
    """Times (`time.monotonic`) at which the training thread began the last updates."""
    _dram_copier: _DramCopier | None = None
    _buffer_names: tuple[Any, frozenset[str]] = ((), frozenset())
    """Names of the private copies, and those of them whose memory later instants fill anew."""

    def update_begins(self, step: int, *, first: bool, seen: bool) -> None:
        """Keep the state before an update that is about to be queued. On its thread.

        Args:
            step: the last complete step.
            first: the update is the first of its iteration.
            seen: nothing of the update has been queued yet.
        """
        with self.journal.reporting:  # its errors are told, and end no training
            self._forget_reached()
            if not seen:
                self._pre_updates = ()
                return
            if first:
                self._update_times = (*self._update_times[-MAX_UPDATES:], time.monotonic())
                before = self._collect(step)
                self._pre_updates = (*self._pre_updates[1 - MAX_UPDATES :], *filter(None, [before]))
            elif not self._pre_updates or self._pre_updates[-1].step != step:
                return
            if self._pre_updates and self._pre_updates[-1].step == step:
                last = self._pre_updates[-1]
                last.updates = self.offload.mark_streams(last.updates)

    @property
    def longest_step_s(self) -> float:
        """Seconds that the longest of the last steps took.

        Where a device's steps are long, a save waits longer for it.
        """
        return max(map(operator.sub, self._update_times[1:], self._update_times), default=0.0)

    @property
    def claimed(self) -> PreUpdateState | None:
        """State of hung devices that counts as the last complete step: a save has claimed it.

        None: the training thread's state counts, or counts again.
        """
        with suppress(LightckError):  # where a device has failed, it counts all the more
            if self._claimed is not None and self._claimed.is_overtaken:
                self._claimed = None
        return self._claimed

    def forget(self) -> None:
        """Forget what devices had before: the live state was replaced."""
        self._pre_updates, self._claimed = (), None

    def claim(self, before: PreUpdateState) -> None:
        """Note that a save has claimed this state, see `claimed`."""
        self._claimed = before

    def hung_state(self) -> PreUpdateState | None:
        """Return the state that devices still have, though the update behind it is queued.

        None: there is none. Any thread; takes no lock. Devices may be about to reach the update:
        see `PreUpdateState.is_reached`.

        Raises:
            DeviceError: a device has failed.
        """
        self.offload.enter_thread()
        for before in self._pre_updates:
            if not before.is_overtaken:
                return before if before.is_reached else None
        return None

    def _forget_reached(self) -> None:
        while self._pre_updates and self._pre_updates[0].is_overtaken:
            self._pre_updates = self._pre_updates[1:]
        if self._claimed not in self._pre_updates:
            self._claimed = None

    def _collect(self, step: int) -> PreUpdateState | None:
        """Collect the state before the update; None: not all of it is known."""
        journal, forward_positions = self.journal, self.offload.stream_positions
        forward_start, step_end = journal.forward_start, journal.step_end
        if (
            not forward_positions
            or forward_start is None
            or forward_start.step != step
            or forward_start.copies is None
        ):
            return None
        watched = forward_start.watched
        if watched is None or versions_of(watched.tensors) != watched.versions.tolist():
            return None  # the write may have been queued to any stream
        lives = (
            journal.boundary_state.inventory.found(),
            forward_start.collected.lives[len(forward_start.collected.base) :],
        )
        if self._dram_copier is None or not self._dram_copier.is_for(*lives):
            self._dram_copier = _DramCopier(*lives, frozenset(forward_start.copies))
        dram_copies, step_end = (
            self._dram_copier.copy_now(),
            step_end and self._with_private_copies(step_end),
        )
        if dram_copies is None:
            return None
        known = self._with_private_copies(forward_start), journal.weight_guard.reading_at_step_end
        look_up = journal.boundary_state.inventory.shared
        return PreUpdateState(step, step_end, *known, forward_positions, dram_copies, look_up)

    def _with_private_copies(self, capture: BoundaryCapture) -> BoundaryCapture:
        """Return the instant with private copies that no later instant fills anew."""
        copies = capture.copies
        if copies is None:
            return capture
        every = capture.kept_copies
        if self._buffer_names[0] != every.keys():
            refilled = (n for n, each in every.items() if is_readable(tensor_support.local(each)))
            self._buffer_names = every.keys(), frozenset(refilled)
        private = {name: every[name].clone() for name in self._buffer_names[1]}
        options = {name: private.get(name, each) for name, each in capture.options.items()}
        copies = {name: private.get(name, each) for name, each in copies.items()}
        return replace(capture, copies=copies, options=options)


@dataclass(frozen=True, slots=True)
class TensorCopies:
    """Copies of small tensors, stacked by dtype and shape."""

    lives: Sequence[Sequence[StateTensor]]
    copies: Sequence[torch.Tensor]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return every copy by the name of its tensor."""
        together = zip(self.lives, self.copies, strict=True)
        pairs = (zip(lives, copies.unbind(), strict=True) for lives, copies in together)
        return {live.name: copy for each in pairs for live, copy in each}


class _DramCopier:
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
        self._plain = self._plain and size <= MAX_COPIED_BYTES

    def is_for(self, found: tuple[StateTensor, ...], more: tuple[StateTensor, ...]) -> bool:
        """Tell whether these are the tensors that this was made for."""
        same = found is self._found and len(more) == len(self._more)
        return same and all(map(operator.is_, more, self._more))

    def copy_now(self) -> TensorCopies | None:
        """Copy the tensors; None: there are DTensors, or too many bytes for every step."""
        if not self._plain:
            return None
        with torch.no_grad():
            return TensorCopies(self._lives, [torch.stack(each) for each in self._tensors])


def _uncopied(lives: Sequence[StateTensor]) -> str:
    """Say which tensor should have been cloned at forward start, and was not; empty: none."""
    for live in lives:
        if not live.sync and must_own(live, holder(live.local)):
            return f"{live.name} is not dense, or out of reach"
    return ""


def _by_identity(reading: TensorReading) -> dict[int, tuple[int, int]]:
    """Return address and version of each tensor, by its identity."""
    rows = zip(reading.pointers.tolist(), reading.versions.tolist(), strict=True)
    return dict(zip(map(id, reading.tensors), rows, strict=True))
