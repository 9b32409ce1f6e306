"""The engines: name, module, what it needs, and what can be set. One process runs one engine."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.engines.base import Engine
from bench.errors import BenchError


@dataclass(frozen=True)
class Kind:
    """An engine as definitions name it.

    Attributes:
        module: where its class is, imported in the process that measures it.
        about: one line for `python -m bench list` and the report.
        packages: whose versions are recorded; all must be installed.
        settings: name to default; None: checked by the engine itself.
    """

    module: str
    about: str
    packages: tuple[str, ...] = ("torch",)
    settings: Mapping[str, Any] | None = None


KINDS = {
    "none": Kind("bench.engines.none", "no engine: what the method itself shows (A/A)", (), {}),
    "lightck": Kind("bench.engines.lightck", "lightck.attach, as a user would", ("torch",)),
    "blocking": Kind(
        "bench.engines.blocking", "training waits for one non-temporal copy of the state", (), {}
    ),
    "torch.save": Kind(
        "bench.engines.torch_save",
        "torch.save while training waits",
        ("torch",),
        {"sync": False, "mmap": False},
    ),  # fmt: skip
    "checkfreq": Kind(
        "bench.engines.checkfreq",
        "CheckFreq (FAST'21), own implementation for CPUs: snapshot in a thread, fence at the"
        " update, torch.save + fsync behind it",
        ("torch",),
        {"profiled": False, "budget": 0.05},
    ),
    "dcp": Kind(
        "bench.engines.dcp",
        "torch.distributed.checkpoint.async_save, by every rank",
        ("torch",),
        {"checkpointer": "thread"},
    ),  # fmt: skip
}


def check(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse an engine or a setting that does not exist.

    Raises:
        BenchError: with what there is.
    """
    if name not in KINDS:
        raise BenchError(f"unknown engine {name!r}; engines are {', '.join(KINDS)}")
    allowed = KINDS[name].settings
    if allowed is None:
        return
    for key, value in settings.items():
        if key not in allowed:
            known = ", ".join(allowed) or "none"
            raise BenchError(f"engine {name}: unknown setting {key!r}; settings: {known}")
        if type(value) is not type(allowed[key]):
            raise BenchError(
                f"engine {name}: {key} = {value!r}, expected a {type(allowed[key]).__name__}"
                f" such as {allowed[key]!r}"
            )


def make(name: str, settings: Mapping[str, Any]) -> Engine:
    """An engine with its settings; imports what it needs.

    Raises:
        BenchError: unknown, or it does not take these settings.
    """
    check(name, settings)
    engine: Engine = importlib.import_module(KINDS[name].module).make(**settings)
    return engine
