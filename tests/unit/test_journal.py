"""The boundary journal, as Python sees it: what was written last for this timeline comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lightck.errors import (
    CorruptSnapshotError,
    PreviousPersistError,
    RegionError,
    RegionFullError,
    RegionIOError,
)
from lightck.region import native_region
from lightck.region.native_pool import NativePool, NativeSnapshot
from support import faults

JOURNAL_OFFSET = 131072
JOURNAL_BYTES = 1 << 16
ENTRY_BYTES = 128


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[native_region.NativeRegion]:
    mode = os.O_RDONLY if flags & native_region.READ_ONLY else os.O_RDWR
    fds = os.open(path, mode), os.open(path, mode)
    try:
        region = native_region.NativeRegion.open(*fds, flags, None, str(path))
    finally:
        for fd in fds:
            os.close(fd)
    with closing(region):
        yield region


@pytest.fixture
def path(region_dir: Path) -> Path:
    file = region_dir / "region"
    fds = os.open(file, os.O_RDWR | os.O_CREAT), os.open(file, os.O_RDWR)
    spec = native_region.RegionSpec(
        run_id=b"journal", slot_count=2, slot_bytes=4096, journal_bytes=JOURNAL_BYTES
    )
    region = native_region.NativeRegion.create(*fds, spec, str(file))
    for fd in fds:
        os.close(fd)
    region.branch(5, [])
    region.close()
    return file


def test_the_newest_entry_and_the_two_before_it_come_back(path: Path) -> None:
    with _opened(path) as region:
        assert region.read_journal() is None
        for step in range(1, 4):
            region.write_journal(native_region.FENCE, step, 5, b"f" * step * 10)
            region.write_journal(native_region.STEP_END, step, 5, b"a" * step * 1000)
            region.write_journal(native_region.FORWARD, step, 5, b"b" * step)
    with _opened(path, native_region.READ_ONLY) as region:
        found = region.read_journal()
        before = region.read_journal(native_region.STEP_END)
        fence = region.read_journal(native_region.FENCE)
        assert found is not None and before is not None and fence is not None
        assert (found.kind, found.step, found.timeline) == (native_region.FORWARD, 3, 5)
        assert found.blob == b"bbb" and not found.early
        assert before.blob == b"a" * 3000 and before.early and before.step == 3
        assert fence.blob == b"f" * 30 and fence.early and fence.step == 3
        assert found.sequence == before.sequence + 1 == fence.sequence + 2


def test_entries_of_an_abandoned_timeline_do_not_count(path: Path) -> None:
    with _opened(path) as region:
        region.write_journal(native_region.STEP_END, 9, 5, b"old")
        region.branch(6, [(5, 1)])
        assert region.read_journal() is None
        with pytest.raises(RegionError, match="timeline 5, the region is in 6"):
            region.write_journal(native_region.FORWARD, 9, 5, b"old")


def test_an_entry_that_does_not_fit_says_by_how_much(path: Path) -> None:
    most = JOURNAL_BYTES // 3 // 4096 * 4096 - ENTRY_BYTES
    with _opened(path) as region:
        region.write_journal(native_region.STEP_END, 1, 5, b"x" * most)
        with pytest.raises(RegionFullError, match=f"{most + 1} bytes needed.* {most} there"):
            region.write_journal(native_region.FORWARD, 1, 5, b"x" * (most + 1))
        found = region.read_journal()
        assert found is not None and found.blob == b"x" * most


def test_damage_is_an_error_and_never_an_entry(path: Path) -> None:
    with _opened(path) as region:
        region.write_journal(native_region.STEP_END, 1, 5, b"one")
    with path.open("r+b") as file:
        file.seek(JOURNAL_OFFSET + ENTRY_BYTES)
        file.write(b"O")
    with _opened(path, native_region.READ_ONLY) as region, pytest.raises(CorruptSnapshotError):
        region.read_journal()


def test_a_latched_region_takes_no_entry(path: Path) -> None:
    with _opened(path) as region, closing(NativePool(1, 4096, idle=False)) as pool:
        faults.arm(faults.INVALIDATE)
        with pytest.raises(RegionIOError):
            NativeSnapshot(pool, region, 0)
        with pytest.raises(PreviousPersistError):
            region.write_journal(native_region.STEP_END, 1, 5, b"one")


WRITER = """
import os, sys
from lightck.region import native_region
path = sys.argv[1]
fds = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
region = native_region.NativeRegion.open(*fds, 0, None, path)
for step in range(1, 10**9):
    region.write_journal(native_region.FENCE, step, 5, b"%d?" % step * 400)
    region.write_journal(native_region.STEP_END, step, 5, b"%d " % step * 500)
    region.write_journal(native_region.FORWARD, step, 5, b"%d!" % step * 300)
    if step == 50:
        print("ready", flush=True)
"""


FORMS = {
    native_region.FENCE: (b"%d?", 400),
    native_region.STEP_END: (b"%d ", 500),
    native_region.FORWARD: (b"%d!", 300),
}


def test_a_writer_killed_at_any_instant_leaves_the_two_newest_entries(path: Path) -> None:
    """The step before is still there in the midst of the fence's entry, too."""
    before = {
        native_region.FENCE: native_region.FORWARD,
        native_region.STEP_END: native_region.FENCE,
    }
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        with _opened(path, native_region.READ_ONLY) as reader:
            beside = reader.read_journal()
            assert beside is not None and beside.step >= 49
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
            found = reader.read_journal()
            assert found is not None and found.step >= beside.step
            second = reader.read_journal(before.get(found.kind, native_region.STEP_END))
            assert second is not None and second.sequence == found.sequence - 1
        for entry in (found, second):
            text, count = FORMS[entry.kind]
            assert entry.blob == text % entry.step * count
