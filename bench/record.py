"""A measured quantity, and the Parquet file that keeps it with everything needed to judge it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.errors import BenchError
from bench.statistics import Estimate, estimate

FORMAT = 1
_TOLD = ("command", "commit", "definition", "load", "machine", "seconds", "started", "versions")
_KEY = b"lightck-bench"


@dataclass(frozen=True)
class Record:
    """One quantity of one engine.

    Attributes:
        engine: label in the definition.
        measure: name of the measure; see `bench.measures`.
        unit: of value, bounds and samples: "s", "B", "B/s", or "" for a ratio or a count.
        value: trimmed mean of the samples, or the one number there is.
        low: lower end of its 95 % interval; the value itself where there is no spread.
        high: upper end of the interval.
        samples: the samples that value and bounds were made from, if any.
        capped: the run hit its cap before the interval was as narrow as wanted.
        note: a text for the report.
    """

    engine: str
    measure: str
    unit: str
    value: float
    low: float
    high: float
    samples: list[float] = field(default_factory=list)
    capped: bool = False
    note: str = ""


def single(measure: str, unit: str, value: float, note: str = "") -> Record:
    """Make a record of a number without spread; the runner's parent fills in the engine."""
    return Record("", measure, unit, value, value, value, note=note)


def sampled(
    measure: str,
    unit: str,
    samples: Sequence[float],
    *,
    scale: float = 1.0,
    capped: bool = False,
    note: str = "",
) -> Record:
    """Make a record of the trimmed mean and interval of `samples`, all in units of `scale`."""
    found: Estimate = estimate(samples).over(scale)
    kept = [sample / scale for sample in samples]
    return Record("", measure, unit, found.value, found.low, found.high, kept, capped, note)


@dataclass(frozen=True)
class Result:
    """All records of a definition, and how they came about.

    Attributes:
        about: definition, machine, versions, command, commit, time; plain JSON values.
        records: in the order of the definition's engines.
    """

    about: dict[str, Any]
    records: list[Record]

    def of(self, engine: str, measure: str) -> Record | None:
        """Return the record of an engine's measure."""
        for record in self.records:
            if (record.engine, record.measure) == (engine, measure):
                return record
        return None


_SCHEMA = pa.schema(
    [
        ("engine", pa.string()),
        ("measure", pa.string()),
        ("unit", pa.string()),
        ("value", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("samples", pa.list_(pa.float64())),
        ("capped", pa.bool_()),
        ("note", pa.string()),
    ]
)
assert _SCHEMA.names == [f.name for f in fields(Record)]


def write(result: Result, path: Path) -> None:
    """Store a result; the file appears completely or not at all.

    Raises:
        BenchError: a value is not a number, or the folder takes no file.
    """
    for record in result.records:
        if math.isnan(record.value):
            raise BenchError(f"{record.engine}: {record.measure} is not a number")
    about = json.dumps({"format": FORMAT, **result.about}, sort_keys=True)
    table = pa.Table.from_pylist([asdict(r) for r in result.records], _SCHEMA)
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata({_KEY: about.encode()}), part)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise BenchError(f"{path}: cannot be written: {error}") from error


def read(path: Path) -> Result:
    """Load a result from a file.

    Raises:
        BenchError: the file is missing, not a result, of another version, or incomplete.
    """
    if path.is_dir():
        raise BenchError(f"{path}: a folder, not a result")  # Arrow would read it as one table
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise BenchError(f"{path}: cannot be read: {error}") from error
    stored = (table.schema.metadata or {}).get(_KEY)
    if stored is None:
        raise BenchError(f"{path}: a Parquet file, but not of `python -m bench run`")
    try:
        about: dict[str, Any] = json.loads(stored)
    except ValueError as error:
        raise BenchError(f"{path}: cannot be read: what it says of itself: {error}") from error
    found = about.pop("format", None)
    if found != FORMAT:
        raise BenchError(
            f"{path}: results of format {found!r}, this bench reads {FORMAT}: run"
            f" `python -m bench run {about.get('definition', {}).get('name', '...')}` again, or"
            f" use the commit that wrote it ({about.get('commit', 'unknown')})"
        )
    missing = [key for key in _TOLD if key not in about]
    missing += [name for name in _SCHEMA.names if name not in table.schema.names]
    if missing:
        raise BenchError(f"{path}: not as `python -m bench run` wrote it: no {', '.join(missing)}")
    rows = table.select(_SCHEMA.names).to_pylist()
    return Result(about, [_bounded(Record(**row)) for row in rows])


def _bounded(record: Record) -> Record:
    """Return a record with the bounds that its samples have by today's rule."""
    if len(record.samples) < 2:
        return record
    found = estimate(record.samples)
    if not math.isclose(found.value, record.value, rel_tol=1e-9, abs_tol=1e-300):
        return record  # its samples are of something else
    return replace(record, low=found.low, high=found.high)
