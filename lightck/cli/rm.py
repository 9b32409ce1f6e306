"""`lightck rm`: remove a run."""

from __future__ import annotations

import argparse
import os
import sys

from lightck.cli.arguments import location, no_region
from lightck.cli.output import OK, Refusal, print_json, size
from lightck.errors import ConfigError
from lightck.policy.keep import Keep, parse_keep
from lightck.removal import RunFile, files_at, prune, pruned_by, remove

DESCRIPTION = """\
Remove the regions of all ranks at PATH, and their history, and nothing else that lies in the
folder, which stays. With --keep only items of the history are removed, also beside a trainer. On
tmpfs and hugetlbfs that gives their memory back, which they hold until then. Refused while a
trainer or a reader holds one of them. Asks before it removes; there is no way back."""
EXAMPLES = """\
  lightck rm /dev/shm/run
  lightck rm ./lightck-run --keep "newest 1 or best val_loss"
  lightck rm --yes ./lightck-run    # without a question, for scripts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="folder given to attach; it must be named")
    parser.add_argument(
        "--keep",
        metavar="WORDS",
        help="remove only what WORDS do not keep of the history ('newest 2 or best val_loss')",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    where = location(arguments.path)
    keep = None if arguments.keep is None else _policy(arguments.keep)
    found = files_at(where) if keep is None else pruned_by(where, keep)
    if not found and (keep is None or not os.path.isdir(where)):
        raise no_region(where)
    if found and not arguments.yes:
        _ask(found, asks=not arguments.json and sys.stdin.isatty())
    removed = remove(where) if keep is None else prune(where, keep, found)
    total = sum(each.taken_bytes for each in removed)
    if arguments.json:
        print_json({"path": where, "removed": [each.path for each in removed], "bytes": total})
    else:
        print(f"removed {len(removed)} file(s), {size(total)}")
    return OK


def _policy(words: str) -> Keep:
    value = int(words) if words.isdecimal() and int(words) else words
    try:
        found = parse_keep(value)
    except ConfigError as error:
        raise Refusal(f"--keep {words!r}: {error}") from error
    assert found is not None, "0 is no policy, and was taken for words"
    return found


def _ask(found: list[RunFile], *, asks: bool) -> None:
    if not asks:
        raise Refusal("rm asks before it removes, and nobody can answer here: give --yes")
    for each in found:
        print(f"{each.path}  {size(each.taken_bytes)}")
    try:
        answer = input(f"Remove these {len(found)} file(s)? There is no way back. [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise Refusal("nothing was removed")
