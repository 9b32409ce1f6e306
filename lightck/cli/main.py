"""Parse arguments, choose the exit status and print errors of the `lightck` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import lightck
from lightck.cli.output import BAD_DATA, OK, USAGE, Refusal
from lightck.errors import (
    CorruptSnapshotError,
    LightckError,
    NoSnapshotError,
    RegionFormatError,
    RegionIOError,
)

_DAMAGE = (CorruptSnapshotError, NoSnapshotError, RegionFormatError, RegionIOError)

_COMMANDS = {
    "ls": "list snapshots, newest first",
    "inspect": "describe a region and one snapshot",
    "verify": "check every byte of the snapshots",
    "export": "write a snapshot as safetensors or torch.save file",
    "rm": "remove a run's regions, of all ranks, or a part of its history",
    "pin": "keep a step of the history whatever the policy says",
    "top": "watch a running trainer",
    "plan": "say what each policy would cost a job, and what failures would undo",
    "run": "start a training as torchrun does, so that the death of one rank stops no other",
    "timeline": "show where the time of a traced run went",
    "health": "show what this machine tells of failures to come",
    "demo": "train, kill, restart and compare with an uninterrupted run",
    "chaos": "kill, stop, hang and corrupt a training on purpose, and see what it loses",
}
"""The commands and their summaries. Their modules are imported on call: most need torch, which
takes a second."""
_IN_PACKAGES = {name: f"lightck.cli.{name}.command" for name in ("demo", "chaos")}
"""The modules of commands that have a package of their own."""
_EXIT_STATUS = """\
exit status:
  0  ok
  1  something is wrong with the data: damaged, unreadable, or two runs differ
  2  wrong usage, no such place, or it could not be done
"""
_EPILOG = f"""\
PATH is the folder, libpmemobj pool or devdax device given to lightck.attach; without it
$LIGHTCK_PATH, else ./lightck-run. All commands but rm may run while a trainer writes there, except
on a pool, which one process has at a time; verify and export hold the snapshot they read, and a
trainer that needs its slot skips snapshots meanwhile.

examples:
  lightck ls /dev/shm/run
  lightck verify /dev/shm/run && lightck export /dev/shm/run model.safetensors
  lightck <command> --help

{_EXIT_STATUS}"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"lightck: error: {message}\n(see: {self.prog} --help)\n")


class _Version(argparse.Action):
    """Print the version on demand, because looking it up takes some time, too."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"lightck {lightck.__version__}")
        parser.exit()


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="lightck",
        description="Look into, check and export checkpoints of lightck.",
        epilog=_EPILOG,
        formatter_class=shape,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        # Only the help of the chosen command says more than one line.
        if name == chosen:
            command = import_module(_IN_PACKAGES.get(name, f"lightck.cli.{name}"))
            each = commands.add_parser(
                name,
                help=summary,
                description=command.DESCRIPTION,
                epilog=f"examples:\n{command.EXAMPLES}\n{_EXIT_STATUS}",
                formatter_class=shape,
            )
            command.add_arguments(each)
            each.add_argument("--json", action="store_true", help="one JSON document, for programs")
            each.set_defaults(run=command.run)
        else:
            commands.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. It raises nothing of its own."""
    words = sys.argv[1:] if argv is None else argv
    try:
        # The command is the first word: the options before it have no values.
        chosen = next((word for word in words if not word.startswith("-")), None)
        if chosen == "run" and words[0] == chosen:  # torchrun's own parser
            return int(import_module("lightck.cli.run").main(words[1:]))
        arguments = _parser(chosen).parse_args(words)
        code: int = arguments.run(arguments)
        if sys.stdout is not None:  # closed, as by a daemon
            sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse: --help, --version, wrong usage
        return done.code if isinstance(done.code, int) else OK
    except Refusal as refusal:
        return _failed(refusal, refusal.code)
    except LightckError as error:
        return _failed(error, BAD_DATA if isinstance(error, _DAMAGE) else USAGE)
    except BrokenPipeError:  # the reader has closed our output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        return _failed(error, USAGE)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def _failed(why: object, code: int) -> int:
    print(f"lightck: error: {why}", file=sys.stderr)
    return code
