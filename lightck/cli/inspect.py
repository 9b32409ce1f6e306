"""`lightck inspect`: show what a region is and what one of its snapshots holds."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import datetime
from typing import Any

from lightck.cli.arguments import add_path, add_step, rows_at, step_of, with_history
from lightck.cli.output import BAD_DATA, OK, age, pairs, print_json, size, table, timeline
from lightck.errors import PmdkMissingError
from lightck.examine import Contents, contents, regions
from lightck.pmdk import media_report

DESCRIPTION = """\
Describe the region at PATH (identity, medium, space, timelines) and one snapshot in it: sums per
role, tensors, extras. The largest tensors are listed, with --tensors all of them."""
EXAMPLES = """\
  lightck inspect /dev/shm/run
  lightck inspect --step 1200 --tensors /dev/shm/run | grep attention
  lightck inspect --json /dev/shm/run > run.json
"""
_TOP = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_path(parser)
    add_step(parser, "the newest that is whole")
    parser.add_argument("--tensors", action="store_true", help="list all tensors, in their order")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    path = with_history(arguments.path, arguments.step)
    rows = rows_at(path, arguments.step)
    problems = [row["problem"] for row in rows if row["state"] == "damaged"]
    found = [_with_readable_timelines(region) for region in regions(path)]
    media = _media(path)
    for region in found:
        region["media"] = media.get(region["file"])
    there = any(row["state"] == "whole" for row in rows) or arguments.step is not None
    held = contents(path, step_of(arguments)) if there else None
    if arguments.json:
        print_json({"regions": found, "snapshot": held and _document(held), "problems": problems})
    else:
        print("\n\n".join(_region_text(region) for region in found))
        print("\nno snapshot" if held is None else _snapshot_text(held, arguments.tensors))
        for problem in problems:
            print(f"damaged: {problem}")
    return BAD_DATA if problems else OK


def _media(path: str | None) -> dict[str, dict[str, Any]]:
    """Return what libpmem2 knows of the media, by file; empty where it is not installed."""
    try:
        return {str(report.file): asdict(report) for report in media_report(path)}
    except PmdkMissingError:
        return {}


def _media_text(media: dict[str, Any]) -> str:
    blocks, count = media["bad_blocks"], media["unsafe_shutdowns"]
    return ", ".join(
        (
            "bad blocks unknown" if blocks is None else f"{len(blocks)} bad blocks",
            "unsafe shutdowns unknown" if count is None else f"{count} unsafe shutdowns",
        )
    )


def _with_readable_timelines(region: dict[str, Any]) -> dict[str, Any]:
    lineage = [{**each, "timeline": timeline(each["timeline"])} for each in region["lineage"]]
    return {**region, "timeline": timeline(region["timeline"]), "lineage": lineage}


def _document(held: Contents) -> dict[str, Any]:
    return {
        **held.snapshot,
        "timeline": timeline(held.snapshot["timeline"]),
        "roles": _roles(held),
        "extras": held.extras,
        "optimizers": held.optimizers,
        "learned": held.learned_words,
        "tensors": held.tensors.to_pylist(),
    }


def _roles(held: Contents) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    names: set[str] = set()  # a tensor shared by ranks has a row for each piece
    for row in held.tensors.select(["name", "role", "bytes"]).to_pylist():
        each = sums.setdefault(row["role"], {"tensors": 0, "bytes": 0})
        each["tensors"] += row["name"] not in names
        names.add(row["name"])
        each["bytes"] += row["bytes"]
    return sums


def _region_text(region: dict[str, Any]) -> str:
    created: datetime = region["created"]
    slot = sum(segment["slot_bytes"] for segment in region["segments"])
    segments = [f"{size(s['length'])} at {s['offset']}" for s in region["segments"]]
    branches = [f"{b['timeline']} up to commit {b['up_to_sequence']}" for b in region["lineage"]]
    lines = [
        ("region", region["file"]),
        ("uuid", region["uuid"]),
        ("run", f"{region['run']} (digest of run_id)"),
        ("rank", f"{region['rank']} of {region['world']}"),
        ("medium", f"{region['medium']}, durable by {region['granularity']}"),
        ("survives", region["survives"]),
        ("created", f"{created:%Y-%m-%d %H:%M:%S} UTC, {age(created)}"),
        ("size", size(region["size_bytes"])),
        ("slots", f"{region['slots']} of {size(slot)}"),
        ("segments", "; ".join(segments)),
        ("timeline", region["timeline"]),
        ("continues", "; ".join(branches) or "nothing"),
        ("format", f"version {region['format_version']}"),
    ]
    if region["media"] is not None and region["medium"] in ("fsdax", "devdax"):
        lines.insert(5, ("libpmem2", _media_text(region["media"])))
    if region["granularity"] == "none":
        lines[4] = ("medium", region["medium"])
    return pairs(lines)


def _snapshot_text(held: Contents, every: bool) -> str:
    row = held.snapshot
    written: datetime = row["wall_time"]
    marks = "".join(f", {word}" for word in ("early", "suspect") if row[word])
    head = [
        ("snapshot", f"step {row['step']} ({row['state']}{marks})"),
        ("written", f"{written:%Y-%m-%d %H:%M:%S} UTC, {age(written)}"),
        ("slot", f"{row['slot']}, commit {row['sequence']}"),
        ("timeline", timeline(row["timeline"]) or ""),
        ("extras", ", ".join(held.extras) or "none"),
        ("optimizers", ", ".join(held.optimizers) or "none"),
        ("learned", held.learned_words),
    ]
    sums = [[r, str(s["tensors"]), size(s["bytes"])] for r, s in _roles(held).items()]
    sums.append(["all", str(row["tensors"]), size(row["payload_bytes"])])
    parts = [pairs(head), table(["ROLE", "TENSORS", "SIZE"], sums), _tensors(held, every)]
    return "\n" + "\n\n".join(part for part in parts if part)


def _tensors(held: Contents, every: bool) -> str:
    rows = held.tensors.to_pylist()
    chosen = rows if every else sorted(rows, key=lambda r: -int(r["bytes"]))[:_TOP]
    ranks, sharded = (name in held.tensors.column_names for name in ("rank", "part_of"))
    lines = [
        [
            row["name"],
            *([str(row["rank"]), str(row["begin"])] if ranks else []),
            row["role"],
            f"{row['dtype']}[{','.join(map(str, row['shape']))}]",
            size(row["bytes"]) if row["alias_of"] is None else "-",
            str(row["offset"]) if row["alias_of"] is None else "-",
            f"{row['crc']:08x}" if row["alias_of"] is None else f"= {row['alias_of']}",
            *([row["part_of"] or "-"] if sharded else []),
        ]
        for row in chosen
    ]
    if not lines:
        return ""
    headings = ["TENSOR", "ROLE", "TYPE", "SIZE", "OFFSET", "CRC32C"]
    if ranks:
        headings[1:1] = ["RANK", "FROM"]
    if sharded:
        headings.append("PART OF")
    text = table(headings, lines, left=5 if ranks else 3)
    left_out = len(rows) - len(chosen)
    return text + (f"\n... and {left_out} smaller ones (--tensors lists all)" if left_out else "")
