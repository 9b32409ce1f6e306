"""Measure one part in this process: its engines one after the other, so that ratios are fair.

Each engine's outcome is in the file before the next one begins.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import execute, measures
from bench.definition import Contender, Definition
from bench.device import settle
from bench.errors import BenchError
from bench.gpu.parts import Part, contenders_of
from bench.machine import versions
from bench.place import scratch
from bench.work import Work

_RESERVED = 0.4  # part of an engine's time for building, attaching and verifying


def measure(part: Part, whole: Definition, into: Path, seconds: float) -> None:
    """Measure a part's engines.

    Args:
        part: the part to measure.
        whole: its definition, as it is to be run.
        into: file for the outcome: records, versions, and errors by engine.
        seconds: time for all of it.
    """
    device = whole.work.device
    settle(device)
    if device == "cpu":
        torch.set_num_threads(1)
    until = time.monotonic() + seconds
    contenders = contenders_of(part, whole)
    outcome: dict[str, Any] = {"records": [], "failed": {}, "versions": versions(whole.packages)}
    for i, contender in enumerate(contenders):
        share = (until - time.monotonic()) / (len(contenders) - i) * (1 - _RESERVED)
        print(f"  {contender.label}", flush=True)
        begin = time.monotonic()
        try:
            outcome["records"] += _one(whole, contender, max(1.0, share))
        except BenchError as error:
            outcome["failed"][contender.label] = str(error)
        except Exception:  # noqa: BLE001 - reported; the others go on
            outcome["failed"][contender.label] = traceback.format_exc()
        if contender.label in outcome["failed"]:
            print(f"  {contender.label}: {outcome['failed'][contender.label]}", flush=True)
        print(f"  {contender.label}: {time.monotonic() - begin:.0f} s", flush=True)
        _written(outcome, into)
        _forget(device)


def _one(whole: Definition, contender: Contender, seconds: float) -> list[dict[str, Any]]:
    wanted = execute.job_of(whole, contender)
    method = whole.method_of(contender)
    with scratch(contender.medium) as folder:
        job = measures.Job(
            kind=whole.kind,
            contender=contender,
            work=Work(**wanted["work"]),
            method=replace(method, seconds=min(method.seconds, seconds)),
            precision=wanted["precision"],
            folder=folder,
            tell=lambda text: None,
        )
        return [{**asdict(record), "engine": contender.label} for record in measures.run(job)]


def _forget(device: str) -> None:
    """Free what this engine took, for the next engine."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if device != "cpu":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # a sticky error: every remaining engine will report it
            print(f"  the device is lost: {error}", flush=True)


def _written(outcome: Mapping[str, Any], into: Path) -> None:
    part = into.with_suffix(".part")
    part.write_text(json.dumps(outcome))
    part.replace(into)
