"""The symptoms of all ranks, which rank 0 needs to know, because it alone asks the policy.

A rank whose symptoms change reports them over the job's store, under keys of this attach: `count`
numbers the reports, and each number is the key of one. While symptoms last it repeats the report,
so that those of a rank that has gone expire; a healthy rank sends nothing, and rank 0 looks at
`count`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightck.distributed.store import KeyValueStore
from lightck.distributed.topology import Topology
from lightck.errors import LightckError, StoreError
from lightck.health import HealthMonitor, probes
from lightck.health.monitor import checked
from lightck.types import Probe

LOOK_S = 2.0
"""Seconds between rank 0's looks at the store."""
OWN_LOOK_S = 0.25
"""Seconds between another rank's looks at its own symptoms."""
REPEAT_S = 60.0
"""Seconds after which a report is repeated."""
HOLDS_S = 120.0
"""Seconds for which a report counts."""
_RANKS_PER_S = 1000  # all may report at once: those of 10,000 ranks are spread over 10 s


class SymptomReports:
    """The symptoms of this rank, and on rank 0 those that other ranks have reported, too.

    A store that does not answer is asked again; the commit protocol tells of it.
    """

    def __init__(
        self,
        monitor: HealthMonitor,
        store: KeyValueStore,
        topology: Topology,
        *,
        look_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to look, on a daemon thread.

        Args:
            monitor: of this rank; `stop` stops it.
            store: a connection of its own, below a prefix of this attach.
            topology: which rank this is.
            look_s: seconds between looks; default: as above.
            clock: seconds of a monotonic clock.
        """
        self._monitor, self._store, self._clock = monitor, store, clock
        self._rank = topology.rank
        self._look_s = look_s or (OWN_LOOK_S if self._rank else LOOK_S)
        self._delay_s = topology.rank / _RANKS_PER_S
        self._stop = threading.Event()
        self._sent: Mapping[str, float] = {}
        self._sent_at_s = 0.0
        self._known = 0
        self._unread: dict[int, float] = {}
        """Numbers whose report is not there yet, and until when it is waited for."""
        self._reports: dict[int, tuple[float, Mapping[str, float]]] = {}
        """Until when each rank's last report counts, and what it says; replaced, never changed."""
        work = self._receive if self._rank == 0 else self._send
        threading.Thread(
            target=self._run, args=(work,), name="lightck-symptoms", daemon=True
        ).start()

    def active(self) -> Mapping[str, float]:
        """Return the symptoms that count now, by name, with how often. Any thread; never blocks."""
        found, now = dict(self._monitor.active()), self._clock()
        for until_s, reported in self._reports.values():
            if now < until_s:
                for name, count in reported.items():
                    found[name] = found.get(name, 0.0) + count
        return found

    @property
    def risk(self) -> str:
        """Return what threatens the medium of this rank's region; empty: nothing."""
        return self._monitor.risk

    def stop(self) -> None:
        """Report and read no more. Does not wait for a call that is under way; idempotent."""
        self._stop.set()
        self._monitor.stop()

    # ---- on its own thread ----------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        while not self._stop.wait(self._look_s):
            try:
                work()
            except (StoreError, ValueError):  # no answer, or the key is another job's
                continue

    def _send(self) -> None:
        active, now = self._monitor.active(), self._clock()
        if active == self._sent and (not active or now - self._sent_at_s < REPEAT_S):
            return
        if self._stop.wait(self._delay_s):
            return
        # A repeated `add` leaves a number without a report, which rank 0 waits for in vain.
        number = self._store.add("count")
        report = {"rank": self._rank, "active": dict(active)}
        self._store.set(str(number), json.dumps(report).encode())
        self._sent, self._sent_at_s = active, now

    def _receive(self) -> None:
        raw, now = self._store.read("count"), self._clock()
        count = int(raw) if raw else 0
        self._unread |= dict.fromkeys(range(self._known + 1, count + 1), now + HOLDS_S)
        self._known = max(self._known, count)
        found, read = dict(self._reports), []
        for number, until_s in sorted(self._unread.items()):
            sent = self._store.read(str(number))
            if sent is None and now < until_s:
                continue  # its sender is between the two calls, or was lost there
            read.append(number)
            if sent is not None and (report := _decode(sent)) is not None:
                found[report[0]] = (now + HOLDS_S, report[1])
        self._reports = found
        for number in read:
            del self._unread[number]
        self._store.delete(map(str, read))


def _decode(sent: bytes) -> tuple[int, Mapping[str, float]] | None:
    """Decode a report; None if it is none of this job's."""
    try:
        report = json.loads(sent)
        return int(report["rank"]), checked(report["active"])
    except (KeyError, TypeError, ValueError, LightckError):
        return None


def watch_symptoms(
    policy: object,
    region: Path,
    topology: Topology,
    store: KeyValueStore | None = None,
    *,
    notice: object = None,
) -> HealthMonitor | SymptomReports:
    """Begin to watch the symptoms of this rank and, on rank 0, to listen for those of others.

    Args:
        policy: one that needs "health": the probes that it, or a policy that it is made of, names
            as `watch`; all of this machine if that is true, or none names any.
        region: the path of the region.
        topology: of the job; its node's first rank reads what is the same for the whole node.
        store: a connection of its own, below a prefix of this attach; None with one rank.
        notice: the user's notice; one of `lightck.notices` that also sees symptoms is a probe, too.

    Returns:
        What has `active()`, `risk` and `stop()`.
    """
    watched = [getattr(each, "watch", None) for each in _parts(policy, "policies")]
    chosen = [probe for each in watched if isinstance(each, tuple) for probe in each]
    if True in watched or not any(watched):
        chosen += probes(region)
    first = topology.rank == min(topology.peers)
    mine = [each for each in chosen if first or not getattr(each, "of_node", False)]
    if first:
        mine += [each for each in _parts(notice, "notices") if isinstance(each, Probe)]
    monitor = HealthMonitor({id(each): each for each in mine}.values())
    return monitor if store is None else SymptomReports(monitor, store, topology)


def _parts(whole: object, name: str) -> list[object]:
    """Return an object and all that it is made of: `name` is where it holds its parts."""
    return [whole, *(inner for part in getattr(whole, name, ()) for inner in _parts(part, name))]
