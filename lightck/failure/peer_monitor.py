"""Failures of the other ranks, as this rank learns of them, and its own, without a collective.

A rank that fails, or has saved itself, announces it over the job's store, under keys of this
attach: `count` numbers the announcements (`FailureNotice`), and each number is the key of one. A
rank that was killed announces nothing, but its lock on its region is released, which any rank of
its node can see. A store or a file system that does not answer is no rank's failure; each is polled
on a thread of its own.

A poll sends one message to the store, as long as no rank has announced anything.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lightck.distributed.store import Store
from lightck.distributed.topology import Topology
from lightck.errors import LightckError, StoreError
from lightck.events import event
from lightck.region import location, stats_page
from lightck.region.location import Location
from lightck.region.region import Region

LOOK_S = 0.25
"""Seconds between polls; a killed peer or an announcement is noticed within twice that."""
_RANKS_PER_S = 5000  # polls that a server of 10 us per message answers in a twentieth of its time
_LETTERS = 500  # characters of a reason
_MOST_WORDS = 16  # read in one poll: the first failures matter, and all ranks may fail at once


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """A rank's announcement of its own failure.

    Attributes:
        rank: the rank that announces it.
        reason: a signal's name, an exception, `hang`, ...
        step: the step of the snapshot that it has committed since; None: it has none.
        early: that snapshot was finished before forward start.
        heard: its reason is another rank's failure.
        stood: its last complete step at that time.
    """

    rank: int
    reason: str
    step: int | None = None
    early: bool = False
    heard: bool = False
    stood: int = 0


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The known state of the other ranks.

    Attributes:
        words: their announcements, in the order in which they were read; later ones are appended.
        dead: ranks of this node that have ended without closing their handle.
        closed: ranks of this node that have closed it.
        unreachable: why the store did not answer the last time; empty if it did.
    """

    words: tuple[FailureNotice, ...] = ()
    dead: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    unreachable: str = ""

    @property
    def is_quiet(self) -> bool:
        """Tell whether no rank has failed, as far as is known."""
        return not self.words and not self.dead


@dataclass(eq=False)
class _Peer:
    """Another rank of this node, as its region shows it."""

    rank: int
    where: Location
    page: tuple[int, int, int] | None
    """The statistics page's process, attach time and end flag when this rank began to watch."""
    seen: bool = False
    """True if its region was owned once: from then on a free lock means that it has ended."""
    closed: bool = False
    """True if it has closed its handle."""

    def is_dead(self) -> bool:
        """Tell whether it has ended without closing its handle."""
        if self.closed:
            return False
        try:
            owned = location.is_owned(self.where)
            if owned or not self.seen:
                self.seen = owned
                return False
            page = _page(self.where)
        except LightckError:  # the folder is gone, or the region is being made anew
            return False
        # A page from before this attach says nothing about this life of the rank.
        self.closed = page is not None and page != self.page and bool(page[2])
        return not self.closed


class Peers:
    """The failure notices of one attach; every call returns at once, or by its time limit.

    Any thread.
    """

    def __init__(
        self, store: Store, topology: Topology, where: Location, *, look_s: float = LOOK_S
    ) -> None:
        """Start to watch, on threads of its own.

        Args:
            store: a connection of its own, below a prefix of this attach.
            topology: the ranks of this node, whose regions are watched once each is owned by its
                rank.
            where: the place of this rank's own region.
            look_s: seconds between two polls; more with very many ranks.
        """
        self.topology = topology
        self.look_s = max(look_s, topology.world / _RANKS_PER_S)
        self._store = store
        self._words: list[FailureNotice] = []
        self._unread: set[int] = set()
        self._count = 0
        self._to_say: list[tuple[FailureNotice, threading.Event]] = []
        self._unreachable = ""
        self._stopping = False
        self._changed = threading.Condition()
        self._dead: tuple[int, ...] = ()
        self._closed: tuple[int, ...] = ()
        self._looks = 0
        self._peers = _peers(topology, where)
        names = {"lightck-peers": self._run, "lightck-locks": self._watch_locks}
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True) for name, run in names.items()
        ]
        for thread in self._threads:
            thread.start()

    def announce(
        self,
        reason: str,
        step: int | None = None,
        *,
        early: bool = False,
        heard: bool = False,
        stood: int = 0,
        seconds: float = 0.0,
    ) -> bool:
        """Announce that this rank has failed, or has saved itself.

        Args:
            reason: the reason of the failure or the save.
            step: the step of its committed snapshot.
            early: that was finished before forward start.
            heard: it has saved itself because of another rank's failure.
            stood: its last complete step.
            seconds: how long to wait until the store has the announcement.

        Returns:
            Whether the store has it; else it will, once it answers.
        """
        word = FailureNotice(
            self.topology.rank, _plain(reason)[:_LETTERS], step, early, heard, stood
        )
        said = threading.Event()
        with self._changed:
            self._to_say.append((word, said))
            self._changed.notify_all()
        return said.wait(seconds)

    def look(self) -> PeerStatus:
        """Return the known state, from the store and from this node's locks; at once."""
        with self._changed:
            return PeerStatus(tuple(self._words), self._dead, self._closed, self._unreachable)

    def stop(self, seconds: float = 1.0) -> None:
        """Make the announcements that are still due, and stop watching. Idempotent.

        A call that hangs, in the store or a file system, keeps its thread, which is a daemon and
        touches nothing else.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        until_s = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    # ---- on threads of its own -------------------------------------------------------------

    def _watch_locks(self) -> None:
        while self._peers:
            dead = tuple(peer.rank for peer in self._peers if peer.is_dead())
            closed = tuple(peer.rank for peer in self._peers if peer.closed)
            with self._changed:
                self._dead, self._closed = dead, closed
                self._looks += 1
                if self._changed.wait_for(lambda: self._stopping, self.look_s):
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                stopping = self._stopping
            self._in_touch(self._speak)
            if stopping:
                return
            self._in_touch(self._listen)
            with self._changed:
                due = time.monotonic() + self.look_s
                while not (self._stopping or (self._to_say and not self._unreachable)):
                    left = due - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break

    def _in_touch(self, ask: Callable[[], None]) -> None:
        """Call the store; one that does not answer is logged once per outage."""
        try:
            ask()
            why = ""
        except (StoreError, ValueError) as error:  # no answer, or the key is another job's
            why = str(error)
        with self._changed:
            fresh, self._unreachable = why and not self._unreachable, why
        if fresh:
            event("failures_unheard", logging.WARNING, why=why)

    def _speak(self) -> None:
        while self._to_say:
            word, said = self._to_say[0]
            # A repeated `add` leaves a number without an announcement, which readers ignore.
            number = self._store.add("count")
            self._store.set(str(number), json.dumps(asdict(word)).encode())
            with self._changed:
                self._to_say.pop(0)
            said.set()

    def _listen(self) -> None:
        raw = self._store.read("count")
        count = int(raw) if raw else 0
        first, self._count = self._count + 1, max(count, self._count)
        unread = sorted(self._unread)[-_MOST_WORDS:]
        self._unread = {*unread, *range(first, count + 1)[:_MOST_WORDS]}
        for number in sorted(self._unread):
            said = self._store.read(str(number))
            if said is None:
                continue  # its sender is between the two calls, or was lost there
            self._unread.discard(number)
            word = _word(said)
            if word is not None and word.rank != self.topology.rank:
                with self._changed:
                    self._words.append(word)


def _word(said: bytes) -> FailureNotice | None:
    """Decode an announcement; None if it is none of this job's."""
    try:
        return FailureNotice(**json.loads(said))
    except (TypeError, ValueError):
        return None


def _peers(topology: Topology, where: Location) -> list[_Peer]:
    """Return the other ranks of this node whose regions can be watched."""
    if not where.is_plain or where.path == where.file:
        return []
    found = []
    for rank in topology.peers:
        if rank != topology.rank:
            theirs = location.locate(where.path, rank, create=False)
            found.append(_Peer(rank, theirs, _page(theirs) if theirs.exists else None))
    return found


def _page(where: Location) -> tuple[int, int, int] | None:
    """Return process number, attach time and end flag of a region's statistics page, or None."""
    region = Region.open(where, writable=False)
    try:
        said = stats_page.read(region.native)
    finally:
        region.close()
    if said.process is None:
        return None
    return said.process.number, said.numbers["began_ns"], said.numbers["ended"]


def _plain(text: str) -> str:
    return text.encode("ascii", "replace").decode()
