"""Print for commands: aligned tables, sizes, ages, JSON, progress; also how they refuse."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

OK, BAD_DATA, USAGE = 0, 1, 2


class Refusal(Exception):
    """A command cannot do what was asked; the text goes to stderr."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table with aligned columns.

    The first `left` columns and the last are aligned to the left, the others to the right.
    """
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (headings, *rows):
        cells = [
            cell.ljust(width) if i < left or i == len(row) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def pairs(rows: Sequence[tuple[str, str]], indent: str = "") -> str:
    """Return one `name  value` line for each pair, the values aligned."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{indent}{name.ljust(width)}  {value}" for name, value in rows)


def size(count: int) -> str:
    """Return bytes as text in MiB, smaller numbers in KiB or bytes."""
    if count < 1 << 10:
        return f"{count} B"
    if count < 1 << 20:
        return f"{count / (1 << 10):.1f} KiB"
    return f"{count / (1 << 20):,.1f} MiB"


def span(seconds: float) -> str:
    """Return a time as text in the largest unit that gives at least 2, below 2 min in s, ms, us."""
    for unit, length, digits in (("d", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.{digits}f} {unit}"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def age(then: datetime) -> str:
    """Return how long ago a time was."""
    return f"{span(max(0.0, (datetime.now(UTC) - then).total_seconds()))} ago"


def timeline(identity: int | None) -> str | None:
    """Return a timeline's id as text, because the number is too large for many readers of JSON."""
    return None if identity is None else f"{identity:016x}"


def teller(arguments: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints a line at once, also into a pipe; with `--json` nothing."""
    return lambda text: None if arguments.json else print(text, flush=True)


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print one JSON document to stdout, in one line without `indent`."""
    json.dump(document, sys.stdout, indent=indent, default=_plain)
    print(flush=True)


def _plain(value: Any) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


@contextmanager
def progress(title: str, total: int, unit: str = "B") -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal if tqdm is installed.

    The yielded function takes how much more is done.
    """
    bar: Any = None
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ModuleNotFoundError as missing:
            if missing.name != "tqdm":
                raise  # tqdm is installed but broken; if it is missing there is no bar
        else:
            how = {"unit": unit, "unit_scale": unit == "B", "unit_divisor": 1024}
            bar = tqdm(total=total, desc=title, leave=False, **how)
    try:
        yield bar.update if bar is not None else lambda more: None
    finally:
        if bar is not None:
            bar.close()
