"""One emulated machine: start it, read its console, stop it in any way a machine stops."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.guest.image import Image

MIB = 1 << 20
NVDIMM_BYTES = 514 * MIB  # less the label, a multiple of 16 MiB; xfs wants more than 300 MiB
LABEL_BYTES = 2 * MIB
CXL_BYTES = 256 * MIB


class GuestError(Exception):
    """The machine did not do what the job waits for; the message ends with its console."""


@dataclass(frozen=True)
class Hardware:
    """The hardware says which memory a machine has; its contents live in files of a folder."""

    kind: str
    """`nvdimm`, `cxl` or `virtio`."""
    persistence: str = ""
    """The NVDIMM says this of the platform: `mem-ctrl` (ADR), `cpu` (eADR) or nothing."""
    hosted: bool = False
    """The guest can mount the host's root, read-only."""

    def arguments(self, folder: Path) -> list[str]:
        """Return QEMU's arguments; backing files are made where there are none."""
        arguments = ["-m", f"{'2G' if self.hosted else '1G'},slots=4,maxmem=8G"]
        if self.hosted:
            share = "local,path=/,security_model=none,readonly=on,mount_tag=host,multidevs=remap"
            arguments += ["-virtfs", share]
        return arguments + self._memory(folder)

    def _memory(self, folder: Path) -> list[str]:
        if self.kind == "nvdimm":
            file = _backing(folder / "nvdimm", NVDIMM_BYTES)
            domain = f",nvdimm-persistence={self.persistence}" if self.persistence else ""
            return [
                *("-machine", f"q35,nvdimm=on{domain}"),
                *("-object", f"{_memory('nv', file)},align=2M"),
                *("-device", f"nvdimm,id=nvdimm0,memdev=nv,label-size={LABEL_BYTES}"),
            ]
        if self.kind == "virtio":
            file = _backing(folder / "virtio", NVDIMM_BYTES - LABEL_BYTES)
            return [
                *("-machine", "q35", "-object", _memory("vp", file)),
                *("-device", "virtio-pmem-pci,memdev=vp,id=virtio0"),
            ]
        assert self.kind == "cxl", self.kind
        file, labels = _backing(folder / "cxl", CXL_BYTES), _backing(folder / "labels", MIB)
        # Two root ports: with one, Linux 6.1 takes the host bridge's decoder for a pass-through
        # and QEMU 7.2 reads zeros. A serial number: without one, labels do not hold over a boot.
        return [
            *("-machine", "q35,cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G"),
            *("-object", _memory("cm", file), "-object", _memory("cl", labels)),
            *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"),
            *("-device", "cxl-rp,port=0,bus=cxl.1,id=port0,chassis=0,slot=2"),
            *("-device", "cxl-rp,port=1,bus=cxl.1,id=port1,chassis=0,slot=3"),
            *("-device", "cxl-type3,bus=port0,memdev=cm,lsa=cl,sn=0x1234,id=cxl0"),
        ]


def _backing(file: Path, size: int) -> Path:
    if not file.exists():
        with open(file, "xb") as new:
            new.truncate(size)
    return file


def _memory(name: str, file: Path) -> str:
    size = file.stat().st_size
    return f"memory-backend-file,id={name},share=on,mem-path={file},size={size}"


@dataclass(eq=False)
class Machine:
    """A running guest. Leaving the context kills it, whatever happened."""

    image: Image
    hardware: Hardware
    folder: Path
    words: list[str]
    """The guest's init is given these words: medium, age, steps."""
    limit_s: float = 120.0
    """The limit counts from its start on; then whoever waits gets an error."""
    lines: list[str] = field(default_factory=list)

    def __enter__(self) -> Machine:
        """Power on."""
        command = [
            *("setpriv", "--pdeathsig", "KILL"),  # becomes QEMU: no orphan if this process dies
            *("qemu-system-x86_64", *self.hardware.arguments(self.folder)),
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"),
            *("-kernel", str(self.image.kernel), "-initrd", str(self.image.initramfs)),
            *("-append", f"console=ttyS0 panic=-1 no_timer_check quiet -- {' '.join(self.words)}"),
            *("-nic", "none", "-nodefaults", "-no-user-config", "-display", "none"),
            *("-no-reboot", "-serial", "stdio"),
        ]
        self._changed = threading.Condition()
        self._ended = False
        self._deadline = time.monotonic() + self.limit_s
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/sbin:/usr/sbin"},
        )
        assert self._process.stdout is not None
        self._console = self._process.stdout.fileno()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill it if it still runs."""
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        """Take what comes, under the lock: `catch_up` can then see that nothing is on its way."""
        rest = b""
        while True:
            select.select([self._console], [], [])
            with self._changed:
                some = os.read(self._console, 1 << 16)
                *whole, rest = (rest + some).split(b"\n")
                self.lines += [line.decode("ascii", "replace").strip() for line in whole]
                self._ended = not some
                self._changed.notify_all()
                if not some:
                    return

    def catch_up(self) -> None:
        """Wait until every line that a frozen machine has sent is in `lines`."""
        with self._changed:
            self._changed.wait_for(lambda: not select.select([self._console], [], [], 0)[0])

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait for something that the console shows.

        Raises:
            GuestError: the machine ended or its time is up before.
        """
        with self._changed:
            while not holds():
                left = self._deadline - time.monotonic()
                if self._ended or left <= 0:
                    why = "the machine ended" if self._ended else f"{self.limit_s:.0f} s are up"
                    raise GuestError(f"{why}, waiting for {what}; its console:\n" + self.console())
                self._changed.wait(min(left, 1.0))

    def says(self, pattern: str) -> None:
        """Wait for a line that matches."""
        self.until(repr(pattern), lambda: self.all(pattern) != [])

    def all(self, pattern: str) -> list[re.Match[str]]:
        """Every complete line that matches from its beginning."""
        found = (re.match(pattern, line) for line in list(self.lines))
        return [match for match in found if match]

    def last(self, pattern: str) -> int:
        """The number in the last line that matches, or 0."""
        matches = self.all(pattern)
        return int(matches[-1][1]) if matches else 0

    def console(self) -> str:
        """Return what the machine said last."""
        return "\n".join(f"    {line}" for line in self.lines[-40:])

    def wait_off(self) -> None:
        """Wait until the guest has powered itself off."""
        self.says("POWEROFF")
        self._process.wait(timeout=max(1.0, self._deadline - time.monotonic()))
        self._reader.join()

    def kill(self) -> None:
        """Pull the plug, and read what was on the wire; idempotent."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def freeze(self) -> None:
        """Stop it between two instructions; on return no thread of it runs."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it run on."""
        self._process.send_signal(signal.SIGCONT)
