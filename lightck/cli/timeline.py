"""`lightck timeline`: show where the time of a traced run went, as a table and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightck.cli.atomic_file import replaced
from lightck.cli.output import OK, Refusal, print_json, size, table
from lightck.cli.timeline_data import PHASES, Recording, read, row_of

DESCRIPTION = """\
Show what the training thread, the copying threads and the commits did in each step of a trace; with
-o as a picture (needs matplotlib: pip install 'lightck[timeline]').

A trace comes from training with

  handle = lightck.attach(model, optimizer, path, trace="run.json")

(close() writes the file), or with trace=True and handle.trace("run.json") whenever you like. It
holds the last steps, some twenty of a model of 1.5 GB; https://ui.perfetto.dev opens it, too.

With data parallel, "wait" is from the last gradient to the end of their reduction.

In the picture: what the training thread computes, under it what lightck cost it there, the
reduction of gradients (hatched: its end is estimated), the copies (a colour per snapshot; in a
picture of one step, per block of layers), the commits, and how much of a snapshot was released and
copied when."""
EXAMPLES = """\
  lightck timeline run.json
  lightck timeline run.json -o run.png
  lightck timeline run.json --steps 3:6 -o run.png
  lightck timeline run.json --json | python3 -c 'import json, sys; \\
      print([row["lightck_ms"] for row in json.load(sys.stdin)["steps"]])'
"""
_SHOWN = 4
"""The number of steps in a picture, unless --steps gives them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("trace", metavar="FILE", type=Path, help="a trace that lightck wrote")
    parser.add_argument(
        "-o", "--out", metavar="PNG", type=Path, help="draw a picture: png, svg, pdf"
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="A:B",
        help=f"steps A to B only; default: all, in a picture the last {_SHOWN}",
    )
    parser.add_argument("--force", action="store_true", help="replace the picture if it is there")


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last or first)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    recording = read(arguments.trace)
    chosen = recording.cut(*arguments.steps) if arguments.steps else recording
    if arguments.out is not None:
        last = chosen.steps[-1].args["step"]
        _draw(chosen if arguments.steps else chosen.cut(last - _SHOWN + 1, last), arguments)
    rows = [row_of(chosen, step) for step in chosen.steps]
    if arguments.json:
        print_json({"trace": arguments.trace, "about": chosen.about, "steps": rows})
    elif arguments.out is None:
        print(_table(chosen, rows))
    else:
        print(f"{arguments.out}: {size(arguments.out.stat().st_size)}")
    return OK


def _draw(recording: Recording, arguments: argparse.Namespace) -> None:
    try:
        from lightck.cli.timeline_plot import SUFFIXES, draw
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise Refusal(
            "a picture needs matplotlib: pip install 'lightck[timeline]'"
            " (or open the trace at https://ui.perfetto.dev)"
        ) from error
    if arguments.out.suffix not in SUFFIXES:
        raise Refusal(f"{arguments.out}: the suffix must be one of {', '.join(SUFFIXES)}")
    with replaced(arguments.out, force=arguments.force) as draft:
        draw(recording, draft, arguments.out.suffix)


def _table(recording: Recording, rows: list[dict[str, Any]]) -> str:
    phases = [phase for phase in PHASES if phase != "wait" or any(row["wait"] for row in rows)]
    lines = [
        [
            str(row["step"]),
            f"{row['ms']:.1f}",
            *(f"{row[phase]:.1f}" for phase in phases),
            f"{row['lightck_ms']:.2f}",
            f"{100 * row['lightck_ms'] / row['ms']:.1f} %",
            ", ".join(map(str, row["snapshots"])) or "-",
            size(row["copied_bytes"]) if row["snapshots"] else "-",
            f"{row['copy_gb_per_s']:.1f}" if row["copy_gb_per_s"] else "-",
            ", ".join(map(str, row["committed"])) or "-",
            ", ".join(row["lost"]),
        ]
        for row in rows
    ]
    headings = ["STEP", "MS", *(phase.upper() for phase in phases), "LIGHTCK", "OF STEP"]
    headings += ["SNAPSHOT", "COPIED", "GB/S", "COMMITTED", ""]
    lost = recording.about["lost"]
    more = f"\n{lost} older spans are gone: the trace keeps the last ones" if lost else ""
    return table(headings, lines, left=0) + more
