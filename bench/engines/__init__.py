"""The registry of engines: name, module, needs, and settings. One process runs one engine."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.engines.base import Engine
from bench.errors import BenchError, Unavailable
from bench.machine import installed


@dataclass(frozen=True)
class Kind:
    """An engine as definitions name it.

    Attributes:
        module: the module of its class, imported in the process that measures it.
        about: one line for `python -m bench list` and the report.
        packages: packages whose versions are recorded; all must be installed.
        peers: packages of this engine alone. Without them it cannot run, which is said in place of
            its numbers; the other engines are measured.
        settings: name to default; None: checked by the engine itself.
    """

    module: str
    about: str
    packages: tuple[str, ...] = ("torch",)
    settings: Mapping[str, Any] | None = None
    peers: tuple[str, ...] = ()


KINDS = {
    "none": Kind("bench.engines.none", "no engine: what the method itself shows (A/A)", (), {}),
    "lightck": Kind("bench.engines.lightck", "lightck.attach, as a user would", ("torch",)),
    "blocking": Kind(
        "bench.engines.blocking", "training waits for one non-temporal copy of the state", (), {}
    ),
    "foreach": Kind(
        "bench.engines.foreach",
        "training waits for torch._foreach_copy_ of the state to other memory: nothing is stored",
        ("torch",),
        {},
    ),  # fmt: skip
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
    "checkfreq-device": Kind(
        "bench.engines.checkfreq_device",
        "CheckFreq (FAST'21), own implementation for a GPU: snapshot in spare GPU memory, then by a"
        " thread through pinned memory, torch.save + fsync",
        ("torch",),
        {},
    ),
    "dcp-pinned": Kind(
        "bench.engines.dcp_pinned",
        "torch.distributed.checkpoint.async_save, staged asynchronously into pinned memory",
        ("torch",),
        {},
    ),
    "safetensors": Kind(
        "bench.engines.safetensors",
        "safetensors.torch.save_file while training waits, the state flattened",
        ("torch",),
        {"sync": False},
        ("safetensors",),
    ),
    "torchsnapshot": Kind(
        "bench.engines.torchsnapshot",
        "torchsnapshot.Snapshot.async_take",
        ("torch",),
        {},
        ("torchsnapshot",),
    ),
    "torch_checkpointing": Kind(
        "bench.engines.torch_checkpointing",
        "torch_checkpointing.CheckpointManager with asynchronous saves: staged by a thread, written"
        " by a process",
        ("torch",),
        {"direct": True},
        ("torch_checkpointing",),
    ),
    "lm-resiliency": Kind(
        "bench.engines.lm_resiliency",
        "lm-resiliency (GEMINI): a copy in the process's own memory, which blocks on a CPU; with"
        " `flush` also into files, by a thread",
        ("torch",),
        {"flush": False},
        ("lm-resiliency",),
    ),
    "torchft": Kind(
        "bench.in_place.torchft_script",
        "torchft's Manager, DDP and Optimizer, as many replicas as ranks; lighthouse at 0.1 s, 1 s",
        ("torch",),
        {"spare": False},
    ),
    "nvrx": Kind(
        "bench.in_place.nvrx_script",
        "nvidia-resiliency-ext in-process: the function is entered again, by fewer ranks",
        ("torch",),
        {},
    ),
}


def check(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse an engine or a setting that does not exist.

    Raises:
        BenchError: the message says what exists.
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
    """Make an engine with its settings, importing what it needs.

    Raises:
        BenchError: the engine is unknown, or does not take these settings.
        Unavailable: it is a third party's engine, and cannot be imported.
    """
    check(name, settings)
    try:
        module = importlib.import_module(KINDS[name].module)
    except Exception as error:
        if not KINDS[name].peers:
            raise
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    engine: Engine = module.make(**settings)
    return engine


def missing(name: str) -> str:
    """Say which of an engine's own packages are not installed; empty if all are."""
    gone = [package for package in KINDS[name].peers if not installed(package)]
    return f"no {', '.join(gone)}: pip install -c constraints.txt '.[bench]'" if gone else ""
