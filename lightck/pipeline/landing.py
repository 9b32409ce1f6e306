"""Make captured snapshots durable, and count each one once every rank has it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from lightck.errors import CoordinationError, LightckError
from lightck.events import event
from lightck.pipeline.commit_barrier import Alone, Barrier, is_final
from lightck.pipeline.inflight import Counters, Flight
from lightck.region.region import Region
from lightck.tracing.trace import Trace
from lightck.types import Fate


@dataclass(eq=False)
class Landing:
    """Holds the snapshots that have left the window.

    The training thread uses it, or another thread under the training thread's lock.
    """

    region: Region
    barrier: Barrier = field(default_factory=Alone, kw_only=True)
    counters: Counters = field(default_factory=Counters, kw_only=True)
    persisting: list[Flight] = field(default_factory=list, kw_only=True)
    """Snapshots past their fence, in commit order: sealed, so that the pool commits them, or to be
    sealed when the copies they wait for have arrived from a device."""
    awaiting: list[Flight] = field(default_factory=list, kw_only=True)
    """Snapshots that are durable on this rank and not yet known to be durable on every other
    one."""
    newest: Flight | None = field(default=None, kw_only=True)
    """The last snapshot that became durable on this rank."""
    trace: Trace | None = field(default=None, kw_only=True)

    def poll(self, timeout_s: float | None = 0.0) -> Iterator[Flight]:
        """Yield the snapshots that are committed now; wait up to `timeout_s` for this rank's own.

        Raises:
            LightckError: a background failure; that snapshot is dropped.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.persisting:
            flight = self.persisting[0]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                if not (flight.sealed or self._arrived(flight, left)):
                    break
                if not flight.writer.wait(left):
                    break
            except Exception as error:
                self.persisting.remove(flight)
                self._lost(flight, f"failed: {error}", for_good=is_final(error))
                if not flight.sealed:
                    self._abandon(flight)
                flight.fail(error)
                raise
            self.persisting.remove(flight)
            flight.durable_s = time.monotonic()
            self.counters.durable += 1
            self.counters.commit_s += flight.durable_s - flight.captured_s
            self.newest = flight
            self.barrier.committed(flight.step, flight.counted_form)
            if flight.local:
                self.region.keep(flight.writer.slot)
                continue
            self.awaiting.append(flight)
        for flight in [*self.awaiting]:
            fate = self.barrier.fate(flight.step)
            if fate is Fate.WHOLE:
                self._whole(flight)
                yield flight
            elif fate is Fate.DEAD:
                self._dead(flight)

    def seal_arrived(self) -> bool:
        """Seal the snapshots that have arrived from devices; False if more is about to arrive.

        Call it under the lock. An error is raised by the next `poll`, not here.
        """
        for flight in self.persisting:
            if not flight.sealed:
                with suppress(LightckError):
                    if any(transfer.error for transfer in flight.transfers):
                        return True
                    if not self._arrived(flight, 0.0):
                        return not all(transfer.fed.is_set() for transfer in flight.transfers)
        return True

    def _whole(self, flight: Flight) -> None:
        """Protect a snapshot that every rank has committed, and free the one protected before."""
        self.region.whole(flight.writer.slot)
        self.awaiting = [each for each in self.awaiting if each is not flight]
        counters, now = self.counters, time.monotonic()
        counters.committed += 1
        counters.whole_s += now - flight.durable_s
        counters.persist_s = now - flight.opened_s
        # Fates need not come in the order of the steps.
        counters.last_committed_step = max(flight.step, counters.last_committed_step or 0)

    def count_last(self) -> None:
        """Count the newest snapshot as committed, whatever its fate was.

        At their close the ranks found that every one of them holds it.
        """
        flight = self.newest
        if flight is not None and self.counters.last_committed_step != flight.step:
            assert flight.writer.record is not None
            self.region.committed(flight.writer.slot, flight.writer.record)
            self._whole(flight)
            for future in flight.futures:
                if not future.done():
                    future.set_result(flight.step)

    def _dead(self, flight: Flight) -> None:
        """Abort a snapshot that another rank does not have; its slot is reused first."""
        self.region.dead(flight.writer.slot)
        self.awaiting.remove(flight)
        self.counters.dead += 1
        why = self.barrier.why_dead(flight.step)
        event("dead", logging.DEBUG, step=flight.step, why=why)
        if self.trace is not None:
            self.trace.lost_snapshot("dead", flight.step, why)
        flight.fail(CoordinationError(f"snapshot of step {flight.step} does not count: {why}"))

    @property
    def in_flight(self) -> list[Flight]:
        """The snapshots past their fence that are neither committed on every rank nor given up."""
        return [*self.persisting, *self.awaiting]

    def await_fates(self, seconds: float) -> None:
        """Wait up to `seconds` for the fate of every snapshot this rank has committed."""
        deadline = time.monotonic() + seconds
        for flight in self.awaiting:
            self.barrier.wait(flight.step, max(0.0, deadline - time.monotonic()))

    def _arrived(self, flight: Flight, timeout_s: float | None) -> bool:
        """Wait for a snapshot's copies from devices; seal it and return True if all are there."""
        raise NotImplementedError

    def _abandon(self, flight: Flight) -> None:
        """Give up a snapshot that is not sealed."""
        raise NotImplementedError

    def _lost(self, flight: Flight, why: str, *, for_good: bool) -> None:
        if not flight.local:
            self.barrier.lost(flight.step, why, for_good=for_good)
