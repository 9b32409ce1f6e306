"""`lightck ls`: list the snapshots at a path."""

from __future__ import annotations

import argparse
from typing import Any

from lightck.cli.arguments import add_path, location, rows_at
from lightck.cli.output import BAD_DATA, OK, age, print_json, size, table, timeline
from lightck.examine import kept
from lightck.history import item
from lightck.load import region_files

DESCRIPTION = """\
List the snapshots at PATH, newest first. Nothing but their metadata is read and checked.

A snapshot is `whole` (restorable as far as its metadata tells; `verify` reads the payload too),
`abandoned` (a later restore went back before it) or `damaged`. Of several ranks it is `whole` if
every rank can put its state together, else `partial`; RANKS counts the regions that have a part.
The history follows, where there is one: `kept`, `unfinished`, or `left` (as abandoned above)."""
EXAMPLES = """\
  lightck ls /dev/shm/run
  lightck ls --json /dev/shm/run | python3 -c 'import json, sys; \\
      print(json.load(sys.stdin)["snapshots"][0]["step"])'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_path(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    items = kept(arguments.path)
    rows = rows_at(arguments.path) if not items or region_files(arguments.path) else []
    damaged = [row for row in rows if row["state"] == "damaged"]
    for row in rows:
        row["timeline"] = timeline(row["timeline"])
    if arguments.json:
        plain = [{**each, "metrics": item.plain(each["metrics"])} for each in items]
        more = {"history": plain} if items else {}
        print_json({"path": location(arguments.path), "snapshots": rows, **more})
    else:
        _show(rows)
        if items:
            _show_history(items)
    return BAD_DATA if damaged else OK


def _show(rows: list[dict[str, Any]]) -> None:
    listed = [row for row in rows if row["state"] != "damaged"]
    if len({row["file"] for row in rows}) > 1:
        headings = ["STEP", "RANKS", "STATE", "WRITTEN", "SIZE", "SURVIVES", ""]
        lines = [_over_ranks(group) for group in _groups(listed)]
    else:
        headings = ["STEP", "STATE", "WRITTEN", "SIZE", "TENSORS", "SLOT", "SURVIVES", ""]
        lines = [
            [
                str(row["step"]),
                row["state"],
                age(row["wall_time"]),
                size(row["payload_bytes"]),
                str(row["tensors"]),
                str(row["slot"]),
                row["survives"],
                _marks([row]),
            ]
            for row in listed
        ]
    print(table(headings, lines, left=0) if lines else "no snapshots yet")
    for group in _groups(listed):
        if group[0]["state"] == "partial":
            print(f"partial: step {group[0]['step']}: {group[0]['problem']}")
    for row in rows:
        if row["state"] == "damaged":
            print(f"damaged: {row['problem']}")


def _show_history(items: list[dict[str, Any]]) -> None:
    headings = ["STEP", "STATE", "WRITTEN", "SIZE", "EPOCH", "METRICS"]
    lines = [
        [
            str(each["step"]),
            f"{each['state']}{', pinned' if each['pinned'] else ''}",
            age(each["time"]),
            size(each["bytes"]),
            str(each["epoch"]),
            ", ".join(f"{name} {value:.6g}" for name, value in each["metrics"].items()),
        ]
        for each in items
    ]
    print(f"\nhistory\n{table(headings, lines, left=0)}")


def _groups(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group the rows by snapshot, in their order."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["step"], row["timeline"], row["state"]), []).append(row)
    return list(found.values())


def _over_ranks(group: list[dict[str, Any]]) -> list[str]:
    newest = max(group, key=lambda row: row["wall_time"])
    return [
        str(newest["step"]),
        str(len({row["rank"] for row in group})),
        newest["state"],
        age(newest["wall_time"]),
        size(sum(row["payload_bytes"] for row in group)),
        newest["survives"],
        _marks(group),
    ]


def _marks(rows: list[dict[str, Any]]) -> str:
    """Return the marks that any rank of a snapshot has: early, suspect."""
    return ", ".join(word for word in ("early", "suspect") if any(row[word] for row in rows))
