"""Generations of a job's ranks, over the job's store: who was lost, who stands where, who is ready.

A generation is one membership of processes. The agent of a node claims the next one when a worker's
process has ended: a fact, no suspicion. A rank claims one when a collective has failed and nobody
has ended. What ranks say of a recovery is below the generation's own prefix, so that nothing of an
earlier one is taken for it.

    gen/<g>                  claimed: who was lost, the life of each rank, why
    setup                    claimed once all have attached: what a replacement needs for its set-up
    member/<rank>/<life>     a replacement that has state and connections
    roster/<g>               claimed by the first that looks: the ranks that survive into it
    count|stand|saved|ready/<g>/<rank>
    waits/<g>/<rank>         hangs in a collective, and waits for another rank
    restart                  claimed with the reason why all have to be restarted
    end/<rank>/<life>, ends  asks the rank's agent to end its process: it stands, all others wait
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightck.distributed.store import JobStore

PREFIX = "lightck/run"
LIFE = "LIGHTCK_LIFE"
"""Environment variable of a replacement: the generation that it was started for."""
RUN = "LIGHTCK_RUN"
"""Environment variable that `lightck run` gives its workers: which start of all ranks this is."""
SETUP, RESTART = "setup", "restart"
STORE_S = 30.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One membership of processes.

    Attributes:
        number: its number; 0 is the start of the job.
        lost: the ranks whose processes have ended since the one before.
        lives: the life of each rank that was ever replaced: the generation it was started for.
        why: the reason, in words.
    """

    number: int = 0
    lost: tuple[int, ...] = ()
    lives: Mapping[int, int] = field(default_factory=dict)
    why: str = ""

    def life(self, rank: int) -> int:
        """Return the life of a rank; 0 for the process that the job began with."""
        return self.lives.get(rank, 0)

    def encode(self) -> bytes:
        """Return it as the value of its key."""
        lives = [*self.lives.items()]
        return json.dumps({"lost": [*self.lost], "lives": lives, "why": self.why}).encode()

    @staticmethod
    def decode(number: int, value: bytes) -> Generation:
        """Return what `encode` has made."""
        told = json.loads(value)
        return Generation(number, tuple(told["lost"]), dict(told["lives"]), told["why"])


def connect(host: str, port: int, attempt: str) -> JobStore:
    """Connect to the store that torchrun's agent serves, below lightck's own prefix.

    Args:
        host: where it is.
        port: its port.
        attempt: which start of all ranks this is; each has keys of its own.

    Raises:
        StoreError: no connection.
    """
    timeout = timedelta(seconds=STORE_S)
    store: Any = dist
    origin = store.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return JobStore(origin, f"{PREFIX}/{attempt}", timeout_s=STORE_S)


def connect_worker(environment: Mapping[str, str] = os.environ) -> JobStore:
    """Connect as `connect` does, by the environment that torchrun gives a worker."""
    port = int(environment["MASTER_PORT"])
    return connect(environment["MASTER_ADDR"], port, environment[RUN])


class Generations:
    """The generations of one job. One thread at a time."""

    def __init__(self, store: JobStore) -> None:
        """Use a store of its own below `PREFIX`."""
        self.store = store
        self.newest = Generation()

    def read(self, number: int) -> Generation | None:
        """Return a generation, or None if it has not begun."""
        value = self.store.read(f"gen/{number}")
        return None if value is None else Generation.decode(number, value)

    def update(self) -> Generation:
        """Return the newest generation."""
        while (found := self.read(self.newest.number + 1)) is not None:
            self.newest = found
        return self.newest

    def claim(self, lost: tuple[int, ...], why: str) -> Generation:
        """Begin the next generation, whatever others begin meanwhile."""
        text = why.encode("ascii", "replace").decode()[:500]
        while True:
            before = self.update()
            number = before.number + 1
            lives = {**before.lives, **dict.fromkeys(lost, number)}
            wanted = Generation(number, lost, lives, text).encode()
            if self.store.claim(f"gen/{number}", wanted) == wanted:
                return self.update()

    def claim_if(self, newest: int, why: str) -> None:
        """Begin the generation behind `newest` without a loss, unless it has begun."""
        before = self.update()
        if before.number == newest:
            wanted = Generation(newest + 1, (), before.lives, why[:500]).encode()
            self.store.claim(f"gen/{newest + 1}", wanted)

    def say(self, what: str, generation: int, rank: int, value: Any) -> None:
        """Say something of a recovery."""
        self.store.set(f"{what}/{generation}/{rank}", json.dumps(value).encode())

    def said(self, what: str, generation: int, rank: int) -> Any:
        """Return what a rank has said, or None."""
        value = self.store.read(f"{what}/{generation}/{rank}")
        return None if value is None else json.loads(value)

    def refuse(self, why: str) -> str:
        """Say that all ranks have to be restarted; return the reason in force."""
        return self.store.claim(RESTART, why.encode("ascii", "replace")[:2000]).decode()

    def refusal(self) -> str:
        """Return why all ranks have to be restarted; empty if they have not."""
        value = self.store.read(RESTART)
        return "" if value is None else value.decode()

    def wait_for_others(self, rank: int, world: int) -> tuple[Generation, list[int]]:
        """Say that a rank hangs in a collective; return the ranks that have not said so.

        In the next generation, if one begins, all say it anew.
        """
        now = self.update()
        self.say("waits", now.number, rank, True)
        silent = [each for each in range(world) if self.said("waits", now.number, each) is None]
        return now, silent

    def ask_end(self, rank: int, life: int) -> None:
        """Ask the agent of a rank to end its process, of this life, which stands."""
        self.store.set(f"end/{rank}/{life}", b"1")
        self.store.add("ends")

    def ends_asked(self) -> int:
        """Return how often an end was asked for."""
        value = self.store.read("ends")
        return int(value) if value else 0

    def is_end_asked(self, rank: int) -> bool:
        """Tell whether the process that a rank has now is to be ended."""
        return self.store.read(f"end/{rank}/{self.update().life(rank)}") is not None

    def join(self, rank: int, life: int) -> None:
        """Say that a replacement has state and connections: from now on it survives."""
        self.store.set(f"member/{rank}/{life}", b"1")

    def roster(self, generation: Generation, world: int) -> list[int]:
        """Return the ranks that survive into a generation; the same on every rank that asks."""
        found = [
            rank
            for rank in range(world)
            if rank not in generation.lost and self.is_member(rank, generation.life(rank))
        ]
        key, text = f"roster/{generation.number}", json.dumps(found).encode()
        agreed: list[int] = json.loads(self.store.claim(key, text))
        return agreed

    def is_member(self, rank: int, life: int) -> bool:
        """Tell whether this life of a rank has state and connections."""
        return life == 0 or self.store.read(f"member/{rank}/{life}") is not None
