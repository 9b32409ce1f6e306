"""`lightck verify`: read every byte and compare it with its checksum."""

from __future__ import annotations

import argparse
from typing import Any

from lightck.cli.arguments import add_path, add_step, location, rows_at, with_history
from lightck.cli.output import BAD_DATA, OK, print_json, progress, size, table
from lightck.examine import check, kept

DESCRIPTION = """\
Read every payload byte of every snapshot at PATH (or of one) and compare it with its checksum,
those of the history, too.
Exit status 1 and the names of the tensors when anything is damaged. A snapshot that a trainer
replaced meanwhile is `gone`, which is no damage."""
EXAMPLES = """\
  lightck verify /dev/shm/run
  lightck verify --step 1200 /mnt/pmem/run && echo sound
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_path(parser)
    add_step(parser, "all of them")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    path = with_history(arguments.path, arguments.step)
    rows = rows_at(path, arguments.step)
    total = sum(r["payload_bytes"] or 0 for r in rows if arguments.step in (None, r["step"]))
    with progress("verify", total) as more:
        results = check(path, arguments.step, progress=more)
        if arguments.step is None:
            for each in kept(path):
                results += check(each["folder"], progress=more)
    bad = [result for result in results if result["state"] == "damaged"]
    if arguments.json:
        print_json({"path": location(arguments.path), "ok": not bad, "snapshots": results})
        return BAD_DATA if bad else OK
    known = [result for result in results if "step" in result]
    if known:
        lines = [
            [str(r["step"]), str(r["rank"]), str(r["slot"]), size(r["bytes"]), _state(r)]
            for r in known
        ]
        print(table(["STEP", "RANK", "SLOT", "SIZE", "STATE"], lines, left=0))
    for result in bad:
        label = f"{result['file']} slot {result.get('slot')} step {result.get('step')}"
        for name in result["damaged"]:
            print(f"damaged: {label}: the bytes of {name} do not match their checksum")
        if result["problem"]:
            print(f"damaged: {result['problem']}")
    if not bad:
        print("all good" if results else "no snapshots yet: nothing to verify")
    return BAD_DATA if bad else OK


def _state(result: dict[str, Any]) -> str:
    return f"{result['state']}{', suspect: replicas differed' if result['suspect'] else ''}"
