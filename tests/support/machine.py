"""A made-up machine: files below a root, as Linux has them in /proc, /sys and /dev."""

from __future__ import annotations

import csv
import os
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from lightck.health import Drives

FIRST = date(2013, 4, 10)
HEADER = [
    "date",
    "serial_number",
    "model",
    "failure",
    "smart_5_raw",
    "smart_9_raw",
    "smart_197_raw",
]


class Machine:
    """A tree of files below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def put(self, path: str, text: object) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file


class Disk:
    """A made-up disk under `region`, and a smartctl that says what a test wants."""

    def __init__(self, machine: Machine, name: str = "sda", *, partition: bool = True) -> None:
        self.machine, self.name = machine, name
        self.region = machine.root / "run"
        self.region.mkdir(exist_ok=True)
        self.folder = machine.root / "sys/devices/block" / name
        inner = self.folder / f"{name}1" if partition else self.folder
        inner.mkdir(parents=True)
        if partition:
            (inner / "partition").write_text("1\n")
        device = os.stat(self.region).st_dev
        link = machine.root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
        link.parent.mkdir(parents=True)
        link.symlink_to(inner)
        self.program = machine.put("smartctl", "")
        self.says('{"smartctl": {"exit_status": 0}, "smart_status": {"passed": true}}')

    def says(self, text: str) -> None:
        answer = self.machine.put("answer", text)
        asked = self.machine.root / "asked"
        self.program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\ncat {answer}\n')
        self.program.chmod(0o700)

    def sectors(self, reallocated: int, pending: int, **more: int) -> None:
        rows = [(5, reallocated, str(reallocated)), (197, pending, str(pending))]
        rows += [(194, 0x2600150017, "23 (Min/Max 21/38)")]
        table = ", ".join(
            f'{{"id": {number}, "raw": {{"value": {value}, "string": "{text}"}}}}'
            for number, value, text in rows
        )
        self.says(f'{{"smartctl": {{}}, "ata_smart_attributes": {{"table": [{table}]}}}}')

    def probe(self, **more: Any) -> Drives:
        return Drives(
            self.region,
            self.machine.root,
            smartctl=str(self.program),
            clock=self.machine.clock,
            **more,
        )


def write_drive_logs(
    folder: Path, random: np.random.Generator, *, drives: int, days: int
) -> list[Path]:
    """Write a day's log per file; a drive with pending sectors that grow fails soon."""
    alive = {f"S{number:05d}": [0, int(random.integers(9000)), 0] for number in range(drives)}
    files = []
    for number in range(days):
        day = FIRST + timedelta(days=number)
        file = folder / f"{day}.csv"
        files.append(file)
        with file.open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(HEADER)
            for serial, values in [*alive.items()]:
                values[1] += 24
                if random.random() < 0.004 or values[2]:
                    values[2] += int(random.integers(1, 9))
                    values[0] += int(random.integers(3))
                failed = random.random() < (0.15 if values[2] else 2e-5)
                # Some drives lack an attribute, or a day.
                reallocated: Any = "" if serial.endswith("7") else values[0]
                if not (serial.endswith("3") and number % 5 == 0 and not failed):
                    rows.writerow(
                        [day, serial, "M", int(failed), reallocated, values[1], values[2]]
                    )
                if failed:
                    del alive[serial]
                    alive[f"{serial}n"] = [0, 0, 0]
    return files
