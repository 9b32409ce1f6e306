"""Write and read the small file that stands where a framework expects a checkpoint.

It says in JSON in which store the checkpoint is, and under which step.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_STORE, _STEP, _NAME = "lightck.Store", "step", "name"
_MARK = f'{{"{_STORE}": '.encode()
_MOST_BYTES = 1 << 16


class Place(NamedTuple):
    """Where a checkpoint is: the state dict of a step in a store, and the name that it has there.

    The name is for those who write the file before the commit; else it is empty.
    """

    store: Path
    step: int
    name: str


def point(file: Path, store: Path, step: int, name: str = "") -> None:
    """Let `file` say where its checkpoint is."""
    write(file, {_STORE: os.path.abspath(store), _STEP: step, _NAME: name})


def read(file: Path) -> Place | None:
    """Return where a file's checkpoint is; None if it is another file, or none."""
    try:
        with open(file, "rb") as opened:
            text = opened.read(_MOST_BYTES)
        said = json.loads(text) if text.startswith(_MARK) else {}
        return Place(Path(said[_STORE]), int(said[_STEP]), str(said[_NAME]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(file: Path, value: Any) -> None:
    """Put a file of JSON in its place, complete and durable, in the stead of what is there.

    It is of mode 0600; a symbolic link is replaced, never followed.
    """
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600)
    try:
        with open(fd, "w") as opened:
            json.dump(value, opened)
            opened.flush()
            os.fsync(fd)
        os.replace(draft, file)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
