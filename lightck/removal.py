"""Remove a run: the regions of all its ranks, and nothing else that lies in their folder."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lightck.config import Config
from lightck.errors import RegionBusyError, RegionError
from lightck.region import claim, location

_OF_A_RUN = re.compile(
    r"region-\d{5,}\.((lck|obj)(\.damaged\d*)?|new)|failure-\d{5,}-\d\.(lck|new)"
)
"""The names of a run's files: regions, damaged ones that were renamed, drafts, failure regions."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file that belongs to a run."""

    path: Path
    taken_bytes: int
    """The bytes that the file takes of its medium; on tmpfs and hugetlbfs that is memory."""


def files_at(path: str | os.PathLike[str]) -> list[RunFile]:
    """List what `remove` would remove; nothing is changed.

    Raises:
        RegionError: the place is not safe, or a device or pool of its own.
        RegionBusyError: a trainer or a reader holds one of them.
    """
    with contextlib.ExitStack() as held:
        return _seized(path, held)


def remove(path: str | os.PathLike[str]) -> list[RunFile]:
    """Remove the regions of all ranks at a path, durably; return what was removed.

    No process can open any of them meanwhile, so that all of them are removed or none.

    Raises:
        RegionError, RegionBusyError: as `files_at`; nothing was removed.
    """
    with contextlib.ExitStack() as held:
        found = _seized(path, held)
        for each in found:
            os.unlink(each.path)
        if found:
            location.sync_folder(found[0].path.parent)
        return found


def _seized(path: str | os.PathLike[str], held: contextlib.ExitStack) -> list[RunFile]:
    root = Config.resolve(path=path).path
    where = location.locate(root, 0, create=False)
    if where.path == where.file:
        kind = "a device" if where.is_device else "a libpmemobj pool of its own"
        raise RegionError(
            f"{where.path} is {kind}, no folder with regions in it: attach(..., overwrite=True)"
            f" gives up what is there{'' if where.is_device else '; or remove the file yourself'}"
        )
    names = sorted(os.listdir(where.path)) if where.path.is_dir() else []
    found = []
    for name in filter(_OF_A_RUN.fullmatch, names):
        file = where.path / name
        try:
            fd = held.enter_context(location.seized(file))
        except RegionBusyError as error:
            raise _in_words(error, file) from error
        found.append(RunFile(file, location.taken_bytes(fd)))
    return found


def _in_words(error: RegionBusyError, file: Path) -> RegionBusyError:
    every = location.every_rank(location.locate(file.parent, 0, create=False))
    where = next((each for each in every if each.file == file), None)
    named = error if where is None else claim.naming_owner(error, where)
    return RegionBusyError(f"{named}; nothing was removed: end it first")
