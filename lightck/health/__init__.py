"""Symptoms of failures to come, as this machine shows them: probes, and the monitor that runs them.

Everything is read below a root, so that a made-up machine can be read as well.
"""

import os
from pathlib import Path

from lightck.health.drives import Drives
from lightck.health.gpu import Nvml
from lightck.health.machine import KernelLog, MachineProbe, MemoryPressure, dram, links
from lightck.health.monitor import HealthMonitor, UnavailableError

__all__ = [
    "Drives",
    "HealthMonitor",
    "KernelLog",
    "MachineProbe",
    "MemoryPressure",
    "Nvml",
    "UnavailableError",
    "dram",
    "links",
    "probes",
]


def probes(
    region: str | os.PathLike[str],
    root: Path = Path("/"),
    *,
    drive_model: str | os.PathLike[str] | None = None,
) -> tuple[MachineProbe, ...]:
    """Return all probes of this machine; nothing is read yet, and none asks the network.

    Args:
        region: a path on the file system of the region, whose drives are watched.
        root: what /proc, /sys and /dev are below.
        drive_model: a file of `lightck health --fit`, for drives.

    Raises:
        LightckError: the drive model cannot be read.
    """
    drives = Drives(region, root, model=drive_model)
    return (Nvml(), KernelLog(root), MemoryPressure(root), dram(root), links(root), drives)
