"""Where copies go first: straight to the region, or to DRAM and from there behind the training.

`direct` needs a medium that takes a snapshot inside one window. Where it cannot, the fence would
wait for it; `staged` leaves the sources at the speed of memory instead, and due snapshots slip
until the medium has caught up. `auto` finds out by trying, because the fence's wait is what counts
and no rate predicts it on a busy machine.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightck.events import event
from lightck.region.library import free_dram_bytes

TOO_SLOW = 2.0
"""A fence that waits longer than this many plain copies of the payload to DRAM is worth a trial."""
WORTH = 0.5
"""A trial has won when its fence waits at most this part of the other's."""
LOOKS = 3
"""Snapshots that a decision rests on."""
PATIENCE = 64
"""Snapshots after a lost trial before the next one; doubles every time."""
SPARE = 0.75
"""Part of the free DRAM that staging may take."""

Mode = Literal["auto", "direct", "staged"]


def in_dram(placement: str) -> Mode:
    """What the setting says of tensors in DRAM; of those on a device see `ways`."""
    return "direct" if placement == "direct" else "staged" if placement == "staged" else "auto"


def dram_rate(sample_bytes: int = 16 << 20) -> float:
    """Bytes per second of one thread's plain copy, the best of three; takes some milliseconds."""
    source, target = np.zeros(sample_bytes, np.uint8), np.ones(sample_bytes, np.uint8)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = max(best, sample_bytes / (time.perf_counter() - begin))
    return best


def behind(map_dram: Callable[[int], None], size: int) -> Future[None]:
    """Map DRAM on a thread of its own; whatever goes wrong there is the future's.

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
class Placement:
    """Chooses, snapshot by snapshot, and learns from the fence. Used by the training thread."""

    mode: Mode = "auto"
    paged: bool = False
    """The native side stages everything, whatever is chosen here."""
    reserve: Callable[[int], Future[None]] = lambda size: _done()
    """Maps DRAM in the background."""
    free: Callable[[], int] = free_dram_bytes
    rate: Callable[[], float] = dram_rate
    staging: bool = False
    """Snapshots go through DRAM."""
    room_bytes: int = 0
    """DRAM that staging may take."""
    _mapping: Future[None] | None = None
    """DRAM for a trial that is being mapped."""
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))
    _direct_s: float = 0.0
    """What the fence waited before the trial that is running; 0: none is."""
    _quiet: int = 0
    """Snapshots until the next trial may begin."""
    _patience: int = PATIENCE
    _rate: float = 0.0

    def prepare(self, payload_bytes: int) -> None:
        """Map the DRAM that staging is certain to use; said beforehand. May take a second.

        Raises:
            LightckError: there is none. Whatever else the mapping met is raised as it is.
        """
        if self.mode == "staged" and not self.paged and payload_bytes > self.room_bytes:
            self._make_room(payload_bytes).result()
            self.staging = True

    def choose(self, lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these copies go through DRAM.

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
        self._waits.append(fence_s)
        self._quiet = max(0, self._quiet - 1)
        if len(self._waits) < LOOKS:
            return
        wait_s = statistics.median(self._waits)
        if self._direct_s:
            self._judge(wait_s)
        elif not self.staging and not self._quiet:
            self._rate = self._rate or self.rate()
            if wait_s > TOO_SLOW * payload_bytes / self._rate:
                self._direct_s = wait_s
                self._mapping = self._make_room(payload_bytes)

    def _make_room(self, payload_bytes: int) -> Future[None]:
        """Say what DRAM will be used before it is."""
        self.room_bytes = min(payload_bytes, int(SPARE * self.free()))
        event("staging", bytes=self.room_bytes, payload_bytes=payload_bytes)
        return self.reserve(self.room_bytes)

    def _begin_trial(self) -> None:
        if self._mapping is None or not self._mapping.done():
            return
        error, self._mapping = self._mapping.exception(), None
        self._waits.clear()
        self.staging = error is None
        if error is not None:
            event("placement", staged=False, why=error)
            self._lost()

    def _judge(self, staged_s: float) -> None:
        won = staged_s <= WORTH * self._direct_s
        event("placement", staged=won, fence_direct_s=self._direct_s, fence_staged_s=staged_s)
        self._waits.clear()
        if won:
            self._direct_s = 0.0
        else:
            self._lost()

    def _lost(self) -> None:
        self.staging, self._direct_s, self.room_bytes = False, 0.0, 0
        self._quiet, self._patience = self._patience, 2 * self._patience


def _done() -> Future[None]:
    """Nothing to map."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
