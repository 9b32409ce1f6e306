"""The restore by all ranks: choose a snapshot, verify it on every rank, and only then restore it.

    scan -> [send views -> choose -> send it to ranks that lack it -> verify -> report]
         -> restore -> report

The steps in brackets are repeated. A snapshot that one rank finds damaged is missing there from
then on: other ranks send it, or all restore an older one. If a rank cannot go on at all, every rank
raises an error that names it (`rendezvous.py`); before the last two steps nothing has changed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from lightck.distributed.rendezvous import Rendezvous
from lightck.distributed.restore import replica_transfer
from lightck.distributed.restore.offers import Key
from lightck.distributed.restore.received_snapshot import ReceivedSnapshot
from lightck.distributed.restore.replica_transfer import P2PChannel
from lightck.distributed.restore.selection import Choice, decide_restore
from lightck.distributed.restore.survey import RegionSurvey
from lightck.distributed.rounds import Decide
from lightck.distributed.rounds import Message as Said
from lightck.errors import (
    CoordinationError,
    CorruptSnapshotError,
    LightckError,
    NoSnapshotError,
    RegionBusyError,
    RegionIOError,
)
from lightck.events import event
from lightck.reader.assembly import AssembledSnapshot
from lightck.region import layout
from lightck.region.location import Location
from lightck.region.region import Continuation

# ---- replicas given and received before the restore, seen from one rank --------------------------

SLOWEST_BYTES_S = 100e6
"""The rate in bytes per second at which a rank is still believed to be reading, or sending."""


class ReplicaExchangeError(LightckError):
    """A replica from another rank did not come, or is not valid; nothing live has changed."""


@dataclass(eq=False)
class ReplicaExchange:
    """The exchange of one snapshot's replicas. Used by the thread that restores."""

    ranks: Rendezvous
    holdings: RegionSurvey
    key: Key
    early: bool
    heals: Mapping[int, int]
    """The sending rank of each receiving rank."""
    patience_s: float
    """Time to wait for each message, in seconds; connections together may take half of it."""
    mine: AssembledSnapshot | None = None
    """The state that this rank put together by itself; None if it receives one."""
    got: ReceivedSnapshot | None = None
    _giving: replica_transfer.ReplicaSender | None = None
    _channels: list[P2PChannel] = field(default_factory=list)

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[AssembledSnapshot | ReceivedSnapshot]:
        """Yield this rank's snapshot, its own or a received one; close all connections at the end.

        If a sender fails inside the context, it tells the ranks that wait for it.

        Raises:
            GiftError: the replica that this rank was to receive did not come.
        """
        rank = self.ranks.rank
        if rank not in self.heals:
            found = self.holdings.assembled(self.key, early=self.early)
            assert isinstance(found, AssembledSnapshot), "chosen, but not offered here"
            self.mine = found
        try:
            self._connect()
            if self.mine is None:
                self.got = self._received()
                yield self.got
            else:
                if self._channels:
                    self._giving = replica_transfer.ReplicaSender(self.mine, [*self._channels])
                    self._giving.announce()
                yield self.mine
        except LightckError as error:
            if self._giving is not None:
                self._giving.fail(str(error))
            raise
        finally:
            for channel in self._channels:
                channel.close()

    def give(self) -> None:
        """Send the snapshot, which is now verified, to the ranks that lack it.

        Raises:
            CorruptSnapshotError, RegionIOError: it cannot be read any more.
        """
        if self._giving is None:
            return
        giving, self._giving = self._giving, None
        giving.send()
        for text in giving.lost:
            event("not_given", logging.WARNING, step=self.key.step, why=text)

    def in_words(self) -> str:
        """Describe what this rank received, in words; empty if nothing."""
        if self.got is None:
            return ""
        rank, donor, size = self.ranks.rank, self.got.donor, self.got.given.payload_bytes
        own = "buffers, generators and data position are its own"
        if self.got.half is None:
            own = f"buffers and data position are those of rank {self.got.given.record.rank}, too"
        return f"rank {rank} got {size} bytes of step {self.key.step} from rank {donor}; {own}"

    def _connect(self) -> None:
        rank, rounds = self.ranks.rank, self.ranks.rounds
        mine = [(r, donor) for r, donor in sorted(self.heals.items()) if rank in (r, donor)]
        if not mine:
            return
        assert rounds is not None, "alone, nobody gives anything"
        # The store is asked first: a receiver that waits for its server waits for no other rank.
        stores = [self.ranks.store.plain(f"heal/{rounds.number}/{d}-{r}") for r, d in mine]
        # The connections are made one after the other, with one deadline for all, long before any
        # rank's time-out in the round that follows: there the ranks learn of each other's failures,
        # and take an older step.
        until = time.monotonic() + self.patience_s / 2
        for (receiver, donor), store in zip(mine, stores, strict=True):
            what, ends = f"step {self.key.step}", (donor, receiver)
            try:
                channel = P2PChannel.between(store, ends, rank, what, self.patience_s, until)
            except CoordinationError as error:
                if rank == receiver:
                    raise ReplicaExchangeError(str(error)) from error
                event("not_given", logging.WARNING, step=self.key.step, why=error)
                continue
            self._channels.append(channel)

    def _received(self) -> ReceivedSnapshot:
        donor = self.heals[self.ranks.rank]
        try:
            found = replica_transfer.receive(self._channels[0], self.key, donor, SLOWEST_BYTES_S)
            found.half = self.holdings.half(self.key, self.early)
            if found.half is not None and not _fits(found):
                found.drop_half()
        except LightckError as error:
            raise ReplicaExchangeError(str(error)) from error
        return found


def _fits(found: ReceivedSnapshot) -> bool:
    """Tell whether the rank's own state fits the received one, and no tensor is missing."""
    half, entries = found.half, found.entries
    try:
        found.trees()
        layout.decode(layout.encode(entries, np.zeros(len(entries), np.uint64)), context="healed")
    except LightckError:
        return False
    # A snapshot has every name of its own rank's model, which may be other names than the donor's.
    names = {each.name for each in entries}
    return (half is not None and half.ties is not None) or all(
        each.name in names for each in found.given.entries if each.name.startswith("model/")
    )


# ---- the restore ---------------------------------------------------------------------------------

_TRIES = 8
"""The most scans of the regions: a running job may overwrite a snapshot before it is leased."""
_PASSED_OVER = (CorruptSnapshotError, RegionBusyError, RegionIOError)
_LETTERS = 1000  # the longest failure text that is sent to the others, in characters

_LISTED = 12

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class ChosenSnapshot:
    """A snapshot that was chosen, with this rank's state in it."""

    key: Key
    snapshot: AssembledSnapshot | ReceivedSnapshot
    why: str
    """The reason for the choice, in one sentence."""
    fell_back: tuple[str, ...]
    """The reasons why newer snapshots were not whole."""
    holdings: RegionSurvey
    healed: list[str] = field(default_factory=list)
    """The replicas that ranks received, and from whom, in words; known only when it is restored."""


class RestoreAction(Protocol[T_co]):
    """The two-phase action that restores a chosen snapshot."""

    def __call__(
        self, found: ChosenSnapshot, /
    ) -> contextlib.AbstractContextManager[Callable[[], T_co]]:
        """Hold the snapshot and verify it, changing nothing; yield the callable that restores it.

        Raises:
            CorruptSnapshotError, RegionIOError, RegionBusyError: an older snapshot is needed.
        """
        ...


def restore_together(
    ranks: Rendezvous,
    where: Location,
    step: int | None,
    taking: RestoreAction[T],
    continuation: Continuation | None = None,
) -> T | None:
    """Return the result of `taking` for the best snapshot that every rank can restore.

    Args:
        ranks: the meeting; every rank calls this with the same step.
        where: the place of this rank's own region.
        step: only this step; None for the newest.
        taking: see `RestoreAction`.
        continuation: of the model that is restored; None for a reader, which is no rank of a job.
            With one, a rank beyond the former world takes another's own state.

    Returns:
        None when nothing was ever whole: the model may then overwrite what single ranks hold.

    Raises:
        NoSnapshotError: snapshots are there, but none is whole, or not the wanted step.
        CoordinationError: a rank failed, or did not come; on every other rank.
        RegionError: the place is not safe or not a region.
    """
    for _ in range(_TRIES):
        lends = continuation is not None
        with RegionSurvey.opened(where, ranks.rank, ranks.world, lends=lends) as holdings:
            attempt = _RestoreAttempt(ranks, holdings, step)
            choice = attempt.choose()
            while choice.key is not None:
                taken = attempt.take(choice, choice.key, taking)
                if taken:
                    return taken[0]
                choice = attempt.choose()
            if choice.void and not attempt.damaged:
                if left := [*choice.fell_back, *choice.left]:
                    event(
                        "begins_anew",
                        logging.WARNING,
                        path=holdings.where.path,
                        why="; ".join(left),
                    )
                if continuation is not None:
                    holdings.give_up(continuation)
                return None
            problems = [*choice.fell_back, *attempt.damaged, *choice.left]
            text = holdings.nothing_whole(step, problems)
        if not choice.overtaken:
            break
    ranks.leave()  # every rank comes to the same result by itself
    raise NoSnapshotError(text)


@dataclass
class _RestoreAttempt:
    """One scan of the regions, and the attempts to restore a snapshot of it."""

    ranks: Rendezvous
    holdings: RegionSurvey
    step: int | None
    damaged: list[str] = field(default_factory=list)
    """Why chosen snapshots could not be read; the same on every rank."""

    def choose(self) -> Choice:
        """Agree on the next snapshot to try, the same on every rank."""
        while True:
            view = self.holdings.view(self.step)
            try:
                choice = Choice.heard(self._together("restore", view.said(), decide_restore))
            except CoordinationError:
                if self.holdings.broken is not None and self.ranks.rounds is not None:
                    raise self.holdings.broken from None
                raise
            if not choice.widen:
                return choice
            self.holdings.widen()

    def take(self, choice: Choice, key: Key, taking: RestoreAction[T]) -> list[T]:
        """Restore the chosen snapshot; return [its result], or [] if a rank finds it damaged."""
        heals = dict(choice.heals)
        usual = self.ranks.rounds.timeout_s if self.ranks.rounds is not None else 0.0
        gifts = ReplicaExchange(self.ranks, self.holdings, key, choice.early, heals, usual)
        fell_back = (*choice.fell_back, *self.damaged)
        with contextlib.ExitStack() as held:
            taken: list[T] = []
            problem: Exception | None = None
            finish: Callable[[], T] | None = None
            found: ChosenSnapshot | None = None
            try:
                # A rank that fails at once must wait for the others as long as those that do not.
                held.enter_context(self._patient(choice.size, len(heals)))
                with gifts.exchanged() as snapshot:
                    found = ChosenSnapshot(key, snapshot, choice.why, fell_back, self.holdings)
                    finish = held.enter_context(taking(found))
                    gifts.give()
            except (*_PASSED_OVER, ReplicaExchangeError) as error:
                problem = error.with_traceback(None)  # which holds the data read so far
            # A rank that learns here of damage has changed nothing.
            well, healed = self._all_well("restore: verified", key, problem, gifts)
            if well:
                assert finish is not None and found is not None
                found.healed.extend(healed)
                try:
                    taken.append(finish())
                except _PASSED_OVER as error:  # the medium fails on the second read
                    problem = error
                if self._all_well("restore: filled", key, problem, gifts)[0]:
                    return taken
        return []

    @contextlib.contextmanager
    def _patient(self, size: int, heals: int) -> Iterator[None]:
        """Wait longer for ranks that read: another rank's medium may be much slower."""
        rounds = self.ranks.rounds
        if rounds is None:
            yield
            return
        usual = rounds.timeout_s
        rounds.timeout_s = usual + (1 + heals) * size / SLOWEST_BYTES_S
        try:
            yield
        finally:
            rounds.timeout_s = usual

    def _all_well(
        self, kind: str, key: Key, problem: Exception | None, gifts: ReplicaExchange
    ) -> tuple[bool, list[str]]:
        """Return whether no rank met a problem, and what ranks received; the same on every rank.

        A rank whose own snapshot is damaged lacks it from here on, and the others may send it
        theirs. If no rank's own snapshot is damaged, and a replica did not come well, the snapshot
        counts no more.
        """
        self.holdings.overtaken |= isinstance(problem, RegionBusyError)
        text = str(problem).encode("ascii", "replace").decode()[:_LETTERS] if problem else None
        own = gifts.mine is not None
        said = {"problem": text, "own": own, "healed": gifts.in_words()}
        verdict = self._together(kind, said, _problems)
        for text in verdict["problems"]:
            event("fell_back", logging.WARNING, step=key.step, why=text)
        self.damaged += verdict["problems"]
        if verdict["problems"] and not verdict["own"]:
            self.holdings.drop(key)
        elif problem is not None and gifts.mine is not None:
            self.holdings.failed(gifts.mine)
        return not verdict["problems"], verdict["healed"]

    def _together(self, kind: str, said: Said, decide: Decide) -> Said:
        return self.ranks.agree(
            lambda rounds: decide([said]) if rounds is None else rounds.agree(kind, said, decide)
        )


def _problems(said: Sequence[Said]) -> Said:
    """Decide the round on rank 0: collect the problems and the replicas received."""
    met = [(rank, each) for rank, each in enumerate(said) if each["problem"]]
    told = [e["problem"] if len(said) == 1 else f"rank {r}: {e['problem']}" for r, e in met]
    healed = [each["healed"] for each in said if each["healed"]]
    return {
        "problems": told[:_LISTED],
        "own": any(each["own"] for _, each in met),
        "healed": healed[:_LISTED],
    }
