"""Put a file in its place whole or not at all."""

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
    """A draft beside `out` for the body to fill by its name; afterwards it is `out`, durably.

    Raises:
        Refusal: `out` is there (without `force`), is a symbolic link or no regular file, or its
            folder is missing. What was there stays as it was.
    """
    _check(out, force)
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(draft, flags, 0o666)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)  # as the umask has it
        os.close(fd)
    except OSError as error:
        raise Refusal(f"{out}: cannot write here: {error.strerror}") from error
    try:
        yield draft
        os.chmod(draft, mode)  # writers may have put a private file in its place
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
        if out.is_symlink():  # made since the check; replacing the link itself harms nobody
            raise Refusal(f"{out} has become a symbolic link")
        os.replace(draft, out)
        return
    try:
        os.link(draft, out)  # unlike rename, it fails when something is there
    except FileExistsError:
        raise Refusal(f"{out} is there already; --force replaces it") from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        _check(out, force)  # a filesystem without hard links
        os.rename(draft, out)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
