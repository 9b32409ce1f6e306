"""Declare the arguments that several commands share: PATH, --step, and --path for a folder."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightck.cli.output import BAD_DATA, USAGE, Refusal
from lightck.config import Config
from lightck.history import item


def add_path(parser: argparse.ArgumentParser) -> None:
    """Declare PATH, which may be left out."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="folder, pool or device given to attach; default: $LIGHTCK_PATH, else ./lightck-run",
    )


def add_step(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare --step N."""
    parser.add_argument("--step", type=int, metavar="N", help=f"which snapshot; default: {default}")


def step_of(arguments: argparse.Namespace) -> int | Literal["latest"]:
    """Return --step as the library takes it."""
    step: int | None = arguments.step
    return "latest" if step is None else step


def location(path: str | None) -> str:
    """Return the place that PATH stands for: itself, $LIGHTCK_PATH or the default."""
    return str(Config.resolve(path=path).path)


def with_history(path: str | None, step: int | None) -> str | None:
    """Return the folder of a step's item in the history, if the run's slots lack it; else PATH."""
    from lightck.load import region_files, snapshots  # needs torch

    root = Config.resolve(path=path).path
    if step is None or not root.is_dir() or not item.place(root, step, 0).path.is_dir():
        return path
    held = snapshots(path).column("step").to_pylist() if region_files(path) else []
    return path if step in held else str(item.place(root, step, 0).path)


def no_region(path: str | None) -> Refusal:
    """Return the refusal of a place where nothing of lightck is."""
    return Refusal(f"{location(path)}: there is no lightck region")


def rows_at(
    path: str | None, step: int | None = None, *, whole: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of `lightck.snapshots`, newest first.

    Raises:
        Refusal: no region is there, or no snapshot of `step` (that is whole).
    """
    from lightck.load import region_files, snapshots  # needs torch

    if not region_files(path):
        raise no_region(path)
    rows: list[dict[str, Any]] = snapshots(path).to_pylist()
    usable = [row for row in rows if row["state"] == "whole" or not whole]
    if step is not None and step not in {row["step"] for row in usable}:
        problems = [row["problem"] for row in rows if row["problem"]]
        there = sorted({row["step"] for row in usable} - {None})
        text = f"no snapshot of step {step}; steps there: {', '.join(map(str, there)) or 'none'}"
        damaged = any(row["state"] == "damaged" for row in rows)
        raise Refusal("\n  ".join([text, *problems]), BAD_DATA if damaged else USAGE)
    return rows


# ---- a folder for a command's logs and regions, temporary in memory or kept ----------------------


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
