"""Remove a run: the regions of all its ranks, its history, and nothing else in their folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightck.config import Config
from lightck.errors import RegionBusyError, RegionError
from lightck.history import item
from lightck.policy.keep import Keep, Kept, steps_to_keep
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
    """Remove the regions of all ranks at a path and their history, durably; return the files.

    No process can open any of them meanwhile, so that all of them are removed or none.

    Raises:
        RegionError, RegionBusyError: as `files_at`; nothing was removed.
    """
    with contextlib.ExitStack() as held:
        found = _seized(path, held)
        root = Config.resolve(path=path).path
        own = [each for each in found if each.path.parent == root]
        for each in own:
            os.unlink(each.path)
        for kept, _ in item.every_item_and_left(root):
            item.remove(kept)
        item.remove_remains(root)
        item.remove_folder(root)
        if own:
            location.sync_folder(root)
        if item.is_item(root):
            item.remove(item.Item(root, Kept(0, 0.0), ()))
        return found


def pruned_by(path: str | os.PathLike[str], keep: Keep) -> list[RunFile]:
    """List the files of the history's items that `prune` would remove; nothing is changed."""
    with contextlib.ExitStack() as held:
        return [file for each in _unkept(path, keep) for file in _of_item(each, held)]


def prune(path: str | os.PathLike[str], keep: Keep, listed: Sequence[RunFile]) -> list[RunFile]:
    """Remove the items of a history that a policy does not keep, durably; return their files.

    A trainer may go on meanwhile.

    Args:
        path: as given to attach.
        keep: the policy.
        listed: what `pruned_by` has given; what is not kept only since then stays.

    Raises:
        RegionError, RegionBusyError: as `files_at`; that item and the next ones are still there.
    """
    removed, agreed = [], {file.path.parent for file in listed}
    for each in _unkept(path, keep):
        if each.folder not in agreed:
            continue
        with contextlib.ExitStack() as held, contextlib.suppress(FileNotFoundError):
            files = _of_item(each, held)  # unless a trainer has removed it meanwhile
            if item.remove(each, unless_pinned=True):
                removed += files
    return removed


def _unkept(path: str | os.PathLike[str], keep: Keep) -> list[item.Item]:
    items = item.every_item(Config.resolve(path=path).path)
    whole = [each for each in items if each.is_whole and not each.unread]
    chosen = steps_to_keep(keep, [each.kept for each in whole])
    return [each for each in whole if each.kept.step not in chosen]


def _of_item(each: item.Item, held: contextlib.ExitStack) -> list[RunFile]:
    """Hold the regions of an item against readers."""
    names = [name for name in sorted(os.listdir(each.folder)) if _OF_A_RUN.fullmatch(name)]
    fds = [(each.folder / n, held.enter_context(location.seized(each.folder / n))) for n in names]
    return [RunFile(file, location.taken_bytes(fd)) for file, fd in fds]


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
    for each, _ in item.every_item_and_left(where.path):
        found += _of_item(each, held)
    return found


def _in_words(error: RegionBusyError, file: Path) -> RegionBusyError:
    every = location.every_rank(location.locate(file.parent, 0, create=False))
    where = next((each for each in every if each.file == file), None)
    named = error if where is None else claim.naming_owner(error, where)
    return RegionBusyError(f"{named}; nothing was removed: end it first")
