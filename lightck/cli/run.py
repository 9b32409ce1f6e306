"""`lightck run`: torchrun, with workers that recover in place."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.launcher.api as launcher
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lightck.cli.output import OK, Refusal
from lightck.inplace.agent import WORKER_MODULE, agent_class

OLDEST = 2, 13
"""The oldest torch whose in-place tests have passed."""
DESCRIPTION = """\
Start a training as torchrun does, so that the death of one rank stops no other.

A worker that ends is replaced, and only that one. The other ranks stay inside the collective they
are in; the replacement restores the last step from their memory, computes its part of the minibatch
again, and joins. All of torchrun's options are understood; --max-restarts (default here: 3) counts
replacements, and restarts of all ranks, which are what happens where a rank cannot be replaced.
"""
EXAMPLES = """\
  lightck run --standalone --nproc-per-node 4 train.py --lr 0.1
  lightck run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id 7 train.py
  lightck run -- torchrun --standalone --nproc-per-node 4 train.py
  lightck chaos --fault kill:20:forward:1 -- lightck run --standalone --nproc-per-node 2 train.py
"""
MAX_RESTARTS = 3
MONITOR_S = 0.05
"""Seconds between two looks at the workers: torchrun's default is twice that."""
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def parser() -> argparse.ArgumentParser:
    """Return torchrun's own parser with a few options more."""
    found = torchrun.get_args_parser()
    found.prog, found.description = "lightck run", DESCRIPTION
    found.epilog = f"examples:\n{EXAMPLES}"
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    found.set_defaults(max_restarts=MAX_RESTARTS, monitor_interval=MONITOR_S)
    own = found.add_argument_group("lightck")
    own.add_argument(
        "--spare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep a process per node that has imported everything (about 250 MB, no CPU)",
    )
    own.add_argument(
        "--preload",
        default="auto",
        metavar="MODULES",
        help="what the spare imports: names with commas, none, or auto (what SCRIPT imports)",
    )
    return found


def main(words: Sequence[str]) -> int:
    """Run the command; return the exit status.

    Raises:
        Refusal: an option that torchrun knows cannot be combined with it.
    """
    given = [*words]
    if given[:1] == ["--"]:
        given = given[1:]
    if given[:1] == ["torchrun"]:
        given = given[1:]
    arguments = parser().parse_args(given)
    _require_torch(torch.__version__)
    _require_python(arguments)
    script = arguments.training_script
    preload = _preload(arguments.preload, script, as_module=arguments.module)
    # Where a worker finds modules first; see `lightck.inplace.worker.main`.
    folder = os.getcwd() if arguments.module else os.path.dirname(os.path.abspath(script))
    arguments.training_script_args = [
        *(["-m"] if arguments.module else []),
        script,
        *arguments.training_script_args,
    ]
    arguments.training_script, arguments.module = WORKER_MODULE, True
    # Replacements meet the others over the agent's store, which outlives every worker.
    os.environ.pop(SHARED_STORE, None)
    api: Any = launcher
    api.LocalElasticAgent = agent_class(keeps_spare=arguments.spare, preload=preload, folder=folder)
    try:
        torchrun.run(arguments)
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        raise Refusal(f"{error}", abs(failure.exitcode) or 1) from error
    return OK


def _require_torch(version: str) -> None:
    """Refuse a torch on which recovery in place has not been shown.

    Raises:
        Refusal: names both versions.
    """
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < OLDEST:
        raise Refusal(
            f"torch {version}: recovery in place was tried with torch 2.13 and 2.15, and hangs with"
            " torch 2.6; use torchrun, with which all ranks restart, or a newer torch"
        )


def _require_python(arguments: Any) -> None:
    """Refuse what runs no Python script in a process of its own.

    Raises:
        Refusal: names the option.
    """
    for name in ("no_python", "run_path"):
        if getattr(arguments, name, False):
            option = name.replace("_", "-")
            raise Refusal(f"lightck run starts Python scripts: leave out --{option}")
    if arguments.start_method not in (None, "spawn"):
        raise Refusal(f"lightck run starts processes anew, not by {arguments.start_method}")


def _preload(wanted: str, script: str, *, as_module: bool) -> list[str]:
    """Return the modules that a spare imports."""
    if wanted == "none":
        return []
    if wanted != "auto":
        return wanted.split(",")
    path = Path(script)
    if as_module or not path.is_file():
        return []
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return []  # the script itself says so
    found: dict[str, None] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
    # Modules beside the script may do things when they are imported; the worker does that.
    beside = {each.stem for each in path.resolve().parent.glob("*.py")}
    beside |= {each.name for each in path.resolve().parent.iterdir() if each.is_dir()}
    return [name for name in found if name.split(".")[0] not in beside]
