"""Run `python -m bench.gpu`: check, measure (one part, called by check itself), take."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.definition import DEVICES
from bench.errors import BenchError
from bench.gpu import measuring, results
from bench.gpu.check import Check, available
from bench.gpu.parts import PARTS, chosen, definition_of
from bench.place import ROOT

_BUDGET_S = {"cuda": 465.0, "cpu": 1800.0}  # of eight minutes; for a machine that others use, too
_SLOWER = 5  # how much slower a CPU may be, for a part's time


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    It is 0, also where there is no GPU, 1, or 2 (an error).
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except BenchError as error:
        print(f"gpu-check: error: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Check lightck on a GPU; docs/gpu-check.md says how.",
        epilog="parts: " + ", ".join(part.name for part in PARTS),
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    each = commands.add_parser("check", help="tests, then the table; in parts")
    each.add_argument("parts", nargs="*", help="parts, or all of a kind; none: all")
    each.add_argument("--device", choices=DEVICES, default="cuda", help="cpu: toys, to see it run")
    each.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="%(default)s")
    each.add_argument("--budget", type=float, help="seconds (465, on a CPU 1800)")
    each.add_argument("--again", action="store_true", help="also what an earlier run has found")
    each.add_argument("--commit", default="", help="of the sources, where git cannot tell")
    each.set_defaults(run=_check)
    each = commands.add_parser("measure", help="one part, in this process")
    each.add_argument("part")
    each.add_argument("outcome", type=Path)
    each.add_argument("--device", choices=DEVICES, default="cuda")
    each.add_argument("--seconds", type=float, default=60.0)
    each.set_defaults(run=_measure)
    each = commands.add_parser("take", help="store a run's results in the repository")
    each.add_argument("folder", type=Path)
    each.set_defaults(run=_take)
    return parser


def _check(arguments: argparse.Namespace) -> int:
    parts = chosen(arguments.parts)
    if why := available(arguments.device):
        print(f"SKIPPED: gpu-check: {why}")
        return 0
    if arguments.device == "cpu":
        parts = [replace(part, most_s=_SLOWER * part.most_s) for part in parts]
    until = time.monotonic() + (arguments.budget or _BUDGET_S[arguments.device])
    out = arguments.out.absolute()
    check = Check(arguments.device, out, until, arguments.again, arguments.commit)
    return check.run(parts)


def _measure(arguments: argparse.Namespace) -> int:
    (part,) = chosen([arguments.part])
    whole = definition_of(part, device=arguments.device, small=arguments.device == "cpu")
    measuring.measure(part, whole, arguments.outcome, arguments.seconds)
    return 0


def _take(arguments: argparse.Namespace) -> int:
    for file in results.take(arguments.folder):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
