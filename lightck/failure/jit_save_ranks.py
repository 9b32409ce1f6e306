"""The just-in-time save of one rank among several.

The other ranks are told of it, and the dead ranks of the node are completed. A failure on another
rank is a reason to save here, too: all ranks then have the same step, or are one apart, and
contents decide at restore.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lightck.distributed.store import Store
from lightck.distributed.topology import Topology
from lightck.errors import LightckError
from lightck.failure.hang import Place
from lightck.failure.jit_save import JitSaver
from lightck.failure.peer_monitor import FailureNotice, Peers, PeerStatus
from lightck.failure.takeover.coordinator import TakeoverCoordinator
from lightck.loop.checkpointer import Checkpointer
from lightck.types import Saved

TELL_S = 1.0
"""Seconds that a save waits until it has been announced: the process may end right after it."""


@dataclass(eq=False, kw_only=True)
class RankJitSaver(JitSaver):
    """The `JitSaver` of a rank among several. Any thread."""

    inheritance: TakeoverCoordinator
    peers: Peers
    _answered: int = 0
    """Number of other ranks' words that `elsewhere` has returned."""
    _mourned: set[int] = field(default_factory=set)
    """Ranks that have ended and that `elsewhere` has returned."""
    _finished: set[int] = field(default_factory=set)
    """Ended ranks for which `TakeoverCoordinator.settle` has been called since."""
    _given: set[str] = field(default_factory=set)
    """Reasons that came from other ranks, which know them."""
    _told: tuple[str, int | None, bool] | None = None
    _stood: int = 0
    """The last complete step when `_told` was announced."""

    @classmethod
    def among(
        cls, checkpointer: Checkpointer, topology: Topology, store: Store, *, process_durable: bool
    ) -> RankJitSaver:
        """Create it for a handle of several ranks; listening begins.

        Args:
            checkpointer: of the handle.
            topology: this rank's place.
            store: a connection of its own, below a prefix of this attach.
            process_durable: as in the config.
        """
        inheritance = TakeoverCoordinator.of(
            checkpointer, topology, JitSaver(checkpointer), process_durable=process_durable
        )
        peers = Peers(store, topology, checkpointer.pipeline.region.place)
        return cls(checkpointer, inheritance=inheritance, peers=peers)

    def save(self, reason: str, deadline: float, *, early: bool = False) -> Saved:
        """Save like `JitSaver.save`; then tell other ranks, and complete this node's dead ranks.

        If another rank has an early snapshot of the step, this rank saves the early instant, too:
        states of two instants are no one state of the job.
        """
        began = time.monotonic()
        saved = super().save(reason, deadline, early=early)
        if saved.fresh and not saved.early and self._is_early_elsewhere(saved.step):
            saved = super().save(reason, deadline, early=True)
        self._leave_standing(deadline)
        self._tell(saved, deadline)
        if saved.fresh:
            heard = self.peers.look()
            self.inheritance.settle(deadline)
            self._finished.update(heard.dead, heard.closed)
            saved = self._as_it_is(saved)
            self._tell(saved, deadline)
        return replace(saved, seconds=time.monotonic() - began)

    def elsewhere(self) -> str | None:
        """Return a new failure on another rank, as a reason to save; None if there is none.

        Returns at once. For one thread.
        """
        heard = self.peers.look()
        words, self._answered = heard.words[self._answered :], len(heard.words)
        dead = [rank for rank in heard.dead if rank not in self._mourned]
        left = sorted(self._behind(heard).intersection(heard.closed) - self._mourned)
        self._mourned.update(dead, left)
        reasons = [f"rank {rank}: killed" for rank in dead]
        reasons += [f"rank {rank}: has left without the step that is saved here" for rank in left]
        reasons += [f"rank {word.rank}: {word.reason}" for word in words if not word.heard]
        if not reasons and any(self._goes_before(word) for word in words):
            reasons = ["another rank's snapshot is of the instant before"]
        self._given.update(reasons[:1])
        return reasons[0] if reasons else None

    def waits(self) -> Place | None:
        """Return where a device is that has not come to a queued update; None if there is none.

        If it stays there for long, that counts as a hang in a collective. Any thread; takes no
        lock.
        """
        behind = self.checkpointer.device_lag
        with suppress(LightckError):
            before = behind.there() if behind is not None else None
            if before is not None:
                where = f"a device, before the update to step {before.step + 1}"
                return Place(where, (before.step, id(before)))
        return None

    def is_settled(self) -> bool:
        """Tell whether every other rank has ended, or announced what it has of the last step.

        Until then one may still have to save the early instant, and this rank with it. A rank of
        this node that fails without the step that is saved here is completed once it has ended.
        """
        heard, topology = self.peers.look(), self.peers.topology
        step = self.last_step
        # A rank with nothing to save announced that for its step and the next: it may live on.
        said = {w.rank for w in heard.words if (w.stood + 1 if w.step is None else w.step) >= step}
        others = {*range(topology.world)} - {topology.rank}
        settled = others <= said.union(heard.dead, heard.closed)
        return settled and self._wards(heard) <= self._finished

    def is_stuck(self) -> bool:
        """Tell whether this rank's update is not to be waited for, as peers can complete it.

        That is so if it has peers on its node and hangs outside of any collective, or has not moved
        for as long as a hang takes at least while a peer is ahead.
        """
        hang, peers = self.hang, {*self.peers.topology.peers} - {self.peers.topology.rank}
        if hang is None or not peers:
            return False
        progress = self.progress()
        if hang.is_stuck(progress):
            return True
        steps = [word.step or 0 for word in self.peers.look().words if word.rank in peers]
        return max(steps, default=0) > progress.step and hang.has_stood(progress)

    def _leave_standing(self, deadline: float) -> None:
        """Settle the journal's pre-fence entry before this rank ends, as `left_off` does."""
        hang = self.hang
        if hang is None or threading.get_ident() == self.checkpointer.thread:
            return
        # The save has reported already what it could not have; this is only for the others' step.
        with suppress(LightckError), self._locked(deadline):
            if hang.has_stood(self.progress()):
                self.checkpointer.thread_stuck()

    def _wards(self, heard: PeerStatus) -> set[int]:
        """Return the ranks of this node whose share this one completes when they have ended."""
        mine = self._told[1] if self._told is not None else None
        return set() if mine is None else self._behind(heard).union(heard.dead)

    def _behind(self, heard: PeerStatus) -> set[int]:
        """Return this node's ranks that have failed without the step that this one has saved."""
        mine = self._told[1] if self._told is not None else None
        last = {word.rank: word.step for word in heard.words}
        if mine is None:
            return set()
        peers = self.peers.topology.peers
        return {rank for rank in peers if rank in last and (last[rank] or 0) < mine}

    def stop(self) -> None:
        """Stop listening to the other ranks."""
        self.peers.stop()

    def _goes_before(self, word: FailureNotice) -> bool:
        step = self.last_step
        done = self._told is not None and self._told[1:] == (step, True)
        return word.early and word.step == step and not done

    def _as_it_is(self, saved: Saved) -> Saved:
        """Set `early` if this rank has saved the early instant for a dead peer.

        Other nodes must save it, too.
        """
        newest = self._newest()
        early = newest is not None and newest.step == saved.step and newest.early
        return replace(saved, early=saved.early or early)

    def _is_early_elsewhere(self, step: int | None) -> bool:
        return any(word.early and word.step == step for word in self.peers.look().words)

    def _tell(self, saved: Saved, deadline: float) -> None:
        step, stood = saved.step if saved.fresh else None, self.last_step
        known = self._told is not None and self._told[1:] == (step, saved.early)
        if known and (step is not None or self._stood == stood):
            return
        self._told, self._stood = (saved.reason, step, saved.early), stood
        self.peers.announce(
            saved.reason,
            step,
            early=saved.early,
            heard=saved.reason in self._given,
            stood=stood,
            seconds=max(0.0, min(TELL_S, deadline - time.monotonic())),
        )
