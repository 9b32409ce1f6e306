"""Account CPU time and memory of this process and of those that it has started.

This is for Linux only, as the rest of the bench: clocks of other processes by their ids, memory
from /proc.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from pathlib import Path

_SCHED = 2  # the scheduler's own clock, in nanoseconds
_LOOK_S = 0.005
_LOOKS_PER_FAMILY = 20  # between two searches for new processes


class Cpu:
    """CPU time of all threads of this process and its descendants, ended ones too.

    A call costs microseconds: new processes are looked for only when asked.
    """

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Find the processes that exist now."""
        self._clocks = [(~pid << 3) | _SCHED for pid in descendants()]  # clock_getcpuclockid(3)

    def __call__(self) -> float:
        """Return the seconds so far."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = time.process_time() + ended.ru_utime + ended.ru_stime
        for clock in self._clocks:
            try:
                spent += time.clock_gettime(clock)
            except OSError:
                continue  # it has ended; the process that waited for it has its time
        return spent


class Queued:
    """Time in which the calling thread was ready to run, and others had its processor.

    A wall time less that has no neighbours in it, and neither has it threads of the engine's own
    that take the training's processor. What shares memory bandwidth stays in it, and so does who
    keeps a thread from running that the calling one waits for.
    """

    def __init__(self) -> None:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        try:
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError:
            self._file = None  # a kernel without CONFIG_SCHED_INFO

    def __call__(self) -> float:
        """Return the seconds so far; nan where the kernel does not count them."""
        if self._file is None:
            return math.nan
        return int(os.pread(self._file, 80, 0).split()[1]) / 1e9

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def descendants() -> list[int]:
    """Return the processes that this one has started, and theirs."""
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                # pid (name with anything in it) state parent ...
                parents[int(process.name)] = int(
                    (process / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue  # it has ended
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


class Peak:
    """A context that looks at memory until it ends, and keeps the peak.

    It counts anonymous memory of this process and its descendants, and shared memory in /dev/shm
    that is not below `folder`: the region and the files of snapshots are the medium, not DRAM spent
    beside it. Others' use of /dev/shm meanwhile would count as well.
    """

    def __init__(self, folder: Path) -> None:
        self.bytes = 0
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._family = [os.getpid(), *descendants()]
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        looks = 0
        while not self._stop.wait(_LOOK_S):
            looks += 1
            if looks % _LOOKS_PER_FAMILY == 0:
                self._family = [os.getpid(), *descendants()]
            self._look()

    def _look(self) -> None:
        anonymous = sum(map(_anonymous_bytes, self._family))
        self.bytes = max(self.bytes, anonymous + _shared_bytes(self._folder))


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    found = [line for line in lines if line.startswith("RssAnon:")]
    return int(found[0].split()[1]) << 10 if found else 0  # one that has ended keeps no memory


def _shared_bytes(folder: Path) -> int:
    """Return the bytes used in /dev/shm, less those below a folder there."""
    shared = Path("/dev/shm")
    about = os.statvfs(shared)
    used = (about.f_blocks - about.f_bfree) * about.f_frsize
    if not folder.is_relative_to(shared):
        return used
    for file in folder.rglob("*"):
        try:
            used -= file.stat().st_blocks * 512
        except OSError:
            continue  # renamed meanwhile
    return used
