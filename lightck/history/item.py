"""The items of a history on the medium: a folder for each kept step.

    <run>/history/step-100/region-00000.lck   one snapshot, as a region; one file for each rank
    <run>/history/step-100/item.json          its description: time, epoch, metrics
    <run>/history/step-100/pinned             present if it is pinned
    <run>/history/left/step-120/              items of a branch that a later attach left

The description comes first. An item is whole when each rank's file is there; every file is complete
or absent. To remove an item is to rename its folder first, so that no half of one is ever found.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightck.errors import RegionError
from lightck.policy.keep import Kept
from lightck.region import location
from lightck.region.location import Location

FOLDER = "history"
LEFT = "left"
DESCRIPTION = "item.json"
PIN = "pinned"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_GONE = re.compile(r"\.gone-[0-9a-f]{8}")
_MOST_BYTES = 1 << 20
"""The largest description that is read."""
_NO_DESCRIPTION = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError),
)
"""The errors that a text meets on its way to a description, if it is none."""
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""The errors of what is no file, or not there."""


@dataclass(frozen=True)
class Item:
    """One item of a history, whole or not."""

    folder: Path
    kept: Kept
    ranks: tuple[int, ...]
    """The ranks whose files are in this folder once it is whole."""
    unread: str = ""
    """Why its description cannot be read just now, so that nothing is chosen by it; empty: it
    was, or there is none."""

    @property
    def is_whole(self) -> bool:
        """Return whether each rank's file is there."""
        return all(_is_there(self.folder / _file(rank)) for rank in self.ranks)


def folder_of(run: Path) -> Path:
    """Return the history's folder in the folder of a run."""
    return run / FOLDER


def is_item(folder: Path) -> bool:
    """Return whether a folder is that of an item; one that may not be entered is not."""
    return os.path.exists(folder / DESCRIPTION)


def require_run(path: str | os.PathLike[str]) -> None:
    """Refuse the folder of an item as the path of what writes.

    Raises:
        RegionError: it is one.
    """
    if is_item(Path(path)):
        raise RegionError(
            f"{path} is an item of a history, which nothing is written to: restore or load from"
            " there, and write to a path of its own"
        )


def place(run: Path, step: int, rank: int) -> Location:
    """Return the location of a rank's file in an item, which need not be there."""
    folder = folder_of(run) / f"step-{step}"
    return Location(folder, folder / _file(rank), is_device=False)


def make_place(run: Path, step: int, rank: int) -> Location:
    """Return the same, once the folders are made, and found to be this user's alone.

    Raises:
        RegionError: a folder is not safe, or cannot be made.
    """
    location.locate(folder_of(run), rank, create=True)
    return location.locate(place(run, step, rank).path, rank, create=True)


def _file(rank: int) -> str:
    return f"region-{rank:05d}.lck"


# ---- descriptions --------------------------------------------------------------------------------


def every_item(run: Path) -> list[Item]:
    """Return the items that a run's history has, whole or not, oldest first.

    A folder whose description is missing or damaged has a description without metrics.

    Raises:
        RegionError: the folder may not be read.
    """
    found = []
    for name in _names(folder_of(run)):
        if matched := _STEP.fullmatch(name):
            found.append(_read(folder_of(run) / name, int(matched[1])))
    return sorted(found, key=lambda item: item.kept.step)


def every_item_and_left(run: Path) -> list[tuple[Item, bool]]:
    """Return the items of a history with False, and with True those of branches that were left."""
    left = folder_of(run) / LEFT
    names = [(name, _STEP.fullmatch(name)) for name in _names(left)]
    others = [_read(left / name, int(matched[1])) for name, matched in names if matched]
    return [*((each, False) for each in every_item(run)), *((each, True) for each in others)]


def _names(folder: Path) -> list[str]:
    """Return the names of the folders in a folder; a symlink to one is none."""
    try:
        with os.scandir(folder) as there:
            return [each.name for each in there if each.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RegionError(f"{folder}: cannot list the folder: {error.strerror}") from error


def _read(folder: Path, step: int) -> Item:
    held, ranks, unread = {}, (0,), ""
    try:
        with contextlib.suppress(*_NO_DESCRIPTION):
            held = _checked(_content(folder / DESCRIPTION), step)
            ranks = held.pop("ranks")
    except OSError as error:
        if error.errno not in _NOT_THERE:
            unread = f"{folder}: cannot read {DESCRIPTION}: {error.strerror}"
    pinned = _is_there(folder / PIN)
    kept = Kept(**{"step": step, "time_s": 0.0, **held, "pinned": pinned})
    return Item(folder, kept, ranks, unread)


def _is_there(file: Path) -> bool:
    """Tell whether there is a file.

    Raises:
        RegionError: that cannot be told just now.
    """
    try:
        os.lstat(file)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise RegionError(f"{file}: cannot look whether it is there: {error.strerror}") from error
    return True


def _content(file: Path) -> Any:
    with open(file, "rb", opener=_opened) as opened:
        return json.loads(opened.read(_MOST_BYTES))


def _opened(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _checked(said: Any, step: int) -> dict[str, Any]:
    time_s = float(said["time_s"])
    if said["step"] != step or not said["ranks"] or not math.isfinite(time_s):
        raise ValueError("another step's description, or none")
    return {
        "time_s": time_s,
        "epoch": int(said["epoch"]),
        "metrics": {str(name): float(value) for name, value in said["metrics"].items()},
        "ranks": tuple(sorted(int(rank) for rank in said["ranks"])),
    }


def describe(where: Location, kept: Kept, ranks: tuple[int, ...]) -> None:
    """Write an item's description; on return it is durable, and the old one gone.

    Args:
        where: a file of the item, whose folder is there.
        kept: what is written; whether it is pinned is not.
        ranks: see `Item.ranks`.

    Raises:
        RegionError: the place is not safe, or the medium fails.
    """
    said = {
        "step": kept.step,
        "time_s": kept.time_s,
        "epoch": kept.epoch,
        "metrics": plain(kept.metrics),
        "ranks": list(ranks),
    }
    file = Location(where.path, where.path / DESCRIPTION, is_device=False)
    with location.created(file, replaces=True) as (fd, _):
        try:
            os.write(fd, json.dumps(said, allow_nan=False).encode())
            os.fsync(fd)
        except OSError as error:
            raise RegionError(f"{file.file}: cannot be written: {error.strerror}") from error


def plain(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics as JSON has them, which lacks nan and inf: their text stands for them."""
    finite = {-float("inf"), float("inf")}
    return {k: str(v) if v != v or v in finite else v for k, v in metrics.items()}


# ---- removed, left, pinned -----------------------------------------------------------------------


def remove(item: Item, *, unless_pinned: bool = False) -> bool:
    """Remove an item durably: once this begins it is none, whatever ends it.

    Args:
        item: what to remove.
        unless_pinned: leave it if it was pinned since it was read.

    Returns:
        Whether it is gone.

    Raises:
        RegionError: the folder cannot be changed.
    """
    gone = item.folder.with_name(f".gone-{secrets.token_hex(4)}")
    try:
        os.rename(item.folder, gone)
        if unless_pinned and _is_there(gone / PIN):  # from here on nobody can pin it
            os.rename(gone, item.folder)
            return False
        location.sync_folder(gone.parent)
        shutil.rmtree(gone)
    except FileNotFoundError:
        return True  # others have removed it
    except OSError as error:
        raise RegionError(f"{item.folder}: cannot be removed: {error.strerror}") from error
    return True


def remove_folder(run: Path) -> None:
    """Remove the folders of a history that has no item any more; what else lies there stays."""
    for folder in (folder_of(run) / LEFT, folder_of(run)):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def remove_remains(run: Path) -> None:
    """Remove what a process has left that died while it removed an item.

    Raises:
        RegionError: the folder cannot be changed.
    """
    for folder in (folder_of(run), folder_of(run) / LEFT):
        for name in filter(_GONE.fullmatch, _names(folder)):
            try:
                shutil.rmtree(folder / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise RegionError(f"{folder / name}: {error.strerror}") from error


def set_aside(item: Item) -> Path:
    """Move an item to those of a branch that was left; return its new folder.

    One item of each step is there: it replaces what was left of the same step before.

    Raises:
        RegionError: the folder cannot be changed.
    """
    left = location.locate(item.folder.parent / LEFT, 0, create=True).path
    to = left / item.folder.name
    if os.path.lexists(to):
        remove(replace(item, folder=to))
    try:
        os.rename(item.folder, to)
    except OSError as error:
        raise RegionError(f"{item.folder}: cannot be moved: {error.strerror}") from error
    location.sync_folder(left)
    location.sync_folder(item.folder.parent)
    return to


def pin(item: Item, *, pinned: bool) -> None:
    """Pin an item, or take the pin away; it is kept from then on whatever the policy says.

    Raises:
        RegionError: the folder cannot be changed.
    """
    try:
        if pinned:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(item.folder / PIN, flags, 0o600))
        else:
            (item.folder / PIN).unlink(missing_ok=True)
    except OSError as error:
        raise RegionError(f"{item.folder / PIN}: {error.strerror}") from error
    location.sync_folder(item.folder)
