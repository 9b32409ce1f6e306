"""The measures: one module per kind of definition, each with `measure(job)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.definition import Contender, Method
from bench.group import Group
from bench.record import Record
from bench.work import Work


@dataclass(frozen=True)
class Job:
    """One engine to measure, in this process (and in those of the other ranks).

    Attributes:
        kind: the module in this package.
        contender: the engine.
        work: the training.
        method: how the engine is measured.
        precision: measure to wanted half-width of its interval (`relative`: as a share of the
            value).
        folder: on the contender's medium, the same for all ranks and all phases; empty at first.
        tell: called with a text on how far it is.
        group: the ranks that measure it together.
    """

    kind: str
    contender: Contender
    work: Work
    method: Method
    precision: dict[str, float]
    folder: Path
    tell: Callable[[str], None] = print
    group: Group = field(default_factory=Group)


_BEFORE = {"restore_ranks": ("save_ranks",)}


def phases(kind: str) -> tuple[str, ...]:
    """Return the modules that make up a kind, each in new processes.

    The last one has the records.
    """
    return (*_BEFORE.get(kind, ()), kind)


def run(job: Job) -> list[Record]:
    """Measure a job's engine and return the records.

    Raises:
        BenchError: a snapshot was lost, or what was restored is not what was saved.
    """
    module = importlib.import_module(f"bench.measures.{job.kind}")
    records: list[Record] = module.measure(job)
    return records
