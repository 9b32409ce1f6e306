"""`lightck ls`: the snapshots at a path."""

from __future__ import annotations

import argparse
from typing import Any

from lightck.cli.output import BAD_DATA, OK, age, print_json, size, table, timeline
from lightck.cli.place import add_path, rows_at
from lightck.config import Config

SUMMARY = "list snapshots, newest first"
DESCRIPTION = """\
List the snapshots at PATH, newest first. Nothing but their metadata is read and checked.

A snapshot is `whole` (restorable as far as its metadata tells; `verify` reads the payload too),
`abandoned` (a later restore went back before it) or `damaged`."""
EXAMPLES = """\
  lightck ls /dev/shm/run
  lightck ls --json /dev/shm/run | python3 -c 'import json, sys; \\
      print(json.load(sys.stdin)["snapshots"][0]["step"])'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_path(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    rows = rows_at(arguments.path)
    damaged = [row for row in rows if row["state"] == "damaged"]
    for row in rows:
        row["timeline"] = timeline(row["timeline"])
    if arguments.json:
        print_json({"path": Config.resolve(path=arguments.path).path, "snapshots": rows})
    else:
        _show(rows)
    return BAD_DATA if damaged else OK


def _show(rows: list[dict[str, Any]]) -> None:
    listed = [row for row in rows if row["state"] != "damaged"]
    ranks = len({row["file"] for row in rows}) > 1
    headings = ["STEP", "RANK", "STATE", "WRITTEN", "SIZE", "TENSORS", "SLOT", "SURVIVES", ""]
    lines = [
        [
            str(row["step"]),
            str(row["rank"]),
            row["state"],
            age(row["wall_time"]),
            size(row["payload_bytes"]),
            str(row["tensors"]),
            str(row["slot"]),
            row["survives"],
            ", ".join(word for word in ("early", "suspect") if row[word]),
        ]
        for row in listed
    ]
    if not ranks:
        headings.pop(1)
        for line in lines:
            line.pop(1)
    print(table(headings, lines, left=0) if lines else "no snapshots yet")
    for row in rows:
        if row["state"] == "damaged":
            print(f"damaged: {row['problem']}")
