"""One generation of connections between all ranks: a gloo backend that can be cut at once.

The only file that knows gloo's sockets. A connection to a peer that hangs, or whose machine is
gone, ends nobody's collective by itself; so the sockets that appeared while the link was opened are
shut down, and every collective on it ends with an error within a millisecond.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

OPEN_S = 30.0
"""Seconds in which all ranks have to come: each opens only once all have said they are ready."""


def _sockets() -> dict[int, str]:
    """Return the process's open sockets: descriptor and the kernel's name."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(entry.path)
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


class Link:
    """The connections of one generation. Open it where waiting is allowed; `cut` is at once."""

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta) -> None:
        """Connect to all other ranks.

        Args:
            store: a torch store below a prefix of this generation's own.
            rank: of this process.
            world: number of ranks.
            timeout: of each collective.

        Raises:
            RuntimeError: a rank did not come.
        """
        gloo: Any = dist.ProcessGroupGloo
        # No lock: a link that is given up waits on in gloo for a peer that has died, for as long as
        # collectives may take. Its sockets may count as the next link's, and may be cut with them.
        before = _sockets()
        store.set_timeout(timedelta(seconds=OPEN_S))
        self.backend: Any = gloo(store, rank, world, timeout)
        self._descriptors = {fd: name for fd, name in _sockets().items() if before.get(fd) != name}

    def cut(self) -> None:
        """End every collective that is under way, with an error; idempotent. Any thread."""
        for fd, name in self._descriptors.items():
            with contextlib.suppress(OSError):
                if os.readlink(Path("/proc/self/fd") / str(fd)) != name:
                    continue
                with socket.socket(fileno=os.dup(fd)) as found:
                    # gloo aborts the process if its listening socket is shut down. It connects by
                    # TCP: a socket of AF_UNIX is another thread's, as of a loader's workers.
                    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if found.family != socket.AF_UNIX and not listens:
                        found.shutdown(socket.SHUT_RDWR)
        self._descriptors = {}
