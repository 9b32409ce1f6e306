"""Make a folder for a command's logs and regions, temporary in memory or kept."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightck.cli.output import Refusal


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Declare `--path`, for `folder`."""
    parser.add_argument(
        "--path",
        type=Path,
        metavar="P",
        help="a new or empty folder, kept afterwards; default: a temporary one in /dev/shm",
    )


@contextmanager
def run_folder(path: Path | None, command: str) -> Iterator[Path]:
    """Yield `path`, new or empty, which stays; or a temporary folder, which is removed.

    Raises:
        Refusal: the folder cannot be made, or is not empty.
    """
    if path is not None:
        path = Path(os.path.abspath(path))
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise Refusal(f"{path}: cannot make the folder: {error.strerror}") from error
        if any(path.iterdir()):
            raise Refusal(f"{path} is not empty; the {command} needs a folder of its own")
        yield path
        return
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    made = Path(tempfile.mkdtemp(prefix=f"lightck-{command}-", dir=base))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
