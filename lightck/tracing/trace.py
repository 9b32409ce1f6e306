"""Records what every thread did in the last steps: in memory, bounded, written on request.

Python notes the training thread's phases, the native pool its own spans (what a worker did, and
when). Both read CLOCK_MONOTONIC, so that they lie on one axis. Without a trace nothing is kept:
that costs one branch per place.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightck.config import Config
from lightck.errors import ConfigError
from lightck.region.layout import Entry
from lightck.region.native_pool import SPAN_DTYPE, NativePool
from lightck.region.region import Region
from lightck.region.slot_writer import Batch, SlotWriter
from lightck.region.stats_page import Process

MOMENTS = 1 << 17
"""The number of spans kept per native thread, 64 bytes each: 23 steps of GPT-2 small, in chunks
of 256 KiB."""
EVENTS = 1 << 15
"""The number of events kept in Python: some 250 steps of GPT-2 small."""
OPENINGS = 4096
"""The number of snapshots whose tensors' names are kept."""

_ROW = struct.Struct("=7q")
"""An event as it is kept: number from 1 on (0: none), code, begin, end, thread, step, amount."""

now_ns = time.perf_counter_ns
"""The clock of a trace, in ns: CLOCK_MONOTONIC on Linux, like the pool's."""


def spans_of(config: Config) -> int:
    """Return the number of spans that a handle's pool keeps per thread.

    Raises:
        ConfigError: the trace could not be written where it is wanted.
    """
    if isinstance(config.trace, Path) and not config.trace.parent.is_dir():
        raise ConfigError(
            f"trace = {str(config.trace)!r}: there is no folder {config.trace.parent}"
        )
    return 0 if config.trace is False else MOMENTS


class Event(NamedTuple):
    """A phase of a thread, or (with `end_ns` = `begin_ns`) an instant."""

    kind: str
    """The kind of event: `step`, `forward`, `wait` (for gradients), `update`, `stall`, `part` (of a
    stall), `tick`, `launched` and `allreduce` (a bucket whose end is not seen, or is), `recovery`
    (in place), `released`, `slipped`, `torn`."""
    name: str
    begin_ns: int
    end_ns: int
    thread: int
    step: int
    """The step that is being computed; for `released`, `slipped` and `torn` that of the
    snapshot."""
    amount: int = 0
    """Bytes: those released in all, or those of the bucket."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Holds when and in which slot a snapshot was opened at forward start, and names its copies."""

    begin_ns: int
    step: int
    slot: int
    entries: Sequence[Entry]
    batches: Sequence[Batch]
    payload_bytes: int


@dataclass(frozen=True)
class Recorded:
    """The content of a trace at one time."""

    events: list[Event]
    openings: list[Opening]
    spans: npt.NDArray[Any]
    """Rows of SPAN_DTYPE."""
    lost: int
    """The number of events and spans that newer ones have displaced."""
    training_thread: int
    about: dict[str, Any]
    """Rank, world, process, path and more, for the file."""


@dataclass(eq=False)
class Trace:
    """Notes what happens to one handle. `note` on any thread, the rest on the training thread.

    Events are rows of numbers in a ring: no object outlives its noting, so that however many there
    are, they are no work for the garbage collector.
    """

    about: dict[str, Any]
    step: int
    """The step that is being computed."""
    pool: NativePool | None = None
    training_thread: int = field(default_factory=get_ident)
    openings: deque[Opening] = field(default_factory=lambda: deque(maxlen=OPENINGS))
    _rows: bytearray = field(default_factory=lambda: bytearray(EVENTS * _ROW.size))
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers of the rows; taking one is a single step for the interpreter, whatever other
    threads do."""
    _codes: dict[tuple[str, str], int] = field(default_factory=dict)
    """The code that stands for a kind and a name."""
    _next_code: Iterator[int] = field(default_factory=itertools.count)
    _began_ns: int = field(default_factory=now_ns)
    """The time when the step that is being computed began."""
    _last: tuple[npt.NDArray[Any], int] | None = None
    """The pool's spans and how many were lost, as they were last read."""

    @classmethod
    def of(cls, config: Config, region: Region, pool: NativePool, step: int) -> Trace | None:
        """Return a trace of what follows the last complete `step`; None if none is wanted."""
        if config.trace is False:
            return None
        about = {
            "rank": region.info.rank,
            "world": region.world,
            "process": Process.this().number,
            "region": str(region.place.file),
            "medium": region.info.medium,
            "survives": region.survives,
            "threads": pool.threads,
            "chunk_bytes": config.chunk_bytes,
            "schedule": config.schedule,
        }
        return cls(about, step + 1, pool)

    def note(self, kind: str, name: str, begin_ns: int, end_ns: int | None = None) -> None:
        """Add a phase that has just ended, or an instant, of the step that is being computed."""
        self._put(kind, name, begin_ns, begin_ns if end_ns is None else end_ns, self.step)

    def _put(
        self, kind: str, name: str, begin_ns: int, end_ns: int, step: int, amount: int = 0
    ) -> None:
        code = self._codes.get((kind, name))
        if code is None:
            code = self._codes.setdefault((kind, name), next(self._next_code))
        number = next(self._numbers)
        at = number * _ROW.size % len(self._rows)
        _ROW.pack_into(self._rows, at, number, code, begin_ns, end_ns, get_ident(), step, amount)

    def stall(self, cause: str, begin_ns: int, end_ns: int) -> None:
        """Note that the training thread was held up."""
        self.note("stall", cause, begin_ns, end_ns)

    def fenced(self, begin_ns: int, captured_ns: int) -> None:
        """Note that the fence has waited until `captured_ns`, and has compared since."""
        self.note("part", "copies", begin_ns, captured_ns)
        self.note("part", "audit", captured_ns, now_ns())

    def step_ended(self, step: int) -> None:
        """Note that a step is complete; the next one begins."""
        now = now_ns()
        self.step = step
        self.note("step", "step", self._began_ns, now)
        self.step, self._began_ns = step + 1, now

    def opened(self, step: int, writer: SlotWriter, begin_ns: int) -> None:
        """Note that a snapshot has its slot; its batches are yet to come."""
        layout = writer.layout
        self.openings.append(
            Opening(
                begin_ns,
                step,
                writer.slot.index,
                layout.entries,
                writer.batches,
                layout.payload_bytes,
            )
        )

    def released(self, step: int, total_bytes: int) -> None:
        """Note that so many bytes of the snapshot may be copied by now. Any thread."""
        now = now_ns()
        self._put("released", "released", now, now, step, total_bytes)

    def bucket(self, number: int, size: int, begin_ns: int, end_ns: int | None = None) -> None:
        """Note that a gradient bucket was launched, and reduced if that was seen. Any thread."""
        kind = "launched" if end_ns is None else "allreduce"
        end_ns = begin_ns if end_ns is None else end_ns
        self._put(kind, f"bucket {number}", begin_ns, end_ns, self.step, size)

    def lost_snapshot(self, kind: str, step: int, why: str) -> None:
        """Note that a due snapshot has slipped, or was torn, as `kind` says."""
        now = now_ns()
        self._put(kind, why, now, now, step)

    @property
    def events(self) -> list[Event]:
        """The events that newer ones have not displaced, in the order in which they were noted."""
        return self._kept()[0]

    def _kept(self) -> tuple[list[Event], int]:
        """Return `events`, and how many were displaced."""
        rows = sorted(row for row in _ROW.iter_unpack(bytes(self._rows)) if row[0])
        names = {code: each for each, code in self._codes.items()}  # later: a code precedes its row
        found = []
        for _, code, begin, end, thread, step, amount in rows:
            kind, name = names[code]
            name = f"step {step}" if kind == "step" else name
            found.append(Event(kind, name, begin, end, thread, step, amount))
        return found, rows[-1][0] - len(rows) if rows else 0

    def finish(self) -> None:
        """Keep what the pool has recorded: it is about to be closed."""
        if self.pool is not None:
            self._last, self.pool = self.pool.trace(), None

    def recorded(self) -> Recorded:
        """Return everything recorded up to now."""
        if self.pool is not None:
            self._last = self.pool.trace()
        spans, lost = self._last or (np.zeros(0, SPAN_DTYPE), 0)
        events, displaced = self._kept()
        lost += displaced
        return Recorded(events, list(self.openings), spans, lost, self.training_thread, self.about)
