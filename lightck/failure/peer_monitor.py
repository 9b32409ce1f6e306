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

from lightck.distributed.store import KeyValueStore
from lightck.distributed.topology import Topology
from lightck.errors import LightckError, StoreError
from lightck.events import event
from lightck.region import location, stats_page
from lightck.region.location import Location
from lightck.region.region import Region

POLL_S = 0.25
"""Seconds between polls; a killed peer or an announcement is noticed within twice that."""
_RANKS_PER_S = 5000  # polls that a server of 10 us per message answers in a twentieth of its time
_REASON_LENGTH = 500  # characters of a reason
_MAX_NOTICES = 16  # read in one poll: the first failures matter, and all ranks may fail at once


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """A rank's announcement of its own failure.

    Attributes:
        rank: the rank that announces it.
        reason: a signal's name, an exception, `hang`, ...
        step: the step of the snapshot that it has committed since; None: it has none.
        early: that snapshot was finished before forward start.
        from_peer: its reason is another rank's failure.
        last_step: its last complete step at that time.
    """

    rank: int
    reason: str
    step: int | None = None
    early: bool = False
    from_peer: bool = False
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The known state of the other ranks.

    Attributes:
        notices: their announcements, in the order in which they were read; later ones are appended.
        dead: ranks of this node that have ended without closing their handle.
        closed: ranks of this node that have closed it.
        unreachable: why the store did not answer the last time; empty if it did.
    """

    notices: tuple[FailureNotice, ...] = ()
    dead: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    unreachable: str = ""

    @property
    def is_quiet(self) -> bool:
        """Tell whether no rank has failed, as far as is known."""
        return not self.notices and not self.dead


@dataclass(eq=False)
class _NodeRank:
    """Another rank of this node, as its region shows it."""

    rank: int
    place: Location
    page: tuple[int, int, int] | None
    """The statistics page's process, attach time and end flag when this rank began to watch."""
    was_owned: bool = False
    """True if its region was owned once: from then on a free lock means that it has ended."""
    closed: bool = False
    """True if it has closed its handle."""

    def is_dead(self) -> bool:
        """Tell whether it has ended without closing its handle."""
        if self.closed:
            return False
        try:
            owned = location.is_owned(self.place)
            if owned or not self.was_owned:
                self.was_owned = owned
                return False
            page = _read_page(self.place)
        except LightckError:  # the folder is gone, or the region is being made anew
            return False
        # A page from before this attach says nothing about this life of the rank.
        self.closed = page is not None and page != self.page and bool(page[2])
        return not self.closed


class PeerMonitor:
    """The failure notices of one attach; every call returns at once, or by its time limit.

    Any thread.
    """

    def __init__(
        self,
        store: KeyValueStore,
        topology: Topology,
        place: Location,
        *,
        poll_s: float = POLL_S,
        joins: bool = False,
    ) -> None:
        """Start to watch, on threads of its own.

        Args:
            store: a connection of its own, below a prefix of this attach.
            topology: the ranks of this node, whose regions are watched once each is owned by its
                rank.
            place: the place of this rank's own region.
            poll_s: seconds between two polls; more with very many ranks.
            joins: this rank replaces a lost one: what was announced before is over.
        """
        self.topology = topology
        self.poll_s = max(poll_s, topology.world / _RANKS_PER_S)
        self._store = store
        self._notices: list[FailureNotice] = []
        self._unread: set[int] = set()
        self._known: int | None = None if joins else 0
        self._unsent: list[tuple[FailureNotice, threading.Event]] = []
        self._unreachable = ""
        self._stopping = False
        self._changed = threading.Condition()
        self._dead: tuple[int, ...] = ()
        self._closed: tuple[int, ...] = ()
        self._polls = 0
        self._node_ranks = _node_ranks(topology, place)
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
        from_peer: bool = False,
        last_step: int = 0,
        seconds: float = 0.0,
    ) -> bool:
        """Announce that this rank has failed, or has saved itself.

        Args:
            reason: the reason of the failure or the save.
            step: the step of its committed snapshot.
            early: that was finished before forward start.
            from_peer: it has saved itself because of another rank's failure.
            last_step: its last complete step.
            seconds: how long to wait until the store has the announcement.

        Returns:
            Whether the store has it; else it will, once it answers.
        """
        notice = FailureNotice(
            self.topology.rank, _ascii(reason)[:_REASON_LENGTH], step, early, from_peer, last_step
        )
        sent = threading.Event()
        with self._changed:
            self._unsent.append((notice, sent))
            self._changed.notify_all()
        return sent.wait(seconds)

    def poll(self) -> PeerStatus:
        """Return the known state, from the store and from this node's locks; at once."""
        with self._changed:
            return PeerStatus(tuple(self._notices), self._dead, self._closed, self._unreachable)

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
        while self._node_ranks:
            dead = tuple(peer.rank for peer in self._node_ranks if peer.is_dead())
            closed = tuple(peer.rank for peer in self._node_ranks if peer.closed)
            with self._changed:
                self._dead, self._closed = dead, closed
                self._polls += 1
                if self._changed.wait_for(lambda: self._stopping, self.poll_s):
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                stopping = self._stopping
            self._try_store(self._send)
            if stopping:
                return
            self._try_store(self._receive)
            with self._changed:
                due = time.monotonic() + self.poll_s
                while not (self._stopping or (self._unsent and not self._unreachable)):
                    left = due - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break

    def _try_store(self, ask: Callable[[], None]) -> None:
        """Call the store; one that does not answer is logged once per outage."""
        try:
            ask()
            why = ""
        except (StoreError, ValueError) as error:  # no answer, or the key is another job's
            why = str(error)
        with self._changed:
            is_new, self._unreachable = why and not self._unreachable, why
        if is_new:
            event("failures_unheard", logging.WARNING, why=why)

    def _send(self) -> None:
        while self._unsent:
            notice, sent = self._unsent[0]
            # A repeated `add` leaves a number without an announcement, which readers ignore.
            number = self._store.add("count")
            self._store.set(str(number), json.dumps(asdict(notice)).encode())
            with self._changed:
                self._unsent.pop(0)
            sent.set()

    def _receive(self) -> None:
        raw = self._store.read("count")
        count = int(raw) if raw else 0
        known = count if self._known is None else self._known
        first, self._known = known + 1, max(count, known)
        unread = sorted(self._unread)[-_MAX_NOTICES:]
        self._unread = {*unread, *range(first, count + 1)[:_MAX_NOTICES]}
        for number in sorted(self._unread):
            sent = self._store.read(str(number))
            if sent is None:
                continue  # its sender is between the two calls, or was lost there
            self._unread.discard(number)
            notice = _decode(sent)
            if notice is not None and notice.rank != self.topology.rank:
                with self._changed:
                    self._notices.append(notice)


def _decode(sent: bytes) -> FailureNotice | None:
    """Decode an announcement; None if it is none of this job's."""
    try:
        return FailureNotice(**json.loads(sent))
    except (TypeError, ValueError):
        return None


def _node_ranks(topology: Topology, place: Location) -> list[_NodeRank]:
    """Return the other ranks of this node whose regions can be watched."""
    if not place.is_plain or place.path == place.file:
        return []
    found = []
    for rank in topology.peers:
        if rank != topology.rank:
            theirs = location.locate(place.path, rank, create=False)
            found.append(_NodeRank(rank, theirs, _read_page(theirs) if theirs.exists else None))
    return found


def _read_page(place: Location) -> tuple[int, int, int] | None:
    """Return process number, attach time and end flag of a region's statistics page, or None."""
    region = Region.open(place, writable=False)
    try:
        page = stats_page.read(region.native)
    finally:
        region.close()
    if page.process is None:
        return None
    return page.process.number, page.numbers["began_ns"], page.numbers["ended"]


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()
