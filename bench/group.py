"""Join the ranks of a measured job, with one clock for all of them.

All run on one machine, in network namespaces of their own or not: `perf_counter` is the kernel's
monotonic clock, the same in every process, so that moments of different ranks can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.errors import BenchError

_TIMEOUT = timedelta(minutes=5)  # of a collective: if a rank is gone, the others' next one fails


@dataclass(frozen=True)
class Place:
    """The address of one rank.

    Attributes:
        rank: its number.
        world: number of ranks.
        meeting: file in which rank 0 writes where its store listens.
        interface: network device for gloo.
        address: this rank's own.
    """

    rank: int = 0
    world: int = 1
    meeting: str = ""
    interface: str = "lo"
    address: str = "127.0.0.1"

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for the job file."""
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """The ranks while they are joined; with one rank everything here is trivial."""

    rank: int = 0
    world: int = 1

    def latest(self, moments: Sequence[float]) -> list[float]:
        """Return, for each moment (as many on every rank), that of the last rank.

        This is a barrier, too.
        """
        if self.world == 1:
            return list(moments)
        found = torch.tensor(moments, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def together(self) -> None:
        """Return when every rank is here."""
        self.latest([0.0])

    def worst(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return for each name the largest value of any rank that has it."""
        said: list[Any] = [dict(values)]
        if self.world > 1:
            said = [None] * self.world
            dist.all_gather_object(said, dict(values))
        names = sorted({name for each in said for name in each})
        return {name: max(each[name] for each in said if name in each) for name in names}


@contextmanager
def joined(place: Place) -> Iterator[Group]:
    """Join the other ranks while the context lasts; torch.distributed is then initialized.

    Raises:
        BenchError: rank 0 does not come.
    """
    if place.world == 1:
        yield Group()
        return
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    dist.init_process_group(
        "gloo", store=_met(place), rank=place.rank, world_size=place.world, timeout=_TIMEOUT
    )
    group = Group(place.rank, place.world)
    try:
        yield group
        group.together()  # rank 0 serves the store: it leaves last
    finally:
        dist.destroy_process_group()


def _met(place: Place) -> Any:
    """Return the job's store: rank 0 serves it, and writes its address into the file `meeting`."""
    tcp = dist.TCPStore  # type: ignore[attr-defined]
    meeting = Path(place.meeting)
    if place.rank == 0:
        store = tcp(place.address, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        part = meeting.with_suffix(".part")
        part.write_text(f"{place.address} {store.port}")
        part.replace(meeting)
        return store
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise BenchError(f"rank {place.rank}: rank 0 did not come within {_TIMEOUT}")
        time.sleep(0.01)
    host, port = meeting.read_text().split()
    return tcp(host, int(port), is_master=False, timeout=_TIMEOUT)
