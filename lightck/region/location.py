"""Find, check and open the file, pool or device where a region lives, never through a symlink."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightck.errors import RegionBusyError, RegionError, RegionFullError

OTHERS_WRITE = 0o022
_POOL_SIGNATURE, _SET_SIGNATURE = b"PMEMOBJ\0", b"PMEMPOOLSET"
OWNER_BYTE = (2**63 - 1) // 2
"""The byte of the file that the owner locks, as in native/src/lock.c."""
_FLOCK = "hhqqi4x"
"""The `struct` format of a `struct flock` of 64-bit Linux: type, whence, start, length, process."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a medium that has no room."""
_USUAL_BLOCKS = 1 << 20
"""The largest block size of an ordinary file system; larger blocks are huge pages."""


@dataclass(frozen=True, slots=True)
class Location:
    """A checked location: a folder with one region file per rank, a pool, or a device."""

    path: Path
    file: Path
    is_device: bool
    backend: Literal["native", "pmemobj"] = "native"
    """The library that maps the region for its owner; a region in a pool can be reached only
    through libpmemobj."""

    @property
    def is_plain(self) -> bool:
        """Return whether the region is a file of its own, which anyone may map."""
        return not self.is_device and self.backend != "pmemobj"

    @property
    def common(self) -> str:
        """Return the part of the location that must be the same on every rank."""
        if self.path == self.file:
            return "a device or pool of its own"
        return os.fspath(self.path)

    @property
    def reach(self) -> str:
        """Return a text equal on ranks of one node that can read each other's regions.

        It is empty where no other rank can: a pool is open in one process at a time. The path alone
        would not do, because containers may mount different media at one path.
        """
        if not self.is_plain or self.path == self.file:
            return ""
        status = os.stat(self.path)
        return f"{status.st_dev:x}:{status.st_ino:x}"

    @property
    def exists(self) -> bool:
        """Return whether a region file or the device is there already."""
        return self.is_device or _status(self.file) is not None


Backend = Literal["auto", "pmemobj"]


def locate(
    path: str | os.PathLike[str], rank: int, *, create: bool, backend: Backend = "auto"
) -> Location:
    """Check `path` and return the location of the rank's region.

    Args:
        path: a folder (one region file or pool per rank inside), a libpmemobj pool, or a devdax
            character device.
        rank: names the file.
        create: make the folder (mode 0700) when only its last component is missing.
        backend: the library that maps a region for its owner. `auto`: libpmemobj for a region in a
            pool, the native writer for any other.

    Raises:
        RegionError: a symlink, a file or another kind of device in its place; owned by another
            user or writable by others; the parent folder is missing; a region of another back
            end. Nothing was changed.
    """
    root = Path(os.path.abspath(path))
    status = _status(root)
    if status is None:
        if not root.parent.is_dir():
            raise RegionError(f"{root}: the parent folder {root.parent} does not exist; make it")
        if create:
            _make_folder(root)
        return _in_folder(root, rank, backend)
    if stat.S_ISLNK(status.st_mode):
        raise RegionError(f"{root} is a symbolic link; give the folder it points to")
    if stat.S_ISCHR(status.st_mode):
        if backend == "pmemobj":
            raise RegionError(f"{root} is a device; libpmemobj pools are taken from files only")
        return Location(root, root, is_device=True)
    if stat.S_ISREG(status.st_mode):
        return _pool_file(root, status)
    if not stat.S_ISDIR(status.st_mode):
        raise RegionError(
            f"{root} is a block device or special file, expected a folder, a libpmemobj pool or"
            " a devdax device"
        )
    _check_owner(root, status, "folder")
    return _in_folder(root, rank, backend)


def _in_folder(root: Path, rank: int, backend: Backend) -> Location:
    file, pool = root / f"region-{rank:05d}.lck", root / f"region-{rank:05d}.obj"
    is_file, is_pool = _status(file) is not None, _status(pool) is not None
    if is_file and (is_pool or backend == "pmemobj"):
        raise RegionError(
            f"{file} is a region outside of a pool"
            + (f", beside the pool {pool.name}; move one of them away" if is_pool else
               "; choose another path, or a back end other than pmemobj")
        )  # fmt: skip
    if is_pool or backend == "pmemobj":
        return Location(root, pool, is_device=False, backend="pmemobj")
    return Location(root, file, is_device=False)


def _pool_file(root: Path, status: os.stat_result) -> Location:
    _check_owner(root, status, "file")
    fd = _open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        head = os.pread(fd, len(_SET_SIGNATURE), 0)
    finally:
        os.close(fd)
    if head == _SET_SIGNATURE:
        raise RegionError(f"{root} is a pool set; lightck takes pools that are one file")
    if not head.startswith(_POOL_SIGNATURE):
        raise RegionError(
            f"{root} is a file but no libpmemobj pool, expected a folder, a pool or a devdax device"
        )
    return Location(root, root, is_device=False, backend="pmemobj")


def every_rank(where: Location) -> list[Location]:
    """Return the locations of the region files and pools in a folder.

    A device or a pool is one region.

    Raises:
        RegionError: the folder may not be read.
    """
    if where.path == where.file:
        return [where]
    names = _names_in(where.path)
    backends: dict[str, Literal["native", "pmemobj"]] = {".lck": "native", ".obj": "pmemobj"}
    return [
        Location(where.path, where.path / name, is_device=False, backend=backends[name[-4:]])
        for name in names
        if name.startswith("region-") and name[-4:] in backends
    ]


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder, in order; none if it is not there."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RegionError(f"{folder}: cannot list the folder: {error.strerror}") from error


def failure_files(where: Location) -> list[Location]:
    """Return the locations of the failure regions in a folder, of every node that used it.

    Raises:
        RegionError: the folder may not be read.
    """
    if where.path == where.file:
        return []
    return [
        Location(where.path, where.path / name, is_device=False)
        for name in _names_in(where.path)
        if name.startswith("failure-") and name.endswith(".lck")
    ]


def failure_file(where: Location, first_rank: int, number: int) -> Location:
    """Return the location of a node's failure region of that number.

    Args:
        where: the region of a rank of the node.
        first_rank: the lowest rank of the node.
        number: 0, or more where the files before are held by processes that stand still.
    """
    file = where.path / f"failure-{first_rank:05d}-{number}.lck"
    return Location(where.path, file, is_device=False)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the path itself, or None when nothing is there.

    Any other failure raises RegionError.
    """
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RegionError(f"{path}: {error.strerror}") from error


def _make_folder(root: Path) -> None:
    try:
        os.mkdir(root, 0o700)
    except FileExistsError:
        return
    except OSError as error:
        raise RegionError(f"{root}: cannot make the folder: {error.strerror}") from error
    sync_folder(root.parent)


def _check_owner(path: Path, status: os.stat_result, kind: str) -> None:
    if status.st_uid != os.geteuid():
        raise RegionError(
            f"{path}: the {kind} belongs to user {status.st_uid}, this process is {os.geteuid()};"
            " use a folder of your own"
        )
    if status.st_mode & OTHERS_WRITE:
        raise RegionError(
            f"{path}: the {kind} is writable by others (mode {status.st_mode & 0o7777:o});"
            f" chmod go-w {path}"
        )


@contextlib.contextmanager
def opened(place: Location, *, writable: bool) -> Iterator[tuple[int, int]]:
    """Yield two descriptors of an existing region: one to map, one that carries the locks.

    Raises:
        RegionError: a symlink, not a regular file, another user's, writable by others, or not
            readable or writable by this process.
    """
    access = os.O_RDWR if writable else os.O_RDONLY
    flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would wait
    with contextlib.ExitStack() as stack:
        pair = []
        for _ in range(2):
            fd = _open(place.file, flags)
            stack.callback(os.close, fd)
            pair.append(fd)
        stack.callback(_unfinished.difference_update, pair)
        _unfinished.update(pair)
        _check_file(place, pair)
        yield pair[0], pair[1]


def _open(file: Path, flags: int) -> int:
    try:
        return os.open(file, flags, 0o600)
    except FileNotFoundError as error:  # it was there: others removed it
        raise RegionBusyError(f"{file}: cannot open: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RegionError(f"{file} is a symbolic link; lightck follows none") from error
        raise RegionError(f"{file}: cannot open: {error.strerror}") from error


def _check_file(place: Location, pair: list[int]) -> None:
    status, other = os.fstat(pair[0]), os.fstat(pair[1])
    if place.is_device:
        return
    if not stat.S_ISREG(status.st_mode):
        raise RegionError(f"{place.file} is not a regular file")
    if (status.st_dev, status.st_ino) != (other.st_dev, other.st_ino):
        raise RegionBusyError(f"{place.file} was replaced while it was opened; try again")
    _check_owner(place.file, status, "region")


_unfinished: set[int] = set()
"""Descriptors of regions that are being made or opened. A forked child closes them: it would hold
their lock for as long as it lives."""


def _close_unfinished() -> None:
    while _unfinished:
        os.close(_unfinished.pop())


os.register_at_fork(after_in_child=_close_unfinished)


@contextlib.contextmanager
def created(place: Location, *, replaces: bool = False) -> Iterator[tuple[int, int]]:
    """Yield two descriptors of a new, empty region file, published under its name on success.

    With `replaces` it takes the place of the file there, which lives on without a name for as long
    as processes have it open.

    The file is made beside its final name and linked there when the body ends, so that a crash in
    between leaves no half-made region; an error removes it.

    Raises:
        RegionBusyError: another process is making this region.
    """
    if place.is_device:
        with opened(place, writable=True) as pair:
            yield pair
        return
    draft = draft_of(place)
    _discard_leftover(draft)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(draft, flags, 0o600)
    except FileExistsError as error:
        raise RegionBusyError(f"{place.file} is being made by another process") from error
    except OSError as error:
        raise RegionError(f"{place.path}: cannot make a region: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        lock_fd = _open(draft, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        stack.callback(os.close, lock_fd)
        stack.callback(_unfinished.difference_update, (fd, lock_fd))
        _unfinished.update((fd, lock_fd))
        # Until the draft is locked, another process takes it for a leftover.
        if not _own(lock_fd) or not _is_same(draft, fd) or not _is_same(draft, lock_fd):
            raise RegionBusyError(f"{place.file} is being made by another process")
        stack.callback(_unlink_own, draft, fd)
        yield fd, lock_fd
        try:
            if replaces:
                os.replace(draft, place.file)
            else:
                os.link(draft, place.file)
                os.unlink(draft)
        except (FileExistsError, FileNotFoundError) as error:
            raise RegionBusyError(f"{place.file} was made by another process") from error
        except OSError as error:  # a file system without hard links (exFAT, some of FUSE's)
            raise RegionError(
                f"{place.file}: cannot be put in its place: {error.strerror}; take a file system"
                " with hard links"
            ) from error
        sync_folder(place.path)


def draft_of(place: Location) -> Path:
    """Return the path at which `created` makes the file before linking it to its name."""
    return place.file.with_suffix(".new")


def allocate(fd: int, size: int, file: Path) -> None:
    """Give a file `size` bytes that are allocated on the medium.

    Raises:
        RegionFullError: the message says how many bytes are needed and free.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        kind = RegionError
        if error.errno in NO_ROOM:
            kind = RegionFullError
        there = os.fstatvfs(fd)
        raise kind(
            f"{file}: {size} bytes needed, {there.f_bavail * there.f_frsize} free: {error.strerror}"
        ) from error


def _discard_leftover(draft: Path) -> None:
    """Remove the draft of a process that died while making a region; its lock died with it."""
    if not os.path.lexists(draft):
        return
    try:
        fd = _open(draft, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except RegionBusyError:
        return  # published or discarded meanwhile
    try:
        if not _own(fd):
            raise RegionBusyError(f"{draft}: a region is being made by another process")
        _unlink_own(draft, fd)
    finally:
        os.close(fd)


def _own(fd: int) -> bool:
    """Take the owner lock as native/src/lock.c does; return whether it is held.

    It has no effect if `fd` holds it already.
    """
    return _locked(fd, OWNER_BYTE, 1)


def _locked(fd: int, start: int, length: int) -> bool:
    """Lock bytes of a region's file against every other descriptor; return whether they are."""
    lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise RegionError(f"cannot lock a region: {error.strerror}") from error
    return True


@contextlib.contextmanager
def seized(file: Path) -> Iterator[int]:
    """Hold a region's file against every owner and reader; yield a descriptor of it.

    Raises:
        RegionBusyError: somebody owns it, makes it, or holds a snapshot in it.
        RegionError: a symlink, or not this user's regular file.
    """
    fd = _open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        where = Location(file.parent, file, is_device=False)
        _check_file(where, [fd, fd])
        if not _locked(fd, 0, 0):  # length 0: to any end
            who = "a trainer owns it" if is_owned(where) else "a reader holds a snapshot in it"
            raise RegionBusyError(f"{file}: {who}")
        if not _is_same(file, fd):
            raise RegionBusyError(f"{file} was replaced while it was opened; try again")
        yield fd
    finally:
        os.close(fd)


def is_owned(place: Location) -> bool:
    """Return whether a process owns the region now, without locking anything.

    Raises:
        RegionError: the region cannot be opened.
    """
    with opened(place, writable=False) as (fd, _):
        lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, OWNER_BYTE, 1, 0)
        found: bytes = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, lock)
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _is_same(path: Path, fd: int) -> bool:
    """Return whether the name still leads to the open file."""
    there = _status(path)
    return there is not None and os.path.samestat(there, os.fstat(fd))


def _unlink_own(path: Path, fd: int) -> None:
    if _is_same(path, fd):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def taken_bytes(fd: int) -> int:
    """Return the bytes that an open file takes on its medium."""
    status = os.fstat(fd)
    huge = status.st_blksize > _USUAL_BLOCKS  # hugetlbfs counts no blocks
    return status.st_size if huge else status.st_blocks * 512


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # hugetlbfs has no fsync of folders, and nothing durable
            raise RegionError(f"{folder}: fsync: {error.strerror}") from error
    finally:
        os.close(fd)


def is_blank(where: Location) -> bool:
    """Return whether no region was ever made on the device: its superblocks are all zeros."""
    if not where.is_device:
        return False
    with opened(where, writable=False) as (fd, _):
        granule = 2 << 20
        with mmap.mmap(fd, granule, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as head:
            return not any(head[:8192])


# ---- a container's /dev/shm, which is small unless the container is started with more -----------

SHARED_MEMORY = Path("/dev/shm")
MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that Docker and Podman leave in their containers."""
_NEEDED = re.compile(r"(\d+) bytes needed")


@contextlib.contextmanager
def shm_advice(folder: Path) -> Iterator[None]:
    """Add to an error of too little room how a container gets a larger /dev/shm.

    Raises:
        RegionFullError: the body's error, with advice where the container's /dev/shm is the reason.
    """
    try:
        yield
    except RegionFullError as error:
        if not (_is_container() and _is_shared_memory(folder)):
            raise
        there, needed = os.statvfs(SHARED_MEMORY), _NEEDED.search(str(error))
        if needed is None or int(needed[1]) <= there.f_bavail * there.f_frsize:
            raise  # the memory of the machine or of the cgroup is too small
        advised = RegionFullError(
            f"{error}; {SHARED_MEMORY} of this container has {there.f_blocks * there.f_frsize}"
            " bytes in all: start it with --shm-size=<bytes> (Docker), or mount a volume of"
            f" emptyDir: {{medium: Memory}} at {SHARED_MEMORY} (Kubernetes)"
        )
        advised.code = error.code
        raise advised from error


def _is_container() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(mark.exists() for mark in MARKS)


def _is_shared_memory(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(folder).st_dev == os.stat(SHARED_MEMORY).st_dev
    return False
