"""PMDK alone has these: pools of a site, refusals, media; or it is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightck
import lightck.pmdk
from lightck.cli.main import main
from lightck.errors import (
    ConfigError,
    PmdkMissingError,
    RegionBusyError,
    RegionError,
    RegionFullError,
)
from lightck.region import location
from lightck.region.backends import libpmem2, libpmemobj, pmdk, select
from lightck.region.region import Region
from support import processes
from support.back_ends import POOL_BYTES, make_pool, needs_pmdk
from support.loops import adam_loop, attach, of_live, restored, steps_at, train
from support.regions import Book, newest, random_contents, stored

SIZES = {"a": 1, "d": 100_000}


@pytest.fixture
def with_pmem2() -> None:
    needs_pmdk("pmem2")


@pytest.fixture
def with_pmemobj() -> None:
    needs_pmdk("pmemobj")


@pytest.fixture
def without_pmdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine where no library of PMDK can be loaded."""

    def refuse(name: str | None) -> Any:
        raise OSError(f"cannot load library {name!r}: no such file")

    pmdk.pmem2.cache_clear()
    pmdk.pmemobj.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(pmdk.ffi, "dlopen", refuse)
        yield
    pmdk.pmem2.cache_clear()
    pmdk.pmemobj.cache_clear()


# ---- without PMDK ----


def test_without_its_library_the_back_end_names_the_package_and_makes_nothing(
    without_pmdk: None, run_dir: Path
) -> None:
    with pytest.raises(PmdkMissingError, match="apt-get install libpmemobj1$"):
        lightck.attach(torch.nn.Linear(2, 2), path=run_dir, backend="pmemobj")
    assert not list(run_dir.iterdir())


def test_a_back_end_that_is_none_is_refused_with_those_that_exist(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="must be one of 'auto', 'pmemobj'"):
        lightck.attach(torch.nn.Linear(2, 2), path=run_dir, backend="pmem2")


def test_without_pmdk_everything_else_works(
    without_pmdk: None, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_dir, adam_loop(), 2)
    assert steps_at(run_dir) == [1, 2]
    assert main(["inspect", str(run_dir)]) == 0
    assert "region-00000.lck" in capsys.readouterr().out
    with pytest.raises(PmdkMissingError, match="libpmem2"):
        lightck.pmdk.media_report(run_dir)


def test_a_pool_without_its_library_is_told_from_an_empty_path(
    with_pmemobj: None, run_dir: Path, request: pytest.FixtureRequest
) -> None:
    Book(run_dir, backend="pmemobj").close()
    request.getfixturevalue("without_pmdk")
    with pytest.raises(PmdkMissingError, match="libpmemobj1"):
        lightck.restore(torch.nn.Linear(2, 2), path=run_dir)


# ---- whose region it is ----


def test_a_snapshot_in_a_pool_is_read_as_from_anywhere(
    with_pmemobj: None, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = adam_loop()
    train(run_dir, loop, 3, backend="pmemobj")
    loop.check(run_dir, [2, 3])  # snapshots and load
    info, again = restored(run_dir)
    assert info is not None and info.step == 3
    assert of_live(again.model, again.optimizers) == loop.seen[3]
    pool = str(run_dir / "region-00000.obj")  # the pool itself, too
    for command in (["ls"], ["verify"], ["inspect"]):
        assert main([*command, str(run_dir)]) == 0
        assert main([*command, pool]) == 0
    assert capsys.readouterr().out.count("all good") == 2
    assert main(["export", str(run_dir), str(tmp_path / "model.safetensors")]) == 0
    with attach(run_dir, again) as handle:  # auto: what is there says that it is a pool
        assert handle.step == 3


def test_a_region_of_one_back_end_is_not_hidden_by_one_of_another(
    with_pmemobj: None, region_dir: Path
) -> None:
    Book(region_dir / "file").close()
    with pytest.raises(RegionError, match="is a region outside of a pool; choose another path"):
        location.locate(region_dir / "file", 0, create=True, backend="pmemobj")
    Book(region_dir / "pool", backend="pmemobj").close()
    os.link(region_dir / "file" / "region-00000.lck", region_dir / "pool" / "region-00000.lck")
    with pytest.raises(RegionError, match="beside the pool region-00000.obj"):
        location.locate(region_dir / "pool", 0, create=False)


def test_a_numa_node_is_refused_because_pmdk_maps_the_memory(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="numa_node = 0: with backend"):
        lightck.attach(torch.nn.Linear(2, 2), path=run_dir, backend="pmemobj", numa_node=0)


# ---- pools ----


def test_a_pool_with_another_applications_root_is_refused_untouched(
    with_pmemobj: None, region_dir: Path
) -> None:
    pool = region_dir / "theirs"
    make_pool(pool)
    lib, ffi = pmdk.pmemobj(), pmdk.ffi
    handle = lib.pmemobj_open(os.fsencode(pool), ffi.NULL)
    root = ffi.cast("char *", handle) + lib.pmemobj_root(handle, 4096).off
    ffi.memmove(root, b"their data", 10)
    lib.pmemobj_close(handle)
    before = pool.read_bytes()
    for attempt in (lambda: Book(pool), lambda: lightck.snapshots(pool)):
        with pytest.raises(RegionError, match=r"root object .* belongs to another application"):
            attempt()
    after = pool.read_bytes()
    assert b"their data" in after and len(after) == len(before)


def test_a_pool_that_is_too_small_names_the_bytes_and_still_takes_a_smaller_region(
    with_pmemobj: None, region_dir: Path, rng: np.random.Generator
) -> None:
    pool = region_dir / "pool"
    make_pool(pool)
    with pytest.raises(RegionFullError, match=rf"\d+ bytes needed .* a pool of {POOL_BYTES} bytes"):
        Book(pool, slot_bytes=16 << 20)
    assert select.is_blank(location.locate(pool, 0, create=False))
    assert lightck.restore(torch.nn.Linear(2, 2), path=pool) is None
    # Twice: what a failed attempt took is given back.
    with Book(pool, slot_bytes=9 << 20) as book:
        book.region.begin_timeline(None)
        assert book.commit(1, random_contents(rng, SIZES))
    assert list(stored(pool)) == [1]


def test_more_than_libpmemobj_can_give_in_one_piece_is_refused_before_it_is_tried(
    with_pmemobj: None, run_dir: Path
) -> None:
    with pytest.raises(RegionFullError, match=f"largest has {libpmemobj.MOST_BYTES}"):
        Book(run_dir, slot_bytes=8 << 30, backend="pmemobj")
    assert not list(run_dir.iterdir())


@pytest.mark.parametrize("moment", ["allocate", "made"])
def test_a_creation_that_was_killed_is_done_again(
    with_pmemobj: None, run_dir: Path, rng: np.random.Generator, moment: str
) -> None:
    """Killed when space was allocated, and when the region in it was whole but not yet named."""

    def make(parent: processes.Parent) -> None:
        real = getattr(libpmemobj.Pool, moment)

        def stopped(self: libpmemobj.Pool, *arguments: int) -> None:
            if moment == "allocate":
                real(self, *arguments)
            parent.send("there")
            parent.pause()

        setattr(libpmemobj.Pool, moment, stopped)
        Book(run_dir, backend="pmemobj")

    child = processes.start(make)
    assert child.receive() == "there"
    child.kill()
    assert child.join() == -signal.SIGKILL
    assert lightck.snapshots(run_dir).num_rows == 0
    assert lightck.restore(torch.nn.Linear(2, 2), path=run_dir) is None
    with Book(run_dir) as book:  # what is there says that it is a pool
        book.region.begin_timeline(None)
        assert book.commit(1, random_contents(rng, SIZES))
    assert list(stored(run_dir)) == [1]


def test_files_that_are_no_pools_are_refused_with_what_they_are(region_dir: Path) -> None:
    some, pool_set = region_dir / "some", region_dir / "set"
    some.write_bytes(b"PMEMOBJECTIONS" + bytes(5000))
    pool_set.write_text("PMEMPOOLSET\n100M /dev/shm/part0\n")
    with pytest.raises(RegionError, match="is a file but no libpmemobj pool, expected a folder"):
        location.locate(some, 0, create=True)
    with pytest.raises(RegionError, match="is a pool set"):
        location.locate(pool_set, 0, create=True)
    (region_dir / "link").symlink_to(some)
    with pytest.raises(RegionError, match="is a symbolic link"):
        location.locate(region_dir / "link", 0, create=True)


def test_a_damaged_pool_is_an_error_in_libpmemobjs_words(with_pmemobj: None, run_dir: Path) -> None:
    Book(run_dir, backend="pmemobj").close()
    with (run_dir / "region-00000.obj").open("r+b") as file:
        file.seek(40)  # in the pool's checked header
        file.write(b"\xff" * 64)
    with pytest.raises(RegionError, match="libpmemobj: .+ \\(errno"):
        lightck.snapshots(run_dir)


def test_a_refusal_for_want_of_a_shutdown_counter_says_what_to_set(
    with_pmemobj: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(libpmemobj, "text_of", lambda _: "Cannot read unsafe shutdown count")
    error = libpmemobj._refusal(tmp_path, 5)
    assert "PMEMOBJ_CONF=sds.at_create=0" in str(error)
    monkeypatch.setattr(libpmemobj, "text_of", lambda _: "no space")
    assert "PMEMOBJ_CONF" not in str(libpmemobj._refusal(tmp_path, 5))


def test_a_process_that_was_forked_and_exits_leaves_pool_and_mapping_alone(
    with_pmemobj: None, region_dir: Path
) -> None:
    """The process ends with Python's and the library's own ends, not `os._exit`."""
    code = f"""
import os, sys
import numpy as np
from pathlib import Path
from support.regions import Book, random_contents, newest
rng = np.random.default_rng(1)
book = Book(Path({str(region_dir)!r}) / "own", backend="pmemobj")
book.region.begin_timeline(None)
assert book.commit(1, random_contents(rng, {SIZES!r}))
pid = os.fork()
if pid == 0:
    again = Book(Path({str(region_dir)!r}) / "child", backend="pmemobj")
    again.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert book.commit(2, random_contents(rng, {SIZES!r}))
assert newest(book.region)[0] == 2
book.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_handles_of_one_process_share_a_pool_and_the_last_one_closes_it(
    with_pmemobj: None, run_dir: Path
) -> None:
    book = Book(run_dir, backend="pmemobj")
    reader = Region.open(book.where, writable=False)
    book.close()
    with pytest.raises(RegionBusyError, match="one at a time"):
        processes.run(lambda: Region.open(book.where, writable=False))
    reader.close()
    processes.run(lambda: Region.open(book.where, writable=False).close())


# ---- media ----


def test_a_forced_granularity_is_told(
    with_pmem2: None, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Book(disk_dir).close()
    (report,) = lightck.pmdk.media_report(disk_dir)
    assert (report.granularity, report.forced) == ("page", False)
    monkeypatch.setenv("PMEM2_FORCE_GRANULARITY", "CACHE_LINE")
    (report,) = lightck.pmdk.media_report(disk_dir)
    assert (report.granularity, report.forced) == ("cache line", True)


def test_unsafe_shutdowns_and_bad_blocks_are_reported(
    with_pmem2: None,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = libpmem2.media_of

    def counted(fd: int, label: str) -> libpmem2.Media:
        found = real(fd, label)
        return libpmem2.Media(
            found.granularity, "8089-a2-1837", 0, ((4096, 512),), 5, found.unknown
        )

    Book(run_dir).close()
    monkeypatch.setattr(libpmem2, "media_of", counted)
    (report,) = lightck.pmdk.media_report(run_dir)
    assert (report.device, report.unsafe_shutdowns) == ("8089-a2-1837", 5)
    assert report.bad_blocks == ((4096, 512),)
    assert main(["inspect", str(run_dir), "--json"]) == 0
    assert '"unsafe_shutdowns": 5' in capsys.readouterr().out


def test_what_libpmem2_cannot_tell_is_none_with_its_reason(with_pmem2: None, run_dir: Path) -> None:
    with pytest.raises(lightck.NoSnapshotError, match="no lightck region"):
        lightck.pmdk.media_report(run_dir)
    Book(run_dir).close()
    (report,) = lightck.pmdk.media_report(run_dir)
    assert report.granularity == "page"  # tmpfs: what it would do, were it a disk
    assert report.unsafe_shutdowns is None
    assert any(text.startswith("device_usc: ") for text in report.unknown)
    assert newest(Region.open(location.locate(run_dir, 0, create=False), writable=False))[0] is None
