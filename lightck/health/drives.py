"""The probe of the block devices that the region lies on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightck.errors import LightckError
from lightck.health.drive_model import DAY_S, SMART, DriveModel
from lightck.health.machine import MachineProbe
from lightck.health.monitor import UnavailableError

_SMARTCTL_S = 30.0  # a drive that is failing may take that long for a sector
_WEEK_S = 7 * DAY_S
_BETWEEN_S = 3600.0  # seconds between readings that are kept for differences
_NVME_HOT = 2  # of the bits of NVMe's critical warning, the one that says nothing of the data


class Drives(MachineProbe):
    """Drives, persistent memory and arrays under the region that fail or have begun to.

    A drive counts where its own verdict is bad, SMART 5 and 197 (reallocated and pending sectors)
    are both above 0, or NVMe warns of more than heat; persistent memory where it has bad blocks; an
    array where it is degraded. With a model, that one's hazard takes the place of SMART 5 and 197.
    `smartctl` needs root on most machines. The kernel's `ioerr_cnt` is not read: it counts every
    command with a result that is not 0, and `smartctl -H` itself is one (`scsi_complete` in
    drivers/scsi/scsi_lib.c).
    Sources: smartctl(8); NVM Express Base Specification, SMART / Health Information log page.
    """

    name = "drives"
    period_s = 600.0
    symptoms = ("drive",)

    def __init__(
        self,
        region: str | os.PathLike[str],
        root: Path = Path("/"),
        *,
        model: str | os.PathLike[str] | None = None,
        smartctl: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            region: a path on the file system of the region.
            root: what /sys and /dev are below.
            model: a file of `lightck health --fit`.
            smartctl: the program; default: that of PATH, or in /usr/sbin.
            clock: seconds of a monotonic clock.

        Raises:
            LightckError: the model cannot be read.
        """
        self._region, self._root, self._clock = region, root, clock
        self._model = None if model is None else DriveModel.read(Path(model))
        found = shutil.which("smartctl") or shutil.which("smartctl", path="/usr/sbin:/sbin")
        self._smartctl = smartctl or found
        self._earlier: dict[str, deque[tuple[float, dict[int, float]]]] = {}
        self.lacks = ""
        judged = "SMART 5 and 197" if self._model is None else f"the model of {model}"
        self.reads = f"smartctl -H -A ({judged}), badblocks, md/degraded of {region}"

    def read(self) -> Mapping[str, float]:
        """See `Probe`."""
        disks = list(self._disks())
        if not disks:
            raise UnavailableError(f"no block device is under {os.fspath(self._region)}")
        problems = {disk.name: [*self._problems(disk)] for disk in disks}
        bad = {name: whys for name, whys in problems.items() if whys}
        self.detail = "; ".join(f"{name}: {', '.join(whys)}" for name, whys in bad.items())
        return {"drive": len(bad)} if bad else {}

    def _disks(self) -> Iterator[Path]:
        """Yield the folders below /sys of the disks that the region is on, and arrays of these."""
        try:
            device = os.stat(self._region).st_dev
        except OSError as error:
            raise UnavailableError(f"{os.fspath(self._region)}: {error.strerror}") from error
        link = self._root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
        if link.exists():
            yield from _whole_disks(link.resolve())

    def _problems(self, disk: Path) -> Iterator[str]:
        degraded, bad = disk / "md/degraded", disk / "badblocks"
        if degraded.exists() and (lacks := int(degraded.read_text())):
            yield f"the array lacks {lacks} drives"
        if disk.name.startswith("pmem") and bad.exists() and bad.read_text().strip():
            yield "bad blocks"
        if not disk.name.startswith(("pmem", "md", "dm-", "loop")):
            yield from self._smart(disk.name)

    def _smart(self, name: str) -> Iterator[str]:
        told = self._ask_smartctl(name)
        if told.get("smart_status", {}).get("passed") is False:
            yield "its own verdict is that it fails"
        warning = told.get("nvme_smart_health_information_log", {}).get("critical_warning", 0)
        if warning & ~_NVME_HOT:
            yield f"NVMe critical warning {warning:#x}"
        values = _smart_values(told)
        if self._model is not None and values:
            hazard = self._model.hazard(values, self._week_ago(name, values))
            if hazard >= self._model.alarm:
                yield f"the model reckons with a failure within {1 / hazard:.0f} days"
        elif values.get(5, 0) > 0 and values.get(197, 0) > 0:
            yield f"{values[5]:.0f} reallocated and {values[197]:.0f} pending sectors"

    def _ask_smartctl(self, name: str) -> dict[str, Any]:
        """Return what smartctl says of a drive; empty, and `lacks` says why, if it may not."""
        if self._smartctl is None:
            self.lacks = "smartctl is not installed (package smartmontools)"
            return {}
        command = [self._smartctl, "-j", "-H", "-A", f"/dev/{name}"]
        # Its status says what is bad about the drive, too: the document says whether it could ask.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SMARTCTL_S, check=False
        )
        try:
            told = json.loads(done.stdout)
            messages = told["smartctl"].get("messages", [])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LightckError(
                f"{' '.join(command)} gave no JSON of smartctl's, but {done.stdout[:200]!r}"
            ) from error
        known = {"smart_status", "ata_smart_attributes", "nvme_smart_health_information_log"}
        self.lacks = "" if known & told.keys() else "; ".join(each["string"] for each in messages)
        return dict(told)

    def _week_ago(self, name: str, values: dict[int, float]) -> dict[int, float]:
        """Return the oldest reading of the last seven days, and keep this one for later."""
        now = self._clock()
        earlier = self._earlier.setdefault(name, deque())
        while earlier and now - earlier[0][0] > _WEEK_S:
            earlier.popleft()
        if not earlier or now - earlier[-1][0] >= _BETWEEN_S:
            earlier.append((now, values))
        return earlier[0][1]


def _whole_disks(folder: Path) -> Iterator[Path]:
    """Yield the disk of a partition, and of what is made of other devices itself and these."""
    disk = folder.parent if (folder / "partition").exists() else folder
    yield disk
    for part in sorted((disk / "slaves").glob("*")):
        yield from _whole_disks(part.resolve())


def _smart_values(told: dict[str, Any]) -> dict[int, float]:
    """Return the raw values of the attributes that the model knows, by their number."""
    found = {}
    for row in told.get("ata_smart_attributes", {}).get("table", []):
        # Some drives pack more into the raw number, and smartctl's text begins with the value.
        text = re.match(r"\d+", str(row["raw"].get("string", "")))
        if row["id"] in SMART:
            found[row["id"]] = float(text[0] if text else row["raw"]["value"])
    return found
