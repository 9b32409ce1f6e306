"""The just-in-time save of one rank among several.

The other ranks are told of it, and where a peer's share is missing one rank saves the step whole.
A failure on another rank is a reason to save here, too: all ranks then have the same step, or are
one apart, and contents decide at restore.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lightck.distributed.store import KeyValueStore
from lightck.distributed.topology import Topology
from lightck.errors import LightckError
from lightck.failure.hang import CollectivePosition
from lightck.failure.jit_save import JitSaver
from lightck.failure.peer_monitor import FailureNotice, PeerMonitor, PeerStatus
from lightck.failure.whole_save import WholeSaver
from lightck.types import Saved

ANNOUNCE_S = 1.0
"""Seconds that a save waits until it has been announced: the process may end right after it."""


@dataclass(eq=False, kw_only=True)
class RankJitSaver(JitSaver):
    """The `JitSaver` of a rank among several. Any thread."""

    whole_saver: WholeSaver
    monitor: PeerMonitor
    in_place: Callable[[], bool] | None = None
    """Has ranks ended that stand while all others wait for them, where these recover in place."""
    _notices_read: int = 0
    """Number of other ranks' notices that `new_peer_failure` has returned."""
    _ended_ranks: set[int] = field(default_factory=set)
    """Ranks that have ended and that `new_peer_failure` has returned."""
    _completed: set[int] = field(default_factory=set)
    """Ended ranks whose shares have been looked after since, see `WholeSaver`."""
    _peer_reasons: set[str] = field(default_factory=set)
    """Reasons that came from other ranks, which know them."""
    _saved_step: int | None = None
    """Step of the snapshot that was announced last; None: none has been."""
    _saved_early: bool = False
    """True if that snapshot was early."""
    _announced_at: int | None = None
    """The last complete step when this rank announced something last; None: it never has."""

    @classmethod
    def create(
        cls,
        saver: JitSaver,
        topology: Topology,
        store: KeyValueStore,
        *,
        process_durable: bool,
        joins: bool = False,
        in_place: Callable[[], bool] | None = None,
    ) -> RankJitSaver:
        """Turn a handle's saver into one of several ranks; listening begins.

        Args:
            saver: of this rank alone.
            topology: this rank's place.
            store: a connection of its own, below a prefix of this attach.
            process_durable: as in the config.
            joins: this rank replaces a lost one.
            in_place: has standing ranks ended; None: ranks do not recover in place.
        """
        checkpointer = saver.checkpointer
        return cls(
            checkpointer,
            saver.hang,
            saver.write_limit,
            whole_saver=WholeSaver.create(checkpointer, topology, process_durable=process_durable),
            monitor=PeerMonitor(store, topology, checkpointer.pipeline.region.place, joins=joins),
            in_place=in_place,
        )

    def save(self, reason: str, deadline: float, *, early: bool = False) -> Saved:
        """Save like `JitSaver.save`; then tell others, and save all if a peer's share is missing.

        If a rank of another node has an early snapshot of the step, this rank saves the early
        instant, too: states of two instants are no one state of the job.
        """
        return self._save(reason, deadline, early=early)

    def _save(self, reason: str, deadline: float, *, early: bool, joins: bool = False) -> Saved:
        began_s = time.monotonic()
        saved = super().save(reason, deadline, early=early)
        if saved.fresh and not saved.early and self._is_early_elsewhere(saved.step):
            saved = super().save(reason, deadline, early=True)
        self._settle_pre_fence(deadline)
        self._announce(saved, deadline)
        if saved.fresh:
            status = self.monitor.poll()
            early = self.whole_saver.save_if_lacking(deadline, joins=joins)
            self._completed.update(status.dead, status.closed)
            saved = replace(saved, early=saved.early or early)
            self._announce(saved, deadline)
        return replace(saved, seconds=time.monotonic() - began_s)

    def new_peer_failure(self) -> str | None:
        """Return a new failure on another rank, as a reason to save; None: there is none."""
        status = self.monitor.poll()
        notices, self._notices_read = status.notices[self._notices_read :], len(status.notices)
        dead = [rank for rank in status.dead if rank not in self._ended_ranks]
        left = sorted(self._ranks_behind(status).intersection(status.closed) - self._ended_ranks)
        self._ended_ranks.update(dead, left)
        reasons = [f"rank {rank}: killed" for rank in dead]
        reasons += [f"rank {rank}: has left without the step that is saved here" for rank in left]
        reasons += [
            f"rank {notice.rank}: {notice.reason}" for notice in notices if not notice.from_peer
        ]
        if not reasons and any(self._needs_early(notice) for notice in notices):
            reasons = ["another rank's snapshot is of the instant before"]
        self._peer_reasons.update(reasons[:1])
        return reasons[0] if reasons else None

    def save_for_peer(self, reason: str, deadline: float) -> Saved:
        """Save as `save` does, for another rank's failure, of which the others know."""
        self._peer_reasons.add(reason)
        return self._save(reason, deadline, early=False, joins=True)

    def rejoined(self, rank: int) -> None:
        """Note that a rank that had ended has been replaced: a later end of it is a new one."""
        self._ended_ranks.discard(rank)
        self._completed.discard(rank)

    def hung_device(self) -> CollectivePosition | None:
        """Return where a device is that has not come to a queued update; None if there is none.

        If it stays there for long, that counts as a hang in a collective. It takes no lock.
        """
        lag = self.checkpointer.device_lag
        with suppress(LightckError):
            pre_update = lag.hung_state() if lag is not None else None
            if pre_update is not None:
                where = f"a device, before the update to step {pre_update.step + 1}"
                return CollectivePosition(where, (pre_update.step, id(pre_update)))
        return None

    def is_settled(self) -> bool:
        """Tell whether every other rank has ended, or announced what it has of the last step.

        Until then one may still have to save the early instant, and this rank with it. A rank of
        this node that fails without the step that is saved here is completed once it has ended.
        """
        status, topology = self.monitor.poll(), self.monitor.topology
        step = self.last_step
        # A rank with nothing to save announced that for its step and the next: it may live on.
        answered = {
            notice.rank
            for notice in status.notices
            if (notice.last_step + 1 if notice.step is None else notice.step) >= step
        }
        others = {*range(topology.world)} - {topology.rank}
        settled = others <= answered.union(status.dead, status.closed)
        ends = set() if self._saved_step is None else self._ranks_behind(status).union(status.dead)
        return settled and ends <= self._completed

    def ends_hang(self, position: CollectivePosition | None) -> bool:
        """Tell whether others see to a hang that goes on, so that this process need not end.

        Inside a collective it waits for another rank, and that one is ended if ranks recover in
        place. Anywhere else it is this process that stands.
        """
        return position is not None and self.in_place is not None and self.in_place()

    def gives_up_update(self) -> bool:
        """Tell whether this rank's update is not to be waited for, as peers can complete it.

        That is so if it has peers on its node and hangs outside of any collective, or has not moved
        for as long as a hang takes at least while a peer is ahead.
        """
        hang, topology = self.hang, self.monitor.topology
        peers = {*topology.peers} - {topology.rank}
        if hang is None or not peers:
            return False
        progress = self.progress()
        if hang.is_stuck(progress):
            return True
        steps = [notice.step or 0 for notice in self.monitor.poll().notices if notice.rank in peers]
        return max(steps, default=0) > progress.step and hang.has_not_moved(progress)

    def _settle_pre_fence(self, deadline: float) -> None:
        """Write or void the journal's pre-fence entry, if training hangs: this rank may end."""
        hang = self.hang
        if hang is None or threading.get_ident() == self.checkpointer.thread:
            return
        # The save has reported already what it could not have; this is only for the others' step.
        with suppress(LightckError), self._locked(deadline):
            if hang.has_not_moved(self.progress()):
                self.checkpointer.thread_stuck()

    def _ranks_behind(self, status: PeerStatus) -> set[int]:
        """Return this node's ranks that have failed without the step that this one has saved."""
        if self._saved_step is None:
            return set()
        last = {notice.rank: notice.step or 0 for notice in status.notices}
        peers = self.monitor.topology.peers
        return {rank for rank in peers if last.get(rank, self._saved_step) < self._saved_step}

    def stop(self) -> None:
        """Stop listening to the other ranks."""
        self.whole_saver.stop()
        self.monitor.stop()

    def _needs_early(self, notice: FailureNotice) -> bool:
        """Tell whether another node has an early snapshot of the last step, and this rank none.

        On this node a whole snapshot has both instants (`WholeSaver`).
        """
        done = self._saved_early and self._saved_step == self.last_step
        away = notice.rank not in self.monitor.topology.peers
        return away and notice.early and notice.step == self.last_step and not done

    def _is_early_elsewhere(self, step: int | None) -> bool:
        peers = self.monitor.topology.peers
        away = (each for each in self.monitor.poll().notices if each.rank not in peers)
        return any(notice.early and notice.step == step for notice in away)

    def _announce(self, saved: Saved, deadline: float) -> None:
        """Announce a save, unless the same was announced before."""
        step, last_step = saved.step if saved.fresh else None, self.last_step
        same = (step, saved.early) == (self._saved_step, self._saved_early)
        if same and (step is not None or self._announced_at == last_step):
            return
        self._saved_step, self._saved_early = step, saved.early
        self._announced_at = last_step
        self.monitor.announce(
            saved.reason,
            step,
            early=saved.early,
            from_peer=saved.reason in self._peer_reasons,
            last_step=last_step,
            seconds=max(0.0, min(ANNOUNCE_S, deadline - time.monotonic())),
        )
