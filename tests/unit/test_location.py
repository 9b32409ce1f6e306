from __future__ import annotations

import dataclasses
import errno
import os
import signal
import stat
from pathlib import Path

import pytest

from lightck.errors import RegionBusyError, RegionError
from lightck.region import location
from support.processes import fork


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def generous_umask() -> object:
    """Modes must not come from the user's umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_folder_is_made_only_on_request_and_only_for_its_owner(region_dir: Path) -> None:
    run = region_dir / "run"
    where = location.locate(run, 3, create=False)
    assert not run.exists() and not where.exists
    assert where.file == run / "region-00003.lck"
    assert location.locate(run, 3, create=True) == where
    assert mode_of(run) == 0o700
    assert location.locate(run, 3, create=True) == where


def test_relative_paths_are_made_absolute(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(region_dir)
    where = location.locate("run/../run", 0, create=False)
    monkeypatch.chdir("/")
    assert where.path == region_dir / "run"


def test_a_region_appears_under_its_name_whole_or_not_at_all(region_dir: Path) -> None:
    where = location.locate(region_dir, 0, create=True)
    with location.created(where) as (fd, lock_fd):
        assert not where.exists
        os.write(fd, b"a region")
        assert os.fstat(fd).st_ino == os.fstat(lock_fd).st_ino
    assert where.file.read_bytes() == b"a region"
    assert mode_of(where.file) == 0o600
    assert where.file.stat().st_nlink == 1
    assert list(region_dir.iterdir()) == [where.file]


def test_a_region_that_could_not_be_made_leaves_nothing_behind(region_dir: Path) -> None:
    where = location.locate(region_dir, 0, create=True)
    with pytest.raises(ZeroDivisionError), location.created(where):
        raise ZeroDivisionError
    assert not list(region_dir.iterdir())
    with location.created(where):
        pass
    assert where.exists


@pytest.mark.parametrize("way", ["made", "opened"])
def test_a_child_that_is_forked_meanwhile_does_not_own_the_region(
    region_dir: Path, way: str
) -> None:
    where = location.locate(region_dir, 0, create=True)
    told, tells = os.pipe()
    if way == "opened":
        with location.created(where):
            pass
    context = location.opened(where, writable=True) if way == "opened" else location.created(where)
    with context as (_, lock_fd):
        assert location._own(lock_fd)
        child = fork()
        if child == 0:  # what a child closes is closed when fork returns in it
            os.write(tells, b".")
            signal.pause()
        os.read(told, 1)
    try:
        assert not location.is_owned(where)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tells)


def test_a_region_that_is_there_is_never_replaced(region_dir: Path) -> None:
    where = location.locate(region_dir, 0, create=True)
    with location.created(where) as (fd, _):
        os.write(fd, b"first")
    with pytest.raises(RegionBusyError, match="made by another process"), location.created(where):
        pass
    assert where.file.read_bytes() == b"first"
    assert list(region_dir.iterdir()) == [where.file]


def test_a_file_system_without_hard_links_is_told(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    where = location.locate(region_dir, 0, create=True)
    with pytest.raises(RegionError, match="not permitted; take a file"), location.created(where):
        pass
    assert not list(region_dir.iterdir())


def test_the_two_descriptors_are_of_one_file_and_carry_locks_of_their_own(
    region_dir: Path,
) -> None:
    where = location.locate(region_dir, 0, create=True)
    with location.created(where) as (fd, _):
        os.write(fd, b"a region")
    with location.opened(where, writable=True) as (fd, lock_fd):
        os.lseek(fd, 3, os.SEEK_SET)
        assert os.lseek(lock_fd, 0, os.SEEK_CUR) == 0  # not a duplicate
        assert not os.get_inheritable(fd) and not os.get_inheritable(lock_fd)
    with pytest.raises(OSError):
        os.fstat(fd)
    with location.opened(where, writable=False) as (fd, _), pytest.raises(OSError):
        os.write(fd, b"x")


def test_descriptors_are_closed_when_a_check_fails(region_dir: Path) -> None:
    where = location.locate(region_dir, 0, create=True)
    with location.created(where):
        pass
    where.file.chmod(0o666)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RegionError, match="writable by others"):
        with location.opened(where, writable=True):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_region_is_an_error_of_ours(region_dir: Path) -> None:
    where = location.locate(region_dir, 0, create=True)
    with pytest.raises(RegionError, match="cannot open: No such file"):
        with location.opened(where, writable=False):
            pass


def test_a_character_device_counts_as_devdax_and_needs_no_folder() -> None:
    where = location.locate("/dev/null", 0, create=False)
    assert where.is_device and where.exists
    assert where.file == where.path == Path("/dev/null")


def test_every_rank_is_found_in_order_and_nothing_else(region_dir: Path) -> None:
    for name in ("region-00001.lck", "region-00000.lck", "region-00002.new", "notes", "x.lck"):
        (region_dir / name).touch()
    where = location.locate(region_dir, 0, create=False)
    assert [p.file.name for p in location.every_rank(where)] == [
        "region-00000.lck",
        "region-00001.lck",
    ]
    assert location.every_rank(location.locate(region_dir / "none", 0, create=False)) == []


def test_a_folder_reaches_as_far_as_it_is_the_same_one_and_a_pool_nowhere(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    here = [location.locate(one, rank, create=True) for rank in (0, 1)]
    assert here[0].reach == here[1].reach != location.locate(other, 0, create=True).reach
    assert "" not in (here[0].reach, here[0].common)
    assert dataclasses.replace(here[0], backend="pmemobj").reach == ""
    assert dataclasses.replace(here[0], path=here[0].file).reach == ""
