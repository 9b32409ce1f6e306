"""What can be measured: one module per kind of definition, each with `measure(job)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.definition import Contender, Method
from bench.record import Record
from bench.work import Work


@dataclass(frozen=True)
class Job:
    """One engine to measure, in this process.

    Attributes:
        kind: module in this package.
        contender: the engine.
        work: what is trained.
        method: how it is measured.
        precision: measure to wanted half-width of its interval (`relative`: share of the value).
        folder: empty, on the contender's medium.
        tell: takes a word on how far it is.
    """

    kind: str
    contender: Contender
    work: Work
    method: Method
    precision: dict[str, float]
    folder: Path
    tell: Callable[[str], None] = print


def run(job: Job) -> list[Record]:
    """Measure.

    Raises:
        BenchError: a snapshot was lost, or what was restored is not what was saved.
    """
    module = importlib.import_module(f"bench.measures.{job.kind}")
    records: list[Record] = module.measure(job)
    return records
