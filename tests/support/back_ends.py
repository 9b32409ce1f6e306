"""Every back end on every medium this machine has, as the conformance suite sees them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightck.errors import PmdkMissingError
from lightck.region.backends import pmdk
from lightck.region.location import Backend
from lightck.region.medium import POWER_LOSS, PROCESS_DEATH
from support.regions import Book

_OVERCOMMIT = Path("/proc/sys/vm/nr_overcommit_hugepages")
POOL_BYTES = 32 << 20


@dataclass(frozen=True)
class Kind:
    """A back end on a medium, and what it promises."""

    name: str
    medium: str
    backend: Backend = "auto"
    survives: str = PROCESS_DEATH
    durable: bool = True
    site_pool: bool = False

    @property
    def grows(self) -> bool:
        """Say whether it grows beyond what was set aside when it was made."""
        return self.backend == "auto"

    @property
    def shared(self) -> bool:
        """Readers in other processes see it while it is written."""
        return self.backend != "pmemobj"


KINDS = (
    Kind("native-tmpfs", "tmpfs"),
    Kind("native-disk", "disk", survives=POWER_LOSS),
    Kind("native-process-durable", "disk", durable=False),
    Kind("native-hugetlbfs", "hugetlbfs"),
    Kind("native-dax", "dax", survives=POWER_LOSS),
    Kind("pmemobj-tmpfs", "tmpfs", "pmemobj"),
    Kind("pmemobj-disk", "disk", "pmemobj", survives=POWER_LOSS),
    Kind("pmemobj-site-pool", "disk", "pmemobj", survives=POWER_LOSS, site_pool=True),
    Kind("pmemobj-dax", "dax", "pmemobj", survives=POWER_LOSS),
)


@dataclass(frozen=True)
class Ground:
    """A kind with a place of its own."""

    kind: Kind
    path: Path

    def book(self, *, slots: int = 2) -> Book:
        """Its region, made or opened for writing."""
        return Book(self.path, slots=slots, durable=self.kind.durable, backend=self.kind.backend)

    @property
    def file(self) -> Path:
        """The file that holds the region."""
        if self.path.is_file():
            return self.path
        (file,) = [f for f in self.path.iterdir() if f.suffix in (".lck", ".obj")]
        return file


def needs_pmdk(library: str) -> None:
    """Skip, saying why, where the library is not installed; `auto` needs none."""
    try:
        if library == "pmem2":
            pmdk.pmem2()
        elif library == "pmemobj":
            pmdk.pmemobj()
    except PmdkMissingError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def prepared(kind: Kind) -> Iterator[Ground]:
    """A ground that is removed afterwards; skips where the machine cannot have it."""
    needs_pmdk(kind.backend)
    with _folder(kind.medium) as folder:
        path = folder / "run"
        if kind.site_pool:
            make_pool(path)
        yield Ground(kind, path)


def make_pool(path: Path, size: int = POOL_BYTES) -> None:
    """A pool as a site's administrator makes one, with `pmempool create obj`."""
    handle = pmdk.pmemobj().pmemobj_create(os.fsencode(path), b"site", size, 0o600)
    assert handle != pmdk.ffi.NULL, pmdk.text_of(pmdk.pmemobj().pmemobj_errormsg())
    pmdk.pmemobj().pmemobj_close(handle)


@contextlib.contextmanager
def _folder(medium: str) -> Iterator[Path]:
    if medium == "hugetlbfs":
        with _huge_pages() as folder:
            yield folder
        return
    parents = {"tmpfs": "/dev/shm", "disk": os.environ.get("LCK_TEST_DISK", "/var/tmp")}
    parent = parents.get(medium) or os.environ.get("LCK_TEST_DAX")
    if parent is None:
        pytest.skip("LCK_TEST_DAX names no folder on a DAX file system")
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _huge_pages() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="lightck-huge-")
    mount = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", folder]
    try:
        before = _OVERCOMMIT.read_text()
        _OVERCOMMIT.write_text("64")
        done = subprocess.run(mount, capture_output=True, text=True)
        why = done.stderr.strip()
    except OSError as error:
        before, why = "", str(error)
    if why or not before:
        os.rmdir(folder)
        pytest.skip(f"no hugetlbfs: {why}")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", folder], check=True)
        os.rmdir(folder)
        _OVERCOMMIT.write_text(before)
