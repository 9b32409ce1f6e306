"""Completion of the shares of a node's dead ranks, by the living ranks in rank order.

It follows this rank's own save:

    saved = saver.save(reason, deadline)
    taken = coordinator.settle(deadline)

The lowest living rank begins; the others wait until it is done, or has had its time, and then find
the snapshot there or write it themselves. No rank has to know which one is writing: the lock of the
dead rank's region admits one at a time, and a snapshot that is there is not written again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lightck.distributed.sharding import ReplicatedTensors
from lightck.distributed.topology import Topology
from lightck.errors import LightckError
from lightck.events import event
from lightck.failure.takeover.inference import RankLocalState
from lightck.failure.takeover.takeover import Takeover, TakeoverContext, TakeoverResult
from lightck.journal.device_lag import PreUpdateState
from lightck.journal.entry import unpacked
from lightck.loop.checkpointer import Checkpointer
from lightck.region import location, stats_page
from lightck.region.location import Location
from lightck.region.native_region import JournalEntry
from lightck.region.region import Region
from lightck.types import Saved

TURN_S = 1.0
"""The turn of each lower living rank, in seconds, before the next rank tries.

It is also how long this rank waits for a rank that is writing, before it goes on without.
"""
_POLL_S = 0.01


class Saves(Protocol):
    """This rank's own save, see `JitSaver`."""

    def save(self, reason: str, deadline: float, *, early: bool = False) -> Saved:
        """Commit the last complete step, exact or early."""


@dataclass(eq=False)
class TakeoverCoordinator:
    """The completion of dead ranks' shares, for one handle.

    Runs on a background thread, or on the training thread when it has failed.
    """

    takeover: Takeover
    rescue: Saves
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(
        cls, checkpointer: Checkpointer, topology: Topology, rescue: Saves, *, process_durable: bool
    ) -> TakeoverCoordinator:
        """Create it for the handle of a checkpointer."""
        inventory = checkpointer.inventory
        survivor = TakeoverContext(
            region=checkpointer.pipeline.region,
            inventory=inventory,
            topology=topology,
            replicated=ReplicatedTensors(inventory.model, inventory.optimizers, topology.world),
            lock=checkpointer.lock,
            stands=partial(_stands, checkpointer),
            process_durable=process_durable,
            kept=lambda kind: (
                checkpointer.step_journal.entry(kind) if checkpointer.step_journal else None
            ),
            must_stand=lambda early: (
                checkpointer.step_journal and checkpointer.step_journal.late(early=early)
            ),
            before=partial(_behind, checkpointer),
        )
        return cls(Takeover(survivor, _own, threads=1), rescue)

    def settle(self, deadline: float) -> list[TakeoverResult]:
        """Complete the snapshots that this node's dead ranks lack; does nothing if they lack none.

        Nor does it anything if this rank has no snapshot in this timeline: it goes on from one that
        all restored.

        An expected failure is not raised: `TakeoverResult.why` states it.

        Args:
            deadline: `time.monotonic()` at which it gives up.
        """
        if not self.takeover.survivor.records():
            return []
        found: dict[int, TakeoverResult] = {}
        until = min(deadline, self.clock() + TURN_S * len(self.takeover.survivor.topology.peers))
        while True:
            dead, living, ward = self._roll()
            wanting = [rank for rank in dead if rank not in found]
            if wanting:
                early = self._agreed(dead, living, deadline)
                found |= {rank: self._one(rank, living, deadline, early) for rank in wanting}
            if all(map(self._is_whole, ward)) or self.clock() >= until:
                break
            time.sleep(_POLL_S)  # in case the rank that completes it dies, too
        taken = [found[rank] for rank in sorted(found)]
        for each in taken:
            if each.wrote or each.why:
                name = "taken_over" if each.wrote else "not_taken_over"
                event(name, rank=each.rank, step=each.step, early=each.early, why=each.why)
        return taken

    def _is_whole(self, rank: int) -> bool:
        """Tell whether a rank's region holds a snapshot that goes with this rank's own.

        Nobody has to do anything for it then. This is so, too, for a rank that has saved itself and
        is about to end: its memory is released before its lock.
        """
        records = self.takeover.survivor.records()
        return any(self.takeover.is_done(rank, record.early) for record in records)

    def _roll(self) -> tuple[list[int], list[int], list[int]]:
        """Return the other ranks of this node: the dead, the living, and those being completed.

        The region of a rank being completed is owned by another process, a survivor. The statistics
        page of a rank's region tells of its process, and is only trusted as far as waiting for a
        moment does no harm.
        """
        survivor = self.takeover.survivor
        dead: list[int] = []
        living: list[int] = []
        ward: list[int] = []
        for rank in survivor.topology.peers:
            where = location.locate(survivor.region.place.path, rank, create=False)
            if rank == survivor.topology.rank or not (where.is_plain and where.exists):
                continue
            try:
                if not location.is_owned(where):
                    dead.append(rank)
                else:
                    (living if _owns_itself(where) else ward).append(rank)
            except LightckError:  # it existed just now
                continue
        return dead, living, ward

    def _agreed(self, dead: list[int], living: list[int], deadline: float) -> bool | None:
        """Return the instant that all ranks can have; if it is early, save it here first."""
        early = self.takeover.wants(dead, living)
        if early and not any(record.early for record in self.takeover.survivor.records()):
            self.rescue.save("the early instant, for a dead peer", deadline, early=True)
        return early

    def _one(
        self, rank: int, living: list[int], deadline: float, early: bool | None
    ) -> TakeoverResult:
        if early is None:
            return TakeoverResult(
                rank, why="no instant of the step is there that all ranks can have"
            )
        own = self.takeover.survivor.topology.rank
        turn = self.clock() + TURN_S * sum(other < own for other in living)
        while self.clock() < min(turn, deadline) and not self.takeover.is_done(rank, early):
            time.sleep(_POLL_S)
        taken = self.takeover.of(rank, deadline, early)
        turn = self.clock() + TURN_S * (1 + len(living))
        while taken.busy and self.clock() < min(turn, deadline):  # another survivor is at it
            time.sleep(_POLL_S)
            taken = self.takeover.of(rank, deadline, early)
        return taken


def _behind(checkpointer: Checkpointer) -> PreUpdateState | None:
    """Return the state before the update that hanging devices have, if it has been saved."""
    return checkpointer.device_lag.taken if checkpointer.device_lag is not None else None


def _stands(checkpointer: Checkpointer) -> int | None:
    before = _behind(checkpointer)
    if before is not None:
        return before.step
    return None if checkpointer.mixed else checkpointer.steps.step


def _owns_itself(where: Location) -> bool:
    """Tell whether the process that wrote the region's page lives, or nothing is known of it."""
    region = Region.open(where, writable=False)
    try:
        said = stats_page.read(region.native)
    finally:
        region.close()
    return said.process is None or bool(said.numbers["ended"]) or said.process.is_running


def _own(entry: JournalEntry) -> RankLocalState:
    found = unpacked(entry, context="the dead rank's journal")
    return RankLocalState(found.at_step, found.at_forward, found.lives)
