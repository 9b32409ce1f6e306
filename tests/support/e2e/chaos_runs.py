"""Runs of `lightck chaos --json`, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

TRAINER = [sys.executable, "-m", "support.e2e.chaos_trainer"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
NEVER = 1_000_000
"""A policy by which no step of a test is ever due."""


def chaos(*words: str, status: int = 0, **environment: str) -> dict[str, Any]:
    """Run `lightck chaos` and return what it reports.

    Just-in-time snapshots are off unless LIGHTCK_FAILURE is given.
    """
    command = [sys.executable, "-m", "lightck.cli", "chaos", "--json", *words]
    where = os.environ | {"LIGHTCK_FAILURE": "off"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=where)
    assert done.returncode == status, done.stderr + done.stdout
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def faults(*texts: str) -> list[str]:
    """Spell faults as arguments of the command."""
    return [word for text in texts for word in ("--fault", text)]
