"""Arguments, exit status and error texts of the `lightck` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import lightck
from lightck.cli import chaos, demo, export, inspect, ls, timeline, top, verify
from lightck.cli.output import BAD_DATA, OK, USAGE, Refusal
from lightck.errors import (
    CorruptSnapshotError,
    LightckError,
    NoSnapshotError,
    RegionFormatError,
    RegionIOError,
)

_DAMAGE = (CorruptSnapshotError, NoSnapshotError, RegionFormatError, RegionIOError)

_EXIT_STATUS = """\
exit status:
  0  ok
  1  something is wrong with the data: damaged, unreadable, or two runs differ
  2  wrong usage, no such place, or it could not be done
"""
_EPILOG = f"""\
PATH is the folder, libpmemobj pool or devdax device given to lightck.attach; without it
$LIGHTCK_PATH, else ./lightck-run. All commands may run while a trainer writes there, except on a
pool, which one process has at a time; verify and export hold the snapshot they read, and a trainer
that needs its slot skips snapshots meanwhile.

examples:
  lightck ls /dev/shm/run
  lightck verify /dev/shm/run && lightck export /dev/shm/run model.safetensors
  lightck <command> --help

{_EXIT_STATUS}"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"lightck: error: {message}\n(see: {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="lightck",
        description="Look into, check and export checkpoints of lightck.",
        epilog=_EPILOG,
        formatter_class=shape,
    )
    parser.add_argument("--version", action="version", version=f"lightck {lightck.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (ls, inspect, verify, export, top, timeline, demo, chaos):
        name = command.__name__.rpartition(".")[2]
        each = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            epilog=f"examples:\n{command.EXAMPLES}\n{_EXIT_STATUS}",
            formatter_class=shape,
        )
        command.add_arguments(each)
        each.add_argument("--json", action="store_true", help="one JSON document, for programs")
        each.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, raises nothing of its own."""
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse: --help, --version, wrong usage
        return done.code if isinstance(done.code, int) else OK
    except Refusal as refusal:
        return _failed(refusal, refusal.code)
    except LightckError as error:
        return _failed(error, BAD_DATA if isinstance(error, _DAMAGE) else USAGE)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        return _failed(error, USAGE)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def _failed(why: object, code: int) -> int:
    print(f"lightck: error: {why}", file=sys.stderr)
    return code
