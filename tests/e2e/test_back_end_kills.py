"""Training in a libpmemobj pool: killed anywhere, resumed, bit by bit the uninterrupted run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightck
from support.back_ends import make_pool, needs_pmdk
from support.e2e.jobs import Plain
from support.e2e.pmdk_jobs import InAPool
from support.e2e.resume import KILLS, Bed, same_end, same_steps


@pytest.fixture
def disk_bed(bed: Bed) -> Iterator[Bed]:
    """The same on an ordinary file system, where commits sync."""
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/var/tmp"))
    yield Bed(bed.server, folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_killed_training_resumes_bit_by_bit_on_memory(bed: Bed) -> None:
    needs_pmdk("pmemobj")
    bed.check(InAPool)


def test_a_killed_training_resumes_bit_by_bit_on_a_disk(disk_bed: Bed) -> None:
    needs_pmdk("pmemobj")
    disk_bed.check(InAPool, kills=("backward", "after"))


def test_a_sites_own_pool_serves_run_after_run(bed: Bed) -> None:
    """Killed again and again; only the first attach needs the back end's name."""
    needs_pmdk("pmemobj")
    make_pool(bed.folder / "run")
    plain = bed.plain(Plain)
    first = {"kill_step": 3, "kill_where": "after"}
    same_steps(bed.run(InAPool, "attach", **first).check_killed(), plain)
    for step, where in zip((4, 5, 6, 7), KILLS, strict=True):
        death = {"kill_step": step, "kill_where": where}
        same_steps(bed.run(Plain, "resume", **death).check_killed(), plain)
    last = bed.run(Plain, "resume").check_ended()
    assert last.value("restored") == 6
    same_end(last, plain)
    steps = lightck.snapshots(bed.folder / "run")["step"].to_pylist()
    assert steps == [8, 7]
