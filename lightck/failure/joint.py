"""One rank's save among several: it is told to the others, and the dead of the node are completed.

What this rank hears of others' failures is a reason to save here, too: all ranks then have the same
step, or are one apart, and contents decide at restore.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lightck.capture.asked import left_standing
from lightck.capture.recorder import Recorder
from lightck.distributed.store import Store
from lightck.distributed.topology import Topology
from lightck.errors import LightckError
from lightck.failure.hang import Place
from lightck.failure.inheritance import Inheritance
from lightck.failure.peers import Heard, Peers, Word
from lightck.failure.rescue import Rescue
from lightck.types import Saved

TELL_S = 1.0
"""How long a save waits until it is told: the process may end right after it."""


@dataclass(eq=False, kw_only=True)
class JointRescue(Rescue):
    """The `Rescue` of a rank among several. Any thread."""

    inheritance: Inheritance
    peers: Peers
    _answered: int = 0
    """Of the words heard, how many `elsewhere` has given."""
    _mourned: set[int] = field(default_factory=set)
    """Ranks that have ended and that `elsewhere` has given."""
    _finished: set[int] = field(default_factory=set)
    """Those whose share was looked after since."""
    _given: set[str] = field(default_factory=set)
    """Reasons that came from others: these know them."""
    _told: tuple[str, int | None, bool] | None = None
    _stood: int = 0
    """The last complete step when that was told."""

    @classmethod
    def among(
        cls, recorder: Recorder, topology: Topology, store: Store, *, process_durable: bool
    ) -> JointRescue:
        """For a handle of several ranks; begins to listen.

        Args:
            recorder: of the handle.
            topology: this rank's place.
            store: a connection of its own, below a prefix of this attach.
            process_durable: as in the config.
        """
        inheritance = Inheritance.of(
            recorder, topology, Rescue(recorder), process_durable=process_durable
        )
        peers = Peers(store, topology, recorder.pipeline.region.place)
        return cls(recorder, inheritance=inheritance, peers=peers)

    def save(self, reason: str, deadline: float, *, early: bool = False) -> Saved:
        """As `Rescue.save`; then the others are told, and the dead of this node are completed.

        An early snapshot of another rank's takes this one to the early instant, too: states of two
        instants are no one state of the job.
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
        """What has failed on another rank since the last call, as a reason to save; None: nothing.

        At once; for one thread.
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
        """Where a device stands: before an update that is queued. In a collective, if for long.

        Any thread; takes no lock.
        """
        behind = self.recorder.behind
        with suppress(LightckError):
            before = behind.there() if behind is not None else None
            if before is not None:
                where = f"a device, before the update to step {before.step + 1}"
                return Place(where, (before.step, id(before)))
        return None

    def is_settled(self) -> bool:
        """Every other rank has ended, or has said what it has of the last complete step.

        Until then one may still have to go back to the instant before, and this rank with it. One
        of this node that fails without the step that is saved here is finished once it has left.
        """
        heard, topology = self.peers.look(), self.peers.topology
        step = self.last_step
        # One that had nothing to save has said so for its step and the next: it may live on.
        said = {w.rank for w in heard.words if (w.stood + 1 if w.step is None else w.step) >= step}
        others = {*range(topology.world)} - {topology.rank}
        settled = others <= said.union(heard.dead, heard.closed)
        return settled and self._wards(heard) <= self._finished

    def is_stuck(self) -> bool:
        """It hangs outside of any collective; or it stands, and who can go on for it is ahead."""
        hang, peers = self.hang, {*self.peers.topology.peers} - {self.peers.topology.rank}
        if hang is None or not peers:
            return False
        progress = self.progress()
        if hang.is_stuck(progress):
            return True
        steps = [word.step or 0 for word in self.peers.look().words if word.rank in peers]
        return max(steps, default=0) > progress.step and hang.has_stood(progress)

    def _leave_standing(self, deadline: float) -> None:
        """As an exception does that leaves an iteration, see `left_off`: before this rank ends."""
        hang = self.hang
        if hang is None or threading.get_ident() == self.recorder.thread:
            return
        # What the save could not have it has told already; this is for the others' step alone.
        with suppress(LightckError), self._locked(deadline):
            if hang.has_stood(self.progress()):
                left_standing(self.recorder)

    def _wards(self, heard: Heard) -> set[int]:
        """Ranks of this node whose share this one looks after when they have ended."""
        mine = self._told[1] if self._told is not None else None
        return set() if mine is None else self._behind(heard).union(heard.dead)

    def _behind(self, heard: Heard) -> set[int]:
        """Ranks of this node that have failed without the step that this one has saved."""
        mine = self._told[1] if self._told is not None else None
        last = {word.rank: word.step for word in heard.words}
        if mine is None:
            return set()
        peers = self.peers.topology.peers
        return {rank for rank in peers if rank in last and (last[rank] or 0) < mine}

    def stop(self) -> None:
        """Listen no more."""
        self.peers.stop()

    def _goes_before(self, word: Word) -> bool:
        step = self.last_step
        done = self._told is not None and self._told[1:] == (step, True)
        return word.early and word.step == step and not done

    def _as_it_is(self, saved: Saved) -> Saved:
        """A dead peer may have taken this rank to the early instant: the other nodes', too."""
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
