"""A training script of the integrations' tests says what it does, and dies where it is told to.

A script is what a user would write, with calls of this module in it. Without `ON` it is the
reference, which lightck has no part in. Every life of a run appends to one file per rank; a step
that is made twice is told twice, and both times must be what the reference told.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))
ON = os.environ.get("PROBE_ON") == "1"
PATH = os.environ.get("PROBE_PATH", "./run")
PARAMS: dict[str, Any] = json.loads(os.environ.get("PROBE_PARAMS", "{}"))
_KILL = os.environ.get("PROBE_KILL", "")
_OUT = Path(os.environ.get("PROBE_OUT", "."))
_began: list[int] = []
"""The steps at which this life was asked, the first one first."""
PATIENCE_S = 20.0
"""Seconds that a script waits, before it dies, for the snapshot that its next life goes on from."""


def param(name: str, default: Any) -> Any:
    """Return a parameter of the run."""
    return PARAMS.get(name, default)


def tell(key: str, value: Any) -> None:
    """Write down a value that must be equal, bit for bit, in every life that comes by here."""
    _write({"key": key, "value": _exact(value)})


def note(key: str, value: Any) -> None:
    """Write down a value that the test looks at, but does not compare."""
    _write({"note": key, "value": value})


def here(place: str, handle: Any = None) -> None:
    """Die by SIGKILL if this is the place; wait before until the step before the last is safe.

    It must be called at every such place, whichever is the one.
    """
    if handle is not None:
        _began.append(handle.step)
    if place != _KILL:
        return
    end = time.monotonic() + PATIENCE_S
    while handle is not None and time.monotonic() < end:
        if (handle.last_committed_step or _began[0]) >= handle.step - 1:
            break
        time.sleep(0.01)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def end(model: nn.Module) -> None:
    """Write down the final weights and buffers, and where the generators stand."""
    torch.save(model.state_dict(), _OUT / f"{'on' if ON else 'off'}-weights.{RANK}")
    tell("generators", [torch.get_rng_state(), np.random.random(), random.random()])
    note("ended", True)


def _write(line: dict[str, Any]) -> None:
    with open(_OUT / f"{'on' if ON else 'off'}.{RANK}", "a") as file:
        file.write(json.dumps(line) + "\n")


def _exact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *_exact(value.detach().cpu().tolist())] if value.ndim else (
            _exact(value.detach().item())
        )  # fmt: skip
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(k): _exact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(each) for each in value]
    if isinstance(value, np.generic):
        return _exact(value.item())
    return value


class _Warnings(logging.Handler):
    """Notes the names of lightck's warnings, which `Chain.compare` looks at."""

    def emit(self, record: logging.LogRecord) -> None:
        note("warning", [getattr(record, "lightck_event", ""), record.getMessage()])


logging.getLogger("lightck").addHandler(_Warnings(logging.WARNING))


class Data(torch.utils.data.Dataset[Any]):
    """Rows and classes; `augment`: the rows are noisy, by the global generators."""

    def __init__(self, length: int = 44, *, augment: bool = False) -> None:
        source = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 8, generator=source)
        self.y = torch.randint(0, 4, (length,), generator=source)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i]
        if self.augment:
            x = x + 0.1 * torch.randn(8) + 0.1 * float(np.random.random()) + 0.1 * random.random()
        return x, self.y[i]


class Net(nn.Module):
    """Dropout draws random numbers, the batch norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))
