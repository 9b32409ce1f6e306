"""Chooses where copies go first: straight to the region, or to DRAM and later to the region.

`direct` needs a medium that takes a snapshot inside one window. Where it cannot, the fence would
wait for it; `staged` copies leave the sources at the speed of memory instead, and due snapshots are
skipped until the medium has caught up. `auto` finds out by trying (`trial.py`): the fence's wait
is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightck.events import event
from lightck.pipeline.trial import ABTrial, TrialResult
from lightck.region._ffi import free_dram_bytes

TOO_SLOW = 2.0
"""A fence that waits longer than this many plain copies of the payload to DRAM is worth a trial."""
SPARE = 0.75
"""The fraction of the free DRAM that staging may take."""

Mode = Literal["auto", "direct", "staged"]


def in_dram(placement: str) -> Mode:
    """Return the mode that the setting gives tensors in DRAM; for those on a device see `ways`."""
    return "direct" if placement == "direct" else "staged" if placement == "staged" else "auto"


def dram_rate(sample_bytes: int = 16 << 20) -> float:
    """Measure bytes per second of one thread's plain copy, the best of three; some milliseconds."""
    source, target = np.zeros(sample_bytes, np.uint8), np.ones(sample_bytes, np.uint8)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = max(best, sample_bytes / (time.perf_counter() - begin))
    return best


def behind(map_dram: Callable[[int], None], size: int) -> Future[None]:
    """Map DRAM on a thread of its own; an error of the mapping is the future's.

    No executor: it takes no work any more when the interpreter ends, and a handle that is closed
    only then still makes its last snapshot.
    """
    mapped: Future[None] = Future()

    def work() -> None:
        try:
            map_dram(size)
        except BaseException as error:
            mapped.set_exception(error)
        else:
            mapped.set_result(None)

    try:
        Thread(target=work, name="lightck-staging").start()
    except RuntimeError as error:  # no more threads
        mapped.set_exception(error)
    return mapped


@dataclass(eq=False)
class HostPlacement:
    """Chooses where copies go, snapshot by snapshot, and learns from the fence's wait.

    Used by the training thread.
    """

    mode: Mode = "auto"
    paged: bool = False
    """True if the native side stages everything, whatever is chosen here."""
    reserve: Callable[[int], Future[None]] = lambda size: _done()
    """Maps DRAM in the background."""
    free: Callable[[], int] = free_dram_bytes
    rate: Callable[[], float] = dram_rate
    staging: bool = False
    """True if snapshots go through DRAM."""
    room_bytes: int = 0
    """The bytes of DRAM that staging may take."""
    _mapping: Future[None] | None = None
    """The mapping of DRAM for a trial, while it is under way."""
    _contest: ABTrial = field(default_factory=ABTrial)
    """The trial of `staged` against `direct`, in seconds that the fence waits."""
    _rate: float = 0.0

    def prepare(self, payload_bytes: int) -> None:
        """Map the DRAM that staging is certain to use, announced beforehand. May take a second.

        Raises:
            LightckError: there is none. Whatever else the mapping met is raised as it is.
        """
        if self.mode == "staged" and not self.paged and payload_bytes > self.room_bytes:
            self._make_room(payload_bytes).result()
            self.staging = True

    def choose(self, lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Choose which of these copies go through DRAM.

        Args:
            lengths: bytes of each copy of one snapshot.

        Returns:
            One bool per copy. When DRAM is short, as many as fit from the front.
        """
        self._begin_trial()
        if not self.staging:
            return np.zeros(len(lengths), np.bool_)
        return np.cumsum(lengths) <= self.room_bytes

    def waited(self, fence_s: float, payload_bytes: int) -> None:
        """Learn what the fence waited for a snapshot that was placed as chosen."""
        if self.mode != "auto" or self.paged or not payload_bytes or self._mapping is not None:
            return
        contest = self._contest
        turn = contest.saw(fence_s, lambda: TOO_SLOW * payload_bytes / self._plain())
        if turn is TrialResult.DOUBT:
            self._mapping = self._make_room(payload_bytes)
        elif turn is not None:
            event(
                "placement",
                staged=turn is TrialResult.WON,
                fence_direct_s=contest.first_cost,
                fence_staged_s=contest.other_cost,
            )
            if turn is TrialResult.LOST:
                self._let_go()

    def _plain(self) -> float:
        self._rate = self._rate or self.rate()
        return self._rate

    def _make_room(self, payload_bytes: int) -> Future[None]:
        """Announce the DRAM that will be used, and begin to map it."""
        self.room_bytes = min(payload_bytes, int(SPARE * self.free()))
        event("staging", bytes=self.room_bytes, payload_bytes=payload_bytes)
        return self.reserve(self.room_bytes)

    def _begin_trial(self) -> None:
        if self._mapping is None or not self._mapping.done():
            return
        error, self._mapping = self._mapping.exception(), None
        if error is None:
            self._contest.begin()
            self.staging = True
        else:
            event("placement", staged=False, why=error)
            self._contest.lose()
            self._let_go()

    def _let_go(self) -> None:
        self.staging, self.room_bytes = False, 0


def _done() -> Future[None]:
    """Return a finished mapping of nothing."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
