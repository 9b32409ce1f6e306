"""Keep committed snapshots beyond the slots: choose them, copy them aside, remove them again.

A thread of its own copies, one snapshot at a time, from the region into an item; the training
thread takes no more than a lease on the slot. What is copied are whole snapshots only, so nothing
here can harm the run: an item is complete or absent, and a copy that fails is an event.

The best model is kept reliably because a report comes before the next snapshot: at that instant the
reported step's snapshot is not opened, on its way, or in the newest slot, which is not reused. In
each case its slot is leased before another commit, and stays so until it is copied.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lightck.config import Config
from lightck.errors import ConfigError, LightckError
from lightck.events import event
from lightck.history import item
from lightck.policy.keep import (
    Keep,
    Kept,
    keeps_for_metrics,
    metrics_of,
    steps_to_keep,
    would_keep,
)
from lightck.region import location
from lightck.region.location import Location
from lightck.region.native_region import Record
from lightck.region.region import Region, open_and_recover
from lightck.region.snapshot_copy import copy_snapshot

HELD_S = 10.0
"""Seconds that a copy may hold a slot for which the training waits; then the slot is given back."""
REPORT_S = 2.0
"""Seconds that a report waits at most until its metrics are durable."""
CHOICE_S = 30.0
"""Seconds that a rank waits at most for rank 0 to say whether a step is kept."""
_POLL_S = 0.05
_REMEMBERED = 64
"""Steps whose metrics are remembered before they are kept."""


class KeepChoice(Protocol):
    """The choice of the steps to keep, which rank 0 makes for all ranks. Each call may raise."""

    chooses: bool
    """True on the rank that chooses."""

    def decide(self, step: int, keeps: bool) -> None:
        """Let the other ranks know whether a step is kept; steps come in order."""
        ...

    def decided(self, step: int) -> bool | None:
        """Return what was decided of a step; None: nothing yet."""
        ...


@dataclass(eq=False)
class _Offer:
    """A whole snapshot whose slot is leased until it is copied, or not chosen."""

    record: Record
    epoch: int
    since_s: float = field(default_factory=time.monotonic)
    leased: bool = True
    given_back: bool = False
    """True if the training needed the slot before it was copied."""
    left: bool = False
    """True if the run goes on from an older step: it is not kept."""


class History:
    """The history of one rank of a run. Any thread may call it; nothing waits but what says so."""

    def __init__(
        self,
        where: Location,
        keep: Keep,
        *,
        rank: int = 0,
        ranks: tuple[int, ...] = (0,),
        bytes_per_s: int = 0,
    ) -> None:
        """Prepare the history beside a region, which is there; nothing is kept before `begin`.

        Args:
            where: the region of this rank, a file in a folder.
            keep: which snapshots are kept.
            rank: of the region.
            ranks: those whose regions are in the same folder; the lowest describes and removes.
            bytes_per_s: at which rate is written at most; 0: no limit.
        """
        self.keep, self._where, self._rank, self._ranks = keep, where, rank, ranks
        self._limit = bytes_per_s
        self._leases = Region.open(where, writable=False)
        self._state = threading.Condition()  # guards all below, and the leases
        self._describing = threading.Lock()
        self._choice: KeepChoice | None = None
        self._items: dict[int, Kept] = {}
        self._inexact: set[int] = set()
        """The steps whose items are early."""
        self._metrics: dict[int, dict[str, float]] = {}
        self._wanted: set[int] = set()
        """The steps that were reported, and are kept as soon as they are committed."""
        self._untold: set[int] = set()
        """The steps whose items have metrics that their descriptions lack."""
        self._unkept: set[int] = set()
        """The steps that were described, and are not kept after all."""
        self._newest: tuple[Record, int] | None = None
        self._offers: list[_Offer] = []
        self._copying: _Offer | None = None
        self._made: set[int] = set()
        """The steps that this rank has copied in this life, from the newest that all have on."""
        self._branch = 0
        """Changes when the run goes back: what was read of the items before counts no more."""
        self._busy_since_s = math.inf
        """The time at which the thread last began something; inf while it waits."""
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None

    # ---- begin and end ---------------------------------------------------------------------------

    def begin(self, records: Iterable[Record] = (), choice: KeepChoice | None = None) -> None:
        """Begin to keep what is committed; call it once the region has its timeline.

        Args:
            records: the snapshots that are in slots and count: what a run that was killed has not
                copied any more is copied now.
            choice: how several ranks choose; None for one rank.
        """
        self._choice = choice
        there = sorted(records, key=lambda record: record.sequence)
        try:
            self._tidy({record.step for record in there})
        except LightckError as error:
            event("history_failed", logging.WARNING, path=self._where.path, why=error)
        self._thread = threading.Thread(target=self._run, name="lightck-history", daemon=True)
        self._thread.start()
        for record in there:
            self.committed(record, self._epoch_of(record.step))

    def _tidy(self, in_slots: set[int]) -> None:
        """Remove what a dead run has left unfinished, but for what was reported and can be made."""
        for each in item.every_item(self._where.path):
            step = each.kept.step
            if each.unread:
                event("history_failed", logging.WARNING, step=step, why=each.unread)
            elif each.is_whole:
                self._items[step] = each.kept
            elif each.kept.metrics and step in in_slots:
                self._metrics[step] = dict(each.kept.metrics)
                self._wanted.add(step)
            elif self._describes:
                item.remove(each)
        if self._describes:
            item.remove_remains(self._where.path)

    def _epoch_of(self, step: int) -> int:
        """Return the epoch of the newest item up to a step."""
        return max((k.epoch for k in self._items.values() if k.step <= step), default=0)

    def close(self, timeout_s: float) -> bool:
        """Wait until what was chosen is kept, `timeout_s` at most; return whether it is.

        Nothing is kept from then on. What was not finished is absent, and an event says so.
        Idempotent.
        """
        with self._state:
            if self._closed:
                return True
            self._closing = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._state:
            left = [each.record.step for each in (*self._offers, self._copying) if each is not None]
            self._closed = True
            self._offers = []
            self._leases.close()
        if left:
            why = f"not finished within {timeout_s:g} s"
            event("history_unfinished", logging.WARNING, steps=left, why=why)
        return not left

    @property
    def _describes(self) -> bool:
        return self._rank == min(self._ranks)

    @property
    def _alone(self) -> bool:
        return self._choice is None

    # ---- what the loop tells ---------------------------------------------------------------------

    def committed(self, record: Record, epoch: int = 0) -> None:
        """Note that a snapshot is whole, and keep it if the policy would. Takes some microseconds.

        Call it before a slot is taken for the next snapshot, so that this one's is leased in time.
        """
        with self._state:
            if self._closed:
                return
            self._newest = record, epoch
            self._find_missed(record.step)
            if self._alone and not self._is_chosen(record, epoch):
                if record.step in self._wanted:
                    self._wanted.discard(record.step)
                    self._unkept.add(record.step)
                    self._state.notify_all()
                return
            if self._alone:  # the newest of those that wait is copied
                for each in [each for each in self._offers if not self._must(each)]:
                    self._drop(each)
            self._offer(record, epoch)

    def _find_missed(self, newest: int) -> None:
        """Say that reported steps before the newest have no snapshot: it slipped, or was lost."""
        has = {each.record.step for each in (*self._offers, self._copying) if each}
        for step in sorted(s for s in self._wanted - has if s < newest):
            self.missed(step, "its snapshot slipped or was lost: see the events before")

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Note metrics of a step; return whether a snapshot of it has to be taken for them.

        They are durable on return, or after `REPORT_S` at least on their way.
        """
        with self._state:
            if self._closed:
                return False
            self._metrics.setdefault(step, {}).update(metrics)
            for old in sorted(self._metrics.keys() - self._wanted)[:-_REMEMBERED]:
                del self._metrics[old]
            known = self._items.get(step)
            if known is not None:
                new = self._items[step] = self._with_newer_metrics(known)
                self._untold.add(step)  # the thread chooses again
                self._state.notify_all()
            elif not metrics_of(self.keep) & metrics.keys():
                return False
            else:
                new = Kept(step, time.time(), 0, dict(self._metrics[step]))
                if self._alone and not self._keeps_for_metrics(new):
                    if step in self._wanted:  # for what was reported before, which is described
                        self._wanted.discard(step)
                        self._unkept.add(step)
                        self._state.notify_all()
                    return False
                self._wanted.add(step)
            has = known is not None or self._offer_newest(step)
        if self._describes:
            self._describe_soon(step, new, again=known is not None)
        return not has

    def _offer_newest(self, step: int) -> bool:
        """Offer the newest snapshot if it is of that step; return whether it is, or is offered."""
        if any(each.record.step == step for each in (*self._offers, self._copying) if each):
            return True
        if self._newest is None or self._newest[0].step != step:
            return False
        self._offer(*self._newest)
        return True

    def missed(self, step: int, why: str) -> None:
        """Say that a reported step cannot be kept, and why."""
        with self._state:
            self._wanted.discard(step)
            self._unkept.add(step)
            self._state.notify_all()
        event("history_missed", logging.WARNING, step=step, why=why)

    def slot_needed(self, wait_s: float = 0.0, held_s: float | None = None) -> None:
        """Give back slots that the training needs, once a copy has held one for `held_s`.

        That copy fails then. With `wait_s` it waits so long at most for slots to be given back,
        but for that of the newest snapshot, which no other takes.
        """
        deadline, given = time.monotonic() + wait_s, []
        held_s = HELD_S if held_s is None else held_s
        with self._state:
            while held := self._holding():
                copying = self._copying
                since_s = self._busy_since_s if copying is None else copying.since_s
                if time.monotonic() - since_s >= held_s:
                    given = [each.record.step for each in held]
                    for each in held:
                        each.given_back = True
                        self._release(each)
                        if each in self._offers:
                            self._drop(each)
                    break
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._state.wait(min(left_s, _POLL_S))
        if given:
            why = f"not copied within {held_s:g} s, and the slot was needed"
            event("history_slow", logging.WARNING, steps=given, why=why)

    def _holding(self) -> list[_Offer]:
        """Return the offers that hold a slot which the training could use."""
        newest = self._newest[0].slot if self._newest is not None else None
        every = (self._copying, *self._offers)
        return [each for each in every if each and each.leased and each.record.slot != newest]

    def went_back(self, step: int) -> None:
        """Note that the run goes on from an older step, and leaves what it has kept since."""
        self._forget_beyond(step)
        if self._describes:
            leave_behind(self._where.path, step)
        self._forget_beyond(step)  # once more: what was read before the items were moved

    def _forget_beyond(self, step: int) -> None:
        with self._state:
            self._branch += 1
            for each in [each for each in self._offers if each.record.step > step]:
                self._drop(each)
            if self._copying is not None and self._copying.record.step > step:
                self._copying.left = True
            self._items = {s: kept for s, kept in self._items.items() if s <= step}
            self._metrics = {s: given for s, given in self._metrics.items() if s <= step}
            for steps in (self._wanted, self._untold, self._unkept, self._inexact):
                steps.intersection_update([s for s in steps if s <= step])
            self._newest = None

    # ---- offers; all under the lock --------------------------------------------------------------

    def _kept(self, record: Record, epoch: int) -> Kept:
        metrics = dict(self._metrics.get(record.step, {}))
        return Kept(record.step, record.wall_time_ns / 1e9, epoch, metrics)

    def _is_chosen(self, record: Record, epoch: int) -> bool:
        """Return whether the policy would keep the snapshot, and no item has it already."""
        if record.step in self._items:
            return record.step in self._inexact and not record.early
        there, new = [*self._items.values()], self._kept(record, epoch)
        return bool(self._asked(lambda: would_keep(self.keep, there, new), otherwise=False))

    def _keeps_for_metrics(self, new: Kept) -> bool:
        there = [*self._items.values()]
        return bool(self._asked(lambda: keeps_for_metrics(self.keep, there, new), otherwise=False))

    def _asked(self, ask: Callable[[], Any], *, otherwise: Any) -> Any:
        """Return what the policy says, or `otherwise` if it fails: it may be the user's own."""
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - no training ends for its history
            why = f"the policy of keep failed: {error!r}"
            event("history_failed", logging.WARNING, path=self._where.path, why=why)
            return otherwise

    def _must(self, offer: _Offer) -> bool:
        return offer.record.step in self._wanted

    def _offer(self, record: Record, epoch: int) -> None:
        try:
            self._leases.native.lease(record.slot, True)
        except LightckError as error:  # a writer has it: the snapshot is gone
            event("history_failed", logging.WARNING, step=record.step, why=error)
            return
        self._offers.append(_Offer(record, epoch))
        self._state.notify_all()

    def _drop(self, offer: _Offer) -> None:
        self._offers.remove(offer)
        self._wanted.discard(offer.record.step)
        self._release(offer)

    def _release(self, offer: _Offer) -> None:
        with self._state:
            if offer.leased and not self._closed:
                self._leases.native.lease(offer.record.slot, False)
            offer.leased = False
            self._state.notify_all()

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._state:
                while not (self._offers or self._untold or self._unkept or self._closing):
                    self._busy_since_s = math.inf
                    self._state.wait()
                self._busy_since_s = time.monotonic()
                untold, self._untold = self._untold, set()
                unkept, self._unkept = self._unkept, set()
                offer = self._next() if self._offers else None
                done = self._closing and offer is None and not (untold or unkept)
            if done:
                self._await_others()
                return
            for step in untold:
                self._tell(step)
            for step in unkept:
                self._remove_unfinished(step)
            if offer is not None and not self._take(offer):
                with self._state:
                    self._state.wait(_POLL_S)

    def _await_others(self) -> None:
        """Wait for the other ranks of the folder, which ask rank 0 what it keeps; bounded."""
        deadline = time.monotonic() + CHOICE_S
        chooses = self._choice is not None and self._choice.chooses
        with contextlib.suppress(LightckError):
            while chooses and time.monotonic() < deadline:
                items = [e for e in item.every_item(self._where.path) if not e.unread]
                if all(each.is_whole for each in items) or items[-1].is_whole:
                    self._prune()
                    return
                time.sleep(_POLL_S)

    def _next(self) -> _Offer | None:
        """Return the offer to take: of one rank a reported one, else the newest."""
        if not self._alone:
            return self._offers[0]
        return next(filter(self._must, self._offers), self._offers[-1])

    def _take(self, offer: _Offer) -> bool:
        """Copy an offered snapshot if it is chosen, else drop it; False: that is not known yet."""
        step, keeps = offer.record.step, self._decision(offer)
        if keeps is None:
            return False
        with self._state:
            if offer not in self._offers:
                return True
            if not keeps:
                self._drop(offer)
                self._unkept.add(step)
                return True
            self._offers.remove(offer)
            offer.since_s = time.monotonic()
            self._copying = offer
        try:
            self._make(offer)
        except (LightckError, OSError) as error:
            if not (offer.given_back or offer.left):
                event("history_failed", logging.WARNING, step=step, why=error)
            self._remove_unfinished(step)
        finally:
            with self._state:
                self._release(offer)
                self._copying = None
                self._wanted.discard(step)
        return True

    def _decision(self, offer: _Offer) -> bool | None:
        """Return whether an offer is kept; None: it is not known yet."""
        with self._state:
            keeps = self._is_chosen(offer.record, offer.epoch)
        if self._choice is None:
            return keeps
        step = offer.record.step
        try:
            if self._choice.chooses:
                self._choice.decide(step, keeps)
                return keeps
            known = self._choice.decided(step)
        except LightckError as error:
            event("history_failed", logging.WARNING, step=step, why=error)
            return False
        if known is None and time.monotonic() - offer.since_s > CHOICE_S:
            event("history_failed", logging.WARNING, step=step, why="rank 0 has not chosen in time")
            return False
        return known

    def _make(self, offer: _Offer) -> None:
        """Make the item of a snapshot, described first; then remove what is no longer kept."""
        record = offer.record
        where = item.make_place(self._where.path, record.step, self._rank)
        with self._state:
            kept = self._kept(record, offer.epoch)
        if self._describes:
            with self._describing:
                item.describe(where, kept, self._ranks)
        copied = partial(self._release, offer)
        copy_snapshot(self._where, record, where, copied=copied, bytes_per_s=self._limit)
        with self._state:
            left = offer.left
            if not left:
                self._items[record.step] = kept
                (self._inexact.add if record.early else self._inexact.discard)(record.step)
                if self._metrics.get(record.step, {}) != kept.metrics:
                    self._untold.add(record.step)
        if left:  # it was made after the others of its branch were moved aside
            if self._describes:
                item.remove(item.Item(where.path, kept, self._ranks))
            return
        event("history_kept", logging.DEBUG, step=record.step, path=where.path)
        self._made.add(record.step)
        if self._describes:
            self._prune()

    def _remove_unfinished(self, step: int) -> None:
        """Remove the item of a step that is not kept, or whose copy failed, if it is not whole."""
        if not self._describes or step in self._items:
            return
        with contextlib.suppress(LightckError):  # the next attach removes it
            for each in item.every_item(self._where.path):
                if each.kept.step == step and not each.is_whole:
                    item.remove(each)

    def _prune(self) -> None:
        """Remove the items that are no longer kept. A failure is an event; the next prune tries."""
        with self._state:
            branch = self._branch
        items = [each for each in item.every_item(self._where.path) if not each.unread]
        whole = [each for each in items if each.is_whole]
        there = [each.kept for each in whole]
        every = {each.step for each in there}
        chosen = self._asked(lambda: steps_to_keep(self.keep, there), otherwise=every)
        unkept = [each for each in whole if each.kept.step not in chosen]
        chosen |= {each.kept.step for each in unkept if not item.remove(each, unless_pinned=True)}
        # Every rank copies in the same order: what one has not copied before an item that all have,
        # made in this life, it never will.
        newest = max((each.step for each in there if each.step in self._made), default=-1)
        self._made = {step for step in self._made if step >= newest}
        for each in items if not self._alone else ():
            if not each.is_whole and each.kept.step < newest:
                item.remove(each)
        with self._state:
            if branch != self._branch:
                return
            kept = [each for each in there if each.step in chosen]
            self._items = {each.step: self._with_newer_metrics(each) for each in kept}

    def _with_newer_metrics(self, kept: Kept) -> Kept:
        return replace(kept, metrics={**kept.metrics, **self._metrics.get(kept.step, {})})

    # ---- descriptions ----------------------------------------------------------------------------

    def _tell(self, step: int) -> None:
        """Describe an item again, with the metrics that it has now, and choose again."""
        with self._state:
            kept = self._items.get(step)
            if kept is None:
                return
            kept = self._items[step] = self._with_newer_metrics(kept)
        if not self._describes:
            return
        try:
            with self._describing:
                item.describe(item.place(self._where.path, step, self._rank), kept, self._ranks)
            self._prune()
        except (LightckError, OSError) as error:
            event("history_failed", logging.WARNING, step=step, why=error)

    def _describe_soon(self, step: int, kept: Kept, *, again: bool = False) -> None:
        """Write a reported step's description before its snapshot can be committed.

        A run that is killed between the two still knows the metrics of the snapshot that it has.
        `again`: the item is there.
        """

        def write() -> None:
            try:
                make = item.place if again else item.make_place
                where = make(self._where.path, step, self._rank)
                with self._describing:
                    if again or not where.exists:
                        item.describe(where, kept, self._ranks)
            except (LightckError, OSError) as error:
                event("history_failed", logging.WARNING, step=step, why=error)

        thread = threading.Thread(target=write, name="lightck-report", daemon=True)
        thread.start()
        thread.join(REPORT_S)


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers.

    Raises:
        ConfigError: one is neither a number nor a tensor of one element.
    """
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"metrics: {name} = {value!r}: must be a number, or a tensor of one element"
            ) from error
    return found


def history_of(
    region: Region, config: Config, rank: int = 0, ranks: tuple[int, ...] = (0,)
) -> History | None:
    """Return what keeps snapshots of a region beyond its slots; None where no policy is given.

    Raises:
        ConfigError: the region is no file in a folder of ordinary files.
    """
    if config.keep is None:
        return None
    assert isinstance(config.keep, Keep), "checked"
    place = region.place
    if not place.is_plain or place.path == place.file or region.info.medium == "hugetlbfs":
        raise ConfigError(
            f"keep = {config.keep}: a history is a folder of ordinary files beside the region, and"
            f" {place.file} is none; choose a folder on a file system as path"
        )
    return History(place, config.keep, rank=rank, ranks=ranks, bytes_per_s=config.write_limit)


def leave_behind(run: Path, step: int) -> None:
    """Move the items of a run aside that are of steps beyond `step`; -1: all of them.

    A run that goes on from `step` has never had them. Nothing is removed but what is not whole.
    """
    moved: dict[int, object] = {}
    folder = item.folder_of(run)
    try:
        for each in item.every_item(run):
            if each.kept.step > step and each.is_whole:
                moved[each.kept.step] = item.set_aside(each)
            elif each.kept.step > step:
                item.remove(each)
    except (LightckError, OSError) as error:
        event("history_failed", logging.WARNING, path=folder, why=error)
    if moved:
        why = f"the run goes on from step {max(step, 0)}"
        event("history_left", steps=[*moved], path=folder / item.LEFT, why=why)


def holds(where: Location, snapshot: tuple[int, int]) -> bool:
    """Return whether the history beside a region has the snapshot of this (timeline, step)."""
    kept = item.place(where.path, snapshot[1], 0)
    with contextlib.suppress(LightckError):
        for file in location.every_rank(kept):
            region, recovery = open_and_recover(file)
            region.close()
            if any((c.record.timeline, c.record.step) == snapshot for c in recovery.candidates):
                return True
    return False
