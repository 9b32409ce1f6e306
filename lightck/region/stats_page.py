"""Read and write the region's statistics page: what a trainer reports, for observers.

It proves nothing. The trainer is named by `Process`, which tells whether it still runs.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightck.errors import CorruptSnapshotError, NoSnapshotError
from lightck.region._ffi import check, ffi, library
from lightck.region.native_pool import NativePool
from lightck.region.native_region import NativeRegion

# ---- a process: its number, start time and boot, for a number is used again ----------------------

_PROC = Path("/proc")
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one boot of a machine."""

    number: int
    start: int
    """The start time in ticks since boot; 0: not known."""
    boot: bytes

    @classmethod
    def this(cls) -> Process:
        """Return the calling process."""
        return cls(os.getpid(), _start(os.getpid()) or 0, boot())

    @property
    def is_running(self) -> bool:
        """Return whether the process runs, as far as this process's PID namespace shows."""
        return self.boot == boot() and self.start != 0 and _start(self.number) == self.start

    def stands_still(self, seconds: float) -> bool:
        """Tell whether it is stopped, or in a call that cannot be interrupted, for so long.

        Looks until then, or until it is seen to run.
        """
        until_s = time.monotonic() + seconds
        while self.is_running and _fields(self.number)[:1] in ([b"T"], [b"t"], [b"D"]):
            if time.monotonic() >= until_s:
                return True
            time.sleep(_LOOK_S)
        return False


def boot() -> bytes:
    """Return the 16-byte id of this boot; zeros where the kernel does not tell."""
    with suppress(OSError, ValueError):
        return uuid.UUID((_PROC / "sys/kernel/random/boot_id").read_text().strip()).bytes
    return bytes(16)


def _start(number: int) -> int | None:
    """Return the start time of a live process in ticks since boot (field 22 of `stat`), or None.

    The name before that field may hold anything, parentheses too.
    """
    try:
        fields = _fields(number)
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (ValueError, IndexError):
        return None


def _fields(number: int) -> list[bytes]:
    """Return the fields of `stat` from the state on; none if there is no such process."""
    try:
        text = (_PROC / str(number) / "stat").read_bytes()
        return text[text.rindex(b")") + 2 :].split()
    except (OSError, ValueError):
        return []


# ---- the page ------------------------------------------------------------------------------------

NO_STEP = 2**64 - 1
GONE, CLOSED, FAILED, LEFT = range(4)
"""How a trainer has ended: not at all yet, or without a word; by closing its handle; by an error;
by the user's interrupt."""
_CAUSE_BYTES, _ERROR_BYTES, _CAUSES = 15, 559, 8
_NUMBERS = (
    *("ended", "began_ns", "updated_ns", "began_step", "step", "step_ns", "payload_bytes"),
    *("captured", "committed", "slipped", "torn", "failed", "errors"),
    *("bytes_copied", "bytes_skipped", "bytes_helped", "copy_ns", "commit_ns", "staging_bytes"),
    *("bytes_drained", "drain_ns"),
)


class Page:
    """The publisher of one trainer's statistics. Used by the training thread."""

    def __init__(
        self, pool: NativePool, region: NativeRegion, step: int, began_ns: int | None = None
    ) -> None:
        """Prepare the page of a training that begins after `step`, at `began_ns` or now."""
        self._pool, self._region = pool, region
        self._fields = ffi.new("lck_statistics *")
        """The page's fields, which keep their values from one `publish` to the next."""
        process = Process.this()
        self._fields.process, self._fields.process_start = process.number, process.start
        self._fields.boot_id = process.boot
        self._fields.began_ns, self._fields.began_step = began_ns or time.time_ns(), step
        self._causes: tuple[str, ...] = ()
        self._error: BaseException | None = None

    def publish(
        self, numbers: Mapping[str, int], stalls: Mapping[str, float], latest: BaseException | None
    ) -> None:
        """Write the page; never waits for the medium.

        Args:
            numbers: fields of `lck_statistics` by name; the pool's counters are added here.
            stalls: seconds by cause.
            latest: the last background error.
        """
        for name, value in numbers.items():
            setattr(self._fields, name, value)
        self._set_stalls(stalls)
        self._set_error(latest)
        code = library().lck_pool_publish(self._pool.handle, self._region.handle, self._fields)
        check(code, f"publish statistics in {self._region.label}")

    def _set_stalls(self, seconds: Mapping[str, float]) -> None:
        """Set the stalls by cause, given in seconds."""
        if len(seconds) != len(self._causes):
            self._causes = tuple(seconds)[:_CAUSES]
            for row, cause in zip(self._fields.stalls, self._causes, strict=False):
                row.cause = cause.encode()[:_CAUSE_BYTES]
        for row, cause in zip(self._fields.stalls, self._causes, strict=False):
            row.ns = int(seconds[cause] * 1e9)

    def _set_error(self, latest: BaseException | None) -> None:
        """Set the last error's text."""
        if latest is not self._error:
            self._error = latest
            text = f"{type(latest).__name__}: {latest}".encode()[:_ERROR_BYTES]
            self._fields.last_error = text.decode(errors="ignore").encode()


@dataclass(frozen=True)
class Reading:
    """The content of a page when it was read."""

    owned: bool
    """Some process owns the region now."""
    process: Process | None
    """The process that wrote the page; None: no process has (a region made by an older build), or
    the page is torn."""
    numbers: dict[str, int]
    """The fields of `lck_statistics` by name; empty without a page."""
    captured_step: int | None = None
    committed_step: int | None = None
    stalls_ns: Mapping[str, int] | None = None
    last_error: str = ""
    problem: str = ""
    """The reason why there is no page."""


def read(region: NativeRegion) -> Reading:
    """Read the page of a region that another process may be writing."""
    raw, owned = ffi.new("lck_statistics *"), ffi.new("int *")
    code = library().lck_region_statistics(region.handle, raw, owned)
    try:
        check(code, region.label)
    except (NoSnapshotError, CorruptSnapshotError) as error:
        return Reading(bool(owned[0]), None, {}, problem=str(error))
    return Reading(
        owned=bool(owned[0]),
        process=Process(raw.process, raw.process_start, bytes(raw.boot_id)),
        numbers={name: int(getattr(raw, name)) for name in _NUMBERS},
        captured_step=_step(raw.captured_step),
        committed_step=_step(raw.committed_step),
        stalls_ns={_text(row.cause): int(row.ns) for row in raw.stalls if row.cause[0] != b"\0"},
        last_error=_text(raw.last_error),
    )


def owner(region: NativeRegion) -> Process | None:
    """Return the living process that owns the region, if its own page tells; None: not known.

    The owner lock does not say who holds it. A page that its writer has closed, or whose writer is
    not seen here, is a predecessor's: the owner has not published yet.
    """
    said = read(region)
    if not said.owned or said.process is None or said.numbers["ended"]:
        return None
    return said.process if said.process.is_running else None


def _step(raw: int) -> int | None:
    return None if raw == NO_STEP else int(raw)


def _text(raw: Any) -> str:
    text: bytes = ffi.string(raw)
    return text.decode(errors="replace")
