"""Advise on a container's /dev/shm, which is small unless the container is started with more."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from lightck.errors import RegionFullError

SHARED_MEMORY = Path("/dev/shm")
MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that Docker and Podman leave in their containers."""
_NEEDED = re.compile(r"(\d+) bytes needed")


@contextlib.contextmanager
def enlarging(folder: Path) -> Iterator[None]:
    """Add to an error of too little room how a container gets a larger /dev/shm.

    Raises:
        RegionFullError: the body's error, with advice where the container's /dev/shm is the reason.
    """
    try:
        yield
    except RegionFullError as error:
        if not (_is_container() and _is_shared_memory(folder)):
            raise
        there, needed = os.statvfs(SHARED_MEMORY), _NEEDED.search(str(error))
        if needed is None or int(needed[1]) <= there.f_bavail * there.f_frsize:
            raise  # the memory of the machine or of the cgroup is too small
        advised = RegionFullError(
            f"{error}; {SHARED_MEMORY} of this container has {there.f_blocks * there.f_frsize}"
            " bytes in all: start it with --shm-size=<bytes> (Docker), or mount a volume of"
            f" emptyDir: {{medium: Memory}} at {SHARED_MEMORY} (Kubernetes)"
        )
        advised.code = error.code
        raise advised from error


def _is_container() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(mark.exists() for mark in MARKS)


def _is_shared_memory(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(folder).st_dev == os.stat(SHARED_MEMORY).st_dev
    return False
