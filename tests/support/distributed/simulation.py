"""The commit of one snapshot by thousands of ranks: a discrete-event model of the real protocol.

Model: a message travels `wire_s` each way; the store is one server that takes messages in order of
arrival, `service_s` each, and as much for each waiting client that a new key lets go (an answer
without a request). That is measured on the real store (`measure`). A rank answers at once. Not in
the model: lost messages, a congested network, ranks that are short of CPU.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightck.distributed.commit.protocol import Add, Call, Claim, CommitProtocol, DueStep, Read
from lightck.distributed.store import KeyValueStore
from lightck.types import Fate

_PREFIX = len("/default_pg/0//lightck/" + 32 * "f" + "/" + 16 * "f" + "/")


@dataclass(frozen=True)
class Costs:
    """Seconds per message."""

    service_s: float
    wire_s: float = 100e-6


@dataclass
class Result:
    """One snapshot."""

    ranks: int
    fate: str
    messages_per_rank: float
    bytes_per_rank: float
    busiest_rank_messages: int
    know_ms: float
    """This is the time from the last rank's commit (or loss) to the last rank's knowing."""
    server_ms: float
    """The store's own work."""


def size(kind: str, key: str, value: bytes = b"") -> int:
    """Bytes of a request and its answer in TCPStore's protocol, without TCP's own."""
    request = 1 + 8 + _PREFIX + len(key) + 8
    answer = {"add": 8, "wait": 9, "claim": 8 + len(value), "read": 8 + len(value)}[kind]
    return request + (2 * (8 + max(1, len(value))) if kind in ("claim", "read") else 8) + answer


@dataclass
class Simulation:
    """Every rank commits step 1 at its time; run until all know its fate."""

    costs: Costs
    commit_at_s: list[float]
    lost_by: int | None = None
    digests: bool = False
    """Ranks compare replicas, and all are the same."""
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _server_free_s: float = 0.0
    _server_busy_s: float = 0.0
    _values: dict[str, bytes] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)
    _bytes: int = 0

    def run(self) -> Result:
        """Return what it took."""
        world = len(self.commit_at_s)
        self._protocols = [
            CommitProtocol(r, world, patience_s=1e9, compares=self.digests) for r in range(world)
        ]
        self._sent = [0] * world
        self._knew: list[float] = []
        for rank, at in enumerate(self.commit_at_s):
            self._protocols[rank].opened(DueStep(1, 0), 0.0)
            self._at(at, lambda now, r=rank: self._committed(r, now))
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        fates = {protocol.fate(1) for protocol in self._protocols}
        assert len(fates) == 1 and Fate.UNKNOWN not in fates
        assert len(self._knew) == world
        return Result(
            ranks=world,
            fate=fates.pop().value,
            messages_per_rank=sum(self._sent) / world,
            bytes_per_rank=self._bytes / world,
            busiest_rank_messages=max(self._sent),
            know_ms=1e3 * (max(self._knew) - max(self.commit_at_s)),
            server_ms=1e3 * self._server_busy_s,
        )

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _committed(self, rank: int, now: float) -> None:
        if rank == self.lost_by:
            self._protocols[rank].lost(DueStep(1, 0), "slip", now)
        else:
            digest = b"0123456789abcdef.1000:01234567" if self.digests else b""
            self._protocols[rank].committed(1, now, digest=digest)
        self._next(rank, now)

    def _next(self, rank: int, now: float) -> None:
        protocol = self._protocols[rank]
        call = protocol.next_call(now)
        if call is not None:
            self._send(rank, now, lambda at: self._serve(rank, call, at))
        elif protocol.watched is not None:
            self._bytes += size("wait", "f/1")
            self._send(rank, now, lambda at: self._wait(rank, at))
        elif protocol.fate(1) is not Fate.UNKNOWN:
            self._knew.append(now)

    def _send(self, rank: int, now: float, serve: Callable[[float], None]) -> None:
        self._sent[rank] += 1
        self._at(now + self.costs.wire_s, lambda at: serve(self._work(at, self.costs.service_s)))

    def _work(self, now: float, seconds: float) -> float:
        self._server_free_s = max(self._server_free_s, now) + seconds
        self._server_busy_s += seconds
        return self._server_free_s

    def _serve(self, rank: int, call: Call, done: float) -> None:
        answer: object
        if isinstance(call, Add):
            answer = int(self._values.get(call.key, b"0")) + call.amount
            self._values[call.key] = str(answer).encode()
            self._bytes += size("add", call.key)
        elif isinstance(call, Read):
            answer = self._values.get(call.key)
            self._bytes += size("read", call.key)
        else:
            assert isinstance(call, Claim)
            answer = self._values.setdefault(call.key, call.value)
            self._bytes += size("claim", call.key, call.value)
            waiting: list[int] = []
            if call.key == "f/1":
                waiting, self._waiting = self._waiting, []
            for other in waiting:
                self._notify(other, self._work(done, self.costs.service_s))

        def answered(now: float) -> None:
            self._protocols[rank].answered(answer, now)
            self._next(rank, now)

        self._at(done + self.costs.wire_s, answered)

    def _wait(self, rank: int, done: float) -> None:
        if "f/1" in self._values:
            self._notify(rank, done)
        else:
            self._waiting.append(rank)

    def _notify(self, rank: int, sent: float) -> None:
        self._at(sent + self.costs.wire_s, lambda now: self._read(rank, now))

    def _read(self, rank: int, now: float) -> None:
        def heard(at: float) -> None:
            value = self._values["f/1"]
            self._bytes += size("read", "f/1", value)
            self._protocols[rank].outcome_read(1, value)
            self._next(rank, at)

        self._send(rank, now, lambda done: self._at(done + self.costs.wire_s, heard))


def measure(connect: Callable[[], KeyValueStore], *, clients: int = 4, calls: int = 2000) -> Costs:
    """Service time of the real store under the load of several clients."""
    ready = threading.Barrier(clients + 1)
    connect().set("there", b"whole")

    def load(index: int) -> None:
        store = connect()
        ready.wait()
        for _ in range(calls // 2):
            store.add("n")
            store.read("there")
        ready.wait()

    threads = [threading.Thread(target=load, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    ready.wait()
    service = (time.perf_counter() - began) / (calls * clients)
    for thread in threads:
        thread.join()
    return Costs(service)
