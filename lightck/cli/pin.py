"""`lightck pin`: keep a step of the history whatever the policy says."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightck.cli.arguments import add_path, location
from lightck.cli.output import OK, Refusal, print_json
from lightck.history import item

DESCRIPTION = """\
Pin a step of the history at PATH: it is kept whatever `keep` says, until the pin is taken away. The
trainer may go on meanwhile. Where nodes have folders of their own, pin it on each of them."""
EXAMPLES = """\
  lightck pin --step 1200 /mnt/run
  lightck pin --step 1200 --off /mnt/run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_path(parser)
    parser.add_argument("--step", type=int, metavar="N", required=True, help="which step")
    parser.add_argument("--off", action="store_true", help="take the pin away")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    where = location(arguments.path)
    items = {each.kept.step: each for each in item.every_item(Path(where)) if each.is_whole}
    found = items.get(arguments.step)
    if found is None:
        there = ", ".join(map(str, sorted(items))) or "none"
        raise Refusal(f"{where}: the history has no step {arguments.step}; steps there: {there}")
    item.pin(found, pinned=not arguments.off)
    if arguments.json:
        print_json({"path": where, "step": arguments.step, "pinned": not arguments.off})
    else:
        print(f"step {arguments.step} is {'no longer ' if arguments.off else ''}pinned")
    return OK
