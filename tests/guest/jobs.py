"""The jobs: which medium, on which hardware, stopped how, and what that must show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.guest import damage, kills, package, snapshots
from tests.guest.kills import Bench, Case
from tests.guest.machine import Hardware
from tests.guest.verdict import Medium, Verdict, survival

ADR, EADR = Hardware("nvdimm", "mem-ctrl"), Hardware("nvdimm", "cpu")
UNKNOWN, HOSTED = Hardware("nvdimm"), Hardware("nvdimm", hosted=True)
CXL, VIRTIO = Hardware("cxl"), Hardware("virtio")

FSDAX = Medium("fsdax", "line", survival.GRAN_LINE)
FSDAX_EADR = Medium("fsdax", "byte", survival.GRAN_BYTE)
DEVDAX = Medium("devdax", "line", survival.GRAN_LINE)
FILE = Medium("file", "page", survival.GRAN_PAGE)
UNSYNCED = Medium("file", "none", survival.GRAN_NONE)
MEMORY = Medium("tmpfs", "none", survival.GRAN_NONE)


def _always(options: argparse.Namespace) -> str:
    return ""


@dataclass(frozen=True)
class Job:
    """A name to choose it by, and what it does."""

    name: str
    run: Callable[[Bench, argparse.Namespace], Iterator[Verdict]]
    unusable: Callable[[argparse.Namespace], str] = _always
    """This returns why the machine cannot run the job; empty: it can."""


def _job(how: Callable[[Case, Bench], Iterator[Verdict]], case: Case) -> Job:
    return Job(case.job, lambda bench, options: how(case, bench))


def _control(job: str, setup: str, claims: Medium, program: str, options: str = "") -> Job:
    # Only region code from which the truth was taken away lies.
    lies = program != "lckguest"
    case = Case(job, ADR, setup, claims, program, options + ":commits=40", lies)
    return _job(kills.forgetful, case)


CORE = ("fsdax-ext4", "images", "cxl-fsdax", "no-", "not-", "devdax")
"""About a minute on two idle cores: what each kind of medium keeps, and what none may."""

JOBS = [
    _job(kills.persistent, Case("fsdax-ext4", ADR, "fsdax_ext4", FSDAX)),
    Job(
        "images",
        lambda bench, options: snapshots.running(
            Case("images", ADR, "fsdax_ext4", FSDAX), bench, options.programs[0]
        ),
        lambda options: snapshots.usable(),
    ),
    _job(kills.persistent, Case("cxl-fsdax", CXL, "cxl_ext4", FSDAX)),
    _control("no-sync", "file_ext4", UNSYNCED, "lckguest", ":process"),
    _control("no-map-sync", "fsdax_ext4", FSDAX, "lckguest-liar"),
    _control("not-fsdax", "file_ext4", FSDAX, "lckguest-liar"),
    _job(kills.persistent, Case("devdax", UNKNOWN, "devdax", DEVDAX)),
    _job(kills.persistent, Case("fsdax-xfs", UNKNOWN, "fsdax_xfs", FSDAX)),
    _job(kills.persistent, Case("eadr", EADR, "fsdax_ext4", FSDAX_EADR, kills_most=1)),
    _job(kills.persistent, Case("file", ADR, "file_ext4", FILE, kills_most=2)),
    _job(kills.persistent, Case("virtio-pmem", VIRTIO, "virtio_ext4", FILE, kills_most=2)),
    _job(damage.poison, Case("poison", ADR, "fsdax_ext4", FSDAX)),
    _job(damage.failing_writes, Case("failing-writes", ADR, "flakey_ext4", FILE)),
    Job(
        "numpy",
        lambda bench, options: package.killed(
            Case("numpy", HOSTED, "hosted_ext4", FSDAX, "hosted", kills_most=1), bench, options
        ),
        package.unusable,
    ),
    _job(kills.node, Case("cxl-node", CXL, "cxl_node", MEMORY, options=":node=1")),
]


def choose(names: list[str]) -> list[Job]:
    """Jobs whose names begin with one of these, or those of the core; all when there are none."""
    names = [n for name in names for n in (CORE if name == "core" else (name,))]
    for name in names:
        if not any(job.name.startswith(name) for job in JOBS):
            known = " ".join(job.name for job in JOBS)
            sys.exit(f"no guest job begins with {name!r}; there are: {known}")
    return [job for job in JOBS if not names or any(job.name.startswith(n) for n in names)]
