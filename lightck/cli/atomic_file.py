"""Put a file in its place completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from lightck.cli.output import Refusal


@contextlib.contextmanager
def replaced(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a draft beside `out` for the body to fill by name; afterwards it is `out`, durably.

    Raises:
        Refusal: `out` exists (without `force`), is a symbolic link or not a regular file, or its
            folder is missing. The old file stays as it was.
    """
    _check(out, force)
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(draft, flags, 0o666)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)  # the mode that the umask gives
        os.close(fd)
    except OSError as error:
        raise Refusal(f"{out}: cannot write here: {error.strerror}") from error
    try:
        yield draft
        os.chmod(draft, mode)  # the body may have put a private file there
        _sync(draft)
        _publish(draft, out, force)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
    _sync(out.parent)


def _check(out: Path, force: bool) -> None:
    try:
        mode = os.lstat(out).st_mode
    except FileNotFoundError:
        if not out.parent.is_dir():
            raise Refusal(f"{out}: the folder {out.parent} does not exist") from None
        return
    except OSError as error:
        raise Refusal(f"{out}: {error.strerror}") from error
    if stat.S_ISLNK(mode):
        raise Refusal(f"{out} is a symbolic link; give the file it points to")
    if not stat.S_ISREG(mode):
        raise Refusal(f"{out} is not a regular file")
    if not force:
        raise Refusal(f"{out} is there already; --force replaces it")


def _publish(draft: Path, out: Path, force: bool) -> None:
    if force:
        os.replace(draft, out)
        return
    try:
        os.link(draft, out)  # unlike rename, it fails when something is there
    except FileExistsError:
        raise Refusal(f"{out} is there already; --force replaces it") from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        _check(out, force)  # the file system has no hard links
        os.rename(draft, out)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
