"""Faults and delays inside the native library, at the place where they happen.

Only a testing build (-DLCK_TESTING) has them; `make test` points LIGHTCK_NATIVE at one. The library
that lightck has loaded is opened again by its path, so both see the same switches.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from functools import cache
from typing import Any

from cffi import FFI

from lightck.region._ffi import library_path

(
    ALLOCATE, SYNC, COPY, INVALIDATE, COMMIT, RECORD,
    TRUNCATE, MAP, ADVISE, WRITE, READ, STAT, LIMIT, LOCK, POISON,
) = POINTS = tuple(range(15))  # fmt: skip
"""These are the points of native/src/fault.h: steps of a snapshot, system calls, and SIGBUS at
an access.
"""

_ffi: Any = FFI()
_ffi.cdef(
    "int lck_fault_arm(uint32_t point, int64_t after, int error);"
    "int lck_fault_delay(uint32_t point, uint64_t ns);"
)


@cache
def _library() -> Any:
    path = library_path()
    library = _ffi.dlopen(path)
    assert hasattr(library, "lck_fault_arm"), (
        f"{path} has no fault injection: run `make native-test` and set"
        " LIGHTCK_NATIVE=build/native/lightck-testing.so"
    )
    return library


def arm(point: int, error: int = errno.EIO, after: int = 0) -> None:
    """Let `after` visits of the point pass and the next one fail with `error`."""
    assert _library().lck_fault_arm(point, after, error) == 0


def disarm(point: int) -> None:
    """Let every visit pass again."""
    assert _library().lck_fault_arm(point, -1, 0) == 0


def delay(point: int, seconds: float) -> None:
    """Sleep at every visit of the point; 0 ends it, also for those that sleep there already."""
    assert _library().lck_fault_delay(point, int(seconds * 1e9)) == 0


@contextlib.contextmanager
def delayed(point: int, seconds: float) -> Iterator[None]:
    """Sleep at every visit of the point inside the block."""
    delay(point, seconds)
    try:
        yield
    finally:
        delay(point, 0)


def hold(point: int) -> None:
    """Whoever visits the point stays there, until `release`."""
    delay(point, 3600.0)


def release(point: int) -> None:
    """Let everybody go on."""
    delay(point, 0.0)


def clear() -> None:
    """No faults and no delays."""
    for point in POINTS:
        disarm(point)
        delay(point, 0)
