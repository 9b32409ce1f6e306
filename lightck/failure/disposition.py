"""The kernel's action at a signal, read and set from any thread.

`signal.signal` works on the main thread only, which may be stuck, and knows nothing of handlers
that C code has installed (faulthandler, MPI, ...).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_ROOM = 512  # more than `struct sigaction` has anywhere: 152 bytes with glibc on x86-64
DEFAULT = bytes(_ROOM)
"""The default action, as `write` takes it."""
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_libc = ctypes.CDLL(None, use_errno=True)


def read(number: int) -> bytes:
    """Return the action of a signal, as the C library keeps it."""
    return _sigaction(number, None)


def write(number: int, action: bytes) -> None:
    """Set a signal's action to one that was read before. Any thread."""
    _sigaction(number, action)


def _sigaction(number: int, action: bytes | None) -> bytes:
    before = ctypes.create_string_buffer(_ROOM)
    after = None if action is None else ctypes.create_string_buffer(action, _ROOM)
    if _libc.sigaction(number, after, before) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"sigaction of signal {number}: {os.strerror(error)}")
    return before.raw


def is_function(action: bytes) -> bool:
    """Tell whether a handler runs: the action is neither the default nor to ignore."""
    return _handler(action) not in (signal.SIG_DFL, signal.SIG_IGN)


def is_ignored(action: bytes) -> bool:
    """Tell whether the kernel drops the signal."""
    return _handler(action) == signal.SIG_IGN


def same_handler(one: bytes, other: bytes) -> bool:
    """Tell whether both actions lead to the same handler."""
    return _handler(one) == _handler(other)


def _handler(action: bytes) -> int:
    """Return `sa_handler`, the first word on x86-64 and aarch64, with glibc and musl."""
    return int.from_bytes(action[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)


def ends_by_default(number: int) -> bool:
    """Tell whether the default action ends the process, not only stops or continues it."""
    return number not in _HARMLESS | _STOPS


def raise_here(number: int) -> None:
    """Deliver a signal to this thread, whatever it blocks; handlers have run when this returns."""
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    try:
        signal.pthread_kill(threading.get_ident(), number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
