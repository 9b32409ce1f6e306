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

from lightck.distributed.sharding import ReplicatedTensors
from lightck.distributed.topology import Topology
from lightck.errors import LightckError
from lightck.events import event
from lightck.failure.jit_save import JitSaver
from lightck.failure.takeover.inference import RankLocalState
from lightck.failure.takeover.takeover import Takeover, TakeoverContext, TakeoverResult
from lightck.journal.device_lag import PreUpdateState
from lightck.journal.entry import decode_entry
from lightck.loop.checkpointer import Checkpointer
from lightck.region import location, stats_page
from lightck.region.location import Location
from lightck.region.native_region import JournalEntry
from lightck.region.region import Region

TURN_S = 1.0
"""The turn of each lower living rank, in seconds, before the next rank tries.

It is also how long this rank waits for a rank that is writing, before it goes on without.
"""
_POLL_S = 0.01


@dataclass(eq=False)
class TakeoverCoordinator:
    """The completion of dead ranks' shares, for one handle.

    Runs on a background thread, or on the training thread when it has failed.
    """

    takeover: Takeover
    saver: JitSaver
    """Saves the early instant of this rank alone."""
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def create(
        cls, checkpointer: Checkpointer, topology: Topology, *, process_durable: bool
    ) -> TakeoverCoordinator:
        """Create it for the handle of a checkpointer."""
        inventory = checkpointer.inventory
        context = TakeoverContext(
            region=checkpointer.pipeline.region,
            inventory=inventory,
            topology=topology,
            replicated=ReplicatedTensors(inventory.model, inventory.optimizers, topology.world),
            lock=checkpointer.lock,
            live=CheckpointerState(checkpointer),
            process_durable=process_durable,
        )
        return cls(Takeover(context, _decode), JitSaver(checkpointer))

    def complete_dead_ranks(self, deadline: float) -> list[TakeoverResult]:
        """Complete the snapshots that this node's dead ranks lack; does nothing if they lack none.

        Nor does it anything if this rank has no snapshot in this timeline: it goes on from one that
        all restored.

        An expected failure is not raised: `TakeoverResult.why` states it.

        Args:
            deadline: `time.monotonic()` at which it gives up.
        """
        if not self.takeover.context.records():
            return []
        found: dict[int, TakeoverResult] = {}
        until = min(deadline, self.clock() + TURN_S * len(self.takeover.context.topology.peers))
        while True:
            dead, living, in_progress = self._peer_roles()
            wanting = [rank for rank in dead if rank not in found]
            if wanting:
                early = self._agree_on_instant(dead, living, deadline)
                found |= {
                    rank: self._complete_one(rank, living, deadline, early) for rank in wanting
                }
            if all(map(self._is_whole, in_progress)) or self.clock() >= until:
                break
            time.sleep(_POLL_S)  # in case the rank that completes it dies, too
        claimed = [found[rank] for rank in sorted(found)]
        for each in claimed:
            if each.wrote or each.why:
                name = "taken_over" if each.wrote else "not_taken_over"
                event(name, rank=each.rank, step=each.step, early=each.early, why=each.why)
        return claimed

    def _is_whole(self, rank: int) -> bool:
        """Tell whether a rank's region holds a snapshot that goes with this rank's own.

        Nobody has to do anything for it then. This is so, too, for a rank that has saved itself and
        is about to end: its memory is released before its lock.
        """
        records = self.takeover.context.records()
        return any(self.takeover.is_done(rank, record.early) for record in records)

    def _peer_roles(self) -> tuple[list[int], list[int], list[int]]:
        """Return the other ranks of this node: the dead, the living, and those being completed.

        The region of a rank being completed is owned by another process, a survivor. The statistics
        page of a rank's region tells of its process, and is only trusted as far as waiting for a
        moment does no harm.
        """
        context = self.takeover.context
        dead: list[int] = []
        living: list[int] = []
        in_progress: list[int] = []
        for rank in context.topology.peers:
            where = location.locate(context.region.place.path, rank, create=False)
            if rank == context.topology.rank or not (where.is_plain and where.exists):
                continue
            try:
                if not location.is_owned(where):
                    dead.append(rank)
                else:
                    (living if _owns_itself(where) else in_progress).append(rank)
            except LightckError:  # it existed just now
                continue
        return dead, living, in_progress

    def _agree_on_instant(self, dead: list[int], living: list[int], deadline: float) -> bool | None:
        """Return the instant that all ranks can have; if it is early, save it here first."""
        early = self.takeover.required_instant(dead, living)
        if early and not any(record.early for record in self.takeover.context.records()):
            self.saver.save("the early instant, for a dead peer", deadline, early=True)
        return early

    def _complete_one(
        self, rank: int, living: list[int], deadline: float, early: bool | None
    ) -> TakeoverResult:
        if early is None:
            return TakeoverResult(
                rank, why="no instant of the step is there that all ranks can have"
            )
        own = self.takeover.context.topology.rank
        turn = self.clock() + TURN_S * sum(other < own for other in living)
        while self.clock() < min(turn, deadline) and not self.takeover.is_done(rank, early):
            time.sleep(_POLL_S)
        claimed = self.takeover.complete(rank, deadline, early)
        turn = self.clock() + TURN_S * (1 + len(living))
        while claimed.busy and self.clock() < min(turn, deadline):  # another survivor is at it
            time.sleep(_POLL_S)
            claimed = self.takeover.complete(rank, deadline, early)
        return claimed


@dataclass(frozen=True, slots=True)
class CheckpointerState:
    """The `LiveState` of a checkpointer while the failure path is armed."""

    checkpointer: Checkpointer

    @property
    def pre_update(self) -> PreUpdateState | None:
        """The state before the update that hanging devices have, if it has been saved."""
        lag = self.checkpointer.device_lag
        return lag.claimed if lag is not None else None

    @property
    def step(self) -> int | None:
        """The step whose state devices have if they hang, else that of the live tensors."""
        if (pre_update := self.pre_update) is not None:
            return pre_update.step
        return None if self.checkpointer.mixed else self.checkpointer.steps.step

    def require_instant(self, early: bool) -> object:
        """Raise a `TornSnapshotError` if the live state is not of that instant."""
        journal = self.checkpointer.step_journal
        return journal and journal.as_of_boundary(early=early)

    def journal_entry(self, kind: int) -> JournalEntry | None:
        """Return what the journal has kept of the last update."""
        journal = self.checkpointer.step_journal
        return journal.entry(kind) if journal is not None else None


def _owns_itself(where: Location) -> bool:
    """Tell whether the process that wrote the region's page lives, or nothing is known of it."""
    region = Region.open(where, writable=False)
    try:
        said = stats_page.read(region.native)
    finally:
        region.close()
    return said.process is None or bool(said.numbers["ended"]) or said.process.is_running


def _decode(entry: JournalEntry) -> RankLocalState:
    found = decode_entry(entry, context="the dead rank's journal")
    return RankLocalState(found.at_step, found.at_forward, found.lives)
