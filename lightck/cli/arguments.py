"""Declare the PATH and --step arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from lightck.cli.output import BAD_DATA, USAGE, Refusal
from lightck.config import Config


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


def rows_at(
    path: str | None, step: int | None = None, *, whole: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of `lightck.snapshots`, newest first.

    Raises:
        Refusal: no region is there, or no snapshot of `step` (that is whole).
    """
    from lightck.load import region_files, snapshots  # needs torch

    if not region_files(path):
        raise Refusal(f"{Config.resolve(path=path).path}: there is no lightck region")
    rows: list[dict[str, Any]] = snapshots(path).to_pylist()
    usable = [row for row in rows if row["state"] == "whole" or not whole]
    if step is not None and step not in {row["step"] for row in usable}:
        problems = [row["problem"] for row in rows if row["problem"]]
        there = sorted({row["step"] for row in usable} - {None})
        text = f"no snapshot of step {step}; steps there: {', '.join(map(str, there)) or 'none'}"
        damaged = any(row["state"] == "damaged" for row in rows)
        raise Refusal("\n  ".join([text, *problems]), BAD_DATA if damaged else USAGE)
    return rows
