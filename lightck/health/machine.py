"""Probes of a machine's own counters: links, memory and its errors, and the kernel's log.

Linux describes the files below `Documentation/` of its sources: `ABI/testing/sysfs-class-net`,
`ABI/stable/sysfs-class-infiniband`, `admin-guide/cgroup-v2.rst`, `accounting/psi.rst`,
`driver-api/edac.rst`, `ABI/testing/dev-kmsg`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lightck.health.monitor import UnavailableError

PERIOD_S = 5.0


class MachineProbe:
    """A probe of lightck's own, which can also say what it reads.

    Attributes:
        name: see `Probe`.
        period_s: see `Probe`.
        symptoms: names of the symptoms that it may see.
        reads: what it reads, for people.
        of_node: one rank of a node reads it for all; else it belongs to each rank.
        detail: which devices show the symptoms of the last reading; empty: none does.
    """

    name: str
    period_s = PERIOD_S
    symptoms: tuple[str, ...]
    reads: str
    of_node = True
    detail = ""

    def read(self) -> Mapping[str, float]:
        """See `Probe`.

        Raises:
            UnavailableError: there is nothing to read on this machine.
        """
        raise NotImplementedError


class Growth:
    """Counters, of which those count that have grown by so much within so many seconds."""

    def __init__(self, least: int = 1, within_s: float = 3600.0) -> None:
        self._least, self._within_s = least, within_s
        self._base: dict[str, tuple[float, int]] = {}

    def grown(self, values: Mapping[str, int], now_s: float) -> list[str]:
        """Return the names of the counters that have grown so much."""
        found = []
        for name, value in values.items():
            since_s, base = self._base.setdefault(name, (now_s, value))
            if value - base >= self._least:
                found.append(name)
            # A driver that was loaded again counts from 0.
            if value - base >= self._least or value < base or now_s - since_s >= self._within_s:
                self._base[name] = (now_s, value)
        return found


class CounterFiles(MachineProbe):
    """Counters in files of one number each; the growth of one is a symptom."""

    def __init__(
        self,
        name: str,
        root: Path,
        found: Mapping[str, tuple[tuple[str, ...], Growth]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            name: of the probe.
            root: what paths are below.
            found: a symptom's name to patterns of paths, and how much growth it takes.
            clock: seconds of a monotonic clock.
        """
        self.name, self._root, self._found, self._clock = name, root, found, clock
        self.symptoms = tuple(found)
        self.reads = ", ".join(f"/{each}" for patterns, _ in found.values() for each in patterns)

    def read(self) -> Mapping[str, float]:
        """See `Probe`."""
        found, any_there, details = dict[str, float](), False, []
        for symptom, (patterns, growth) in self._found.items():
            values = dict(self._values(patterns))
            any_there = any_there or bool(values)
            if grown := growth.grown(values, self._clock()):
                found[symptom] = len({os.path.dirname(path) for path in grown})
                details += grown
        if not any_there:
            raise UnavailableError(f"none of these is there: {self.reads}")
        self.detail = ", ".join(details)
        return found

    def _values(self, patterns: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for file in (file for each in patterns for file in sorted(self._root.glob(each))):
            # Interfaces without a device are virtual: those of containers come and go all day.
            if "net" in file.parts and not (file.parent / "device").exists():
                continue
            yield f"/{file.relative_to(self._root)}", int(file.read_text())


def links(root: Path, clock: Callable[[], float] = time.monotonic) -> CounterFiles:
    """Return the probe of network interfaces that lose their link."""
    ports = "sys/class/infiniband/*/ports/*/counters"
    paths = (
        "sys/class/net/*/carrier_down_count",
        f"{ports}/link_downed",
        f"{ports}/link_error_recovery",
    )
    return CounterFiles("links", root, {"link": (paths, Growth())}, clock=clock)


def dram(root: Path, clock: Callable[[], float] = time.monotonic) -> CounterFiles:
    """Return the probe of DRAM: any error that is not corrected, or 100 corrected in an hour."""
    folder = "sys/devices/system/edac/mc/mc*"
    counters = {
        "dram": ((f"{folder}/ue_count",), Growth()),
        "dram_corrected": ((f"{folder}/ce_count",), Growth(100)),
    }
    return CounterFiles("dram", root, counters, clock=clock)


class MemoryPressure(MachineProbe):
    """Memory that runs out: stalls of all tasks for want of it, a full cgroup, killed processes."""

    name = "memory"
    symptoms = ("memory", "oom_kill")
    reads = "/proc/pressure/memory, memory.current, .max and .events of this process's cgroup"
    stalled_percent = 10.0
    full_share = 0.95

    def __init__(self, root: Path) -> None:
        """Prepare to read below `root`."""
        self._root = root
        self._kills = Growth()

    def read(self) -> Mapping[str, float]:
        """See `Probe`."""
        cgroup, found, details = self._cgroup(), dict[str, float](), []
        stalled = _stalled(self._root / "proc/pressure/memory")
        used = _used_share(cgroup)
        kills = _fields(cgroup / "memory.events").get("oom_kill")
        if kills is None:  # not in a cgroup that is told of them: of the whole machine
            kills = _fields(self._root / "proc/vmstat").get("oom_kill")
        if stalled is None and used is None and kills is None:
            raise UnavailableError(
                "there is no /proc/pressure/memory, and no cgroup v2 with a limit"
            )
        if stalled is not None and stalled >= self.stalled_percent:
            details.append(f"all tasks waited for memory in {stalled:g} % of the last 10 s")
        if used is not None and used >= self.full_share:
            details.append(f"the cgroup uses {used:.0%} of its memory.max")
        if details:
            found["memory"] = 1.0
        if kills is not None and self._kills.grown({"kills": kills}, 0.0):
            found["oom_kill"] = 1.0
            details.append("the kernel has killed a process for want of memory")
        self.detail = ", ".join(details)
        return found

    def _cgroup(self) -> Path:
        text = _text(self._root / "proc/self/cgroup") or ""
        inside = next((line[3:] for line in text.splitlines() if line.startswith("0::")), "/")
        return self._root / "sys/fs/cgroup" / inside.lstrip("/")


def _stalled(file: Path) -> float | None:
    """Return the percentage of the last 10 s in which all tasks stood still; None: not known."""
    found = re.search(r"^full avg10=([\d.]+)", _text(file) or "", re.MULTILINE)
    return float(found[1]) if found else None


def _used_share(cgroup: Path) -> float | None:
    """Return the used share of a cgroup's memory, without the cache of files that can be dropped.

    With that cache, which a data loader fills at once, every cgroup would be full.
    Source: the working set of kubelet, https://kubernetes.io/docs/concepts/scheduling-eviction/
    node-pressure-eviction/.
    """
    used, most = _text(cgroup / "memory.current"), _text(cgroup / "memory.max")
    if used is None or most is None or not most.strip().isdigit() or int(most) == 0:
        return None
    return (int(used) - _fields(cgroup / "memory.stat").get("inactive_file", 0)) / int(most)


def _text(file: Path) -> str | None:
    try:
        return file.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def _fields(file: Path) -> dict[str, int]:
    """Return a file's lines of a name and a number."""
    pairs = (line.split() for line in (_text(file) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


class KernelLog(MachineProbe):
    """Errors that the driver of NVIDIA's GPUs has written to the kernel's log since the start.

    Those count that NVIDIA's catalog answers with a reset of the GPU or a reboot, now or when
    convenient; 63, a row that was remapped, is to be ignored there.
    Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
    """

    name = "xid"
    symptoms = ("gpu_error",)
    reads = "/dev/kmsg, lines `NVRM: Xid`"
    xids = frozenset({46, 48, 62, 64, 74, 79, 94, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158})
    _line = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)")

    def __init__(self, root: Path) -> None:
        """Prepare to read below `root`."""
        self._file = root / "dev/kmsg"
        self._fd: int | None = None

    def read(self) -> Mapping[str, float]:
        """See `Probe`."""
        if self._fd is None:
            try:
                self._fd = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError) as error:
                raise UnavailableError(
                    f"/dev/kmsg: {error.strerror} (see /proc/sys/kernel/dmesg_restrict)"
                ) from error
            os.lseek(self._fd, 0, os.SEEK_END)
        seen = [
            (device, int(xid))
            for device, xid in self._line.findall(self._new_text(self._fd))
            if int(xid) in self.xids
        ]
        self.detail = ", ".join(f"GPU {device}: Xid {xid}" for device, xid in seen[:4])
        return {"gpu_error": len({device for device, _ in seen})} if seen else {}

    def _new_text(self, fd: int) -> str:
        found = []
        while True:
            try:
                record = os.read(fd, 8192)  # the device gives one record at a time
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they could be read
                continue
            if not record:
                break
            found.append(record.decode(errors="replace"))
        return "".join(found)

    def __del__(self) -> None:
        """Close the log."""
        if self._fd is not None:
            os.close(self._fd)
