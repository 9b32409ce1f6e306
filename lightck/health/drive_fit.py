"""The training of a drive model on logs in Backblaze's format, with torch.

A file holds one line for each drive and day: `date`, `serial_number`, `failure` (1 on the drive's
last day) and `smart_N_raw`; other columns are not read.
Source of the format: https://www.backblaze.com/cloud-storage/resources/hard-drive-test-data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import torch
from numpy.typing import NDArray

from lightck.errors import LightckError
from lightck.health.drive_model import SMART, WIDTHS, DriveModel

ALARM_SHARES = (0.0067, 0.09)
"""Shares of drive-days with an alarm at which the recall is told; the first is the model's own.

So often the rule of SMART 5 and 197 gives an alarm, and so often "5 or 197" does.
"""
_SPARSE = 200  # of the healthy drive-days that are learned from, one of so many is
_LEAST_HEALTHY = 20_000  # but so many, if there are
_LEAST_FAILURES = (20, 5)  # in the days of the training, and in those held out
_STEPS = 300
_DAYS = 7  # for differences
_FIRST = ("date", "serial_number", "failure")
_COLUMNS = tuple(f"smart_{number}_raw" for number in SMART)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Fit:
    """A trained model and what it does on the days that were held out.

    Attributes:
        model: the model.
        auc: the probability that it rates a drive's last day above another drive-day.
        recall: of `ALARM_SHARES`, the share of failures on their day that have an alarm.
        rule_share: share of drive-days on which the rule of SMART 5 and 197 gives one.
        rule_recall: share of failures on whose day it does.
    """

    model: DriveModel
    auc: float
    recall: tuple[float, ...]
    rule_share: float
    rule_recall: float


@dataclass
class _Rows:
    """Drive-days, as the network takes them."""

    inputs: list[Floats] = field(default_factory=list)
    failed: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, inputs: Floats, failed: NDArray[np.bool_]) -> None:
        self.inputs.append(inputs)
        self.failed.append(failed)

    def arrays(self) -> tuple[Floats, NDArray[np.bool_]]:
        if not self.inputs:
            return np.zeros((0, WIDTHS[0]), np.float32), np.zeros(0, bool)
        return np.concatenate(self.inputs), np.concatenate(self.failed)


def fit(
    files: Sequence[Path], *, seed: int = 0, done: Callable[[int], object] = lambda files: None
) -> Fit:
    """Train a model on the first three quarters of the days, and try it on the last quarter.

    Args:
        files: CSV files, which share no day.
        seed: of the weights' beginning, and of which healthy days are learned from.
        done: called with 1 after each file.

    Raises:
        LightckError: a file is no such log, days come twice, or there are too few failures.
    """
    days_of, rows = _days(files)
    days = sorted({day for found in days_of.values() for day in found})
    first_held = days[-max(1, len(days) // 4)]
    keep = max(1 / _SPARSE, min(1.0, _LEAST_HEALTHY / max(1, rows)))
    random = np.random.default_rng(seed)
    learned, held = _Rows(), _Rows()
    earlier: list[tuple[date, NDArray[np.str_], Floats]] = []
    for file in sorted(files, key=lambda file: days_of[file][0]):
        for day, serials, failed, values in _by_day(_table(file), file):
            inputs = _inputs(day, serials, values, earlier)
            if day >= first_held:
                held.add(inputs, failed)
            else:
                taken = failed | (random.random(len(failed)) < keep)
                learned.add(inputs[taken], failed[taken])
            earlier = [each for each in earlier if (day - each[0]).days < _DAYS]
            earlier.append((day, serials, np.log1p(np.maximum(values, 0))))
        done(1)
    _check_failures(learned, held, first_held)
    return _tried(_trained(learned, math.log(keep), seed), held, days, first_held)


# ---- reading ------------------------------------------------------------------------------------


def _read(file: Path, columns: Sequence[str]) -> pa.Table:
    types = {"date": pa.string(), "serial_number": pa.string(), "failure": pa.int8()}
    types |= dict.fromkeys(_COLUMNS, pa.float64())
    try:
        with csv.open_csv(file) as head:
            names = head.schema.names
        missing = [name for name in _FIRST if name not in names]
        if missing or not set(_COLUMNS) & set(names):
            missing = missing or [f"any of {', '.join(_COLUMNS)}"]
            raise LightckError(
                f"{file}: there is no column {', '.join(missing)}; expected a log in Backblaze's"
                f" format, with {', '.join(_FIRST)} and smart_N_raw; found {', '.join(names[:8])}"
            )
        options = csv.ConvertOptions(
            include_columns=[name for name in columns if name in names], column_types=types
        )
        return csv.read_csv(file, convert_options=options)
    except (pa.ArrowInvalid, OSError) as error:
        raise LightckError(f"{file}: cannot be read as CSV: {error}") from error


def _days(files: Sequence[Path]) -> tuple[dict[Path, list[date]], int]:
    """Return the days of each file, in order, and the number of all rows."""
    found, rows, seen = dict[Path, list[date]](), 0, dict[date, Path]()
    for file in files:
        dates = _read(file, ["date"])["date"]
        rows += len(dates)
        found[file] = sorted(_day(text, file) for text in dates.unique().to_pylist())
        if not found[file]:
            raise LightckError(f"{file}: there is no row below the header")
        for day in found[file]:
            if day in seen:
                raise LightckError(f"{day} is in {seen[day]} and in {file}: give each day once")
            seen[day] = file
    ordered = sorted(found, key=lambda file: found[file][0])
    for one, two in zip(ordered, ordered[1:], strict=False):
        if found[two][0] < found[one][-1]:
            raise LightckError(f"the days of {one} and {two} overlap: put them into one file")
    return found, rows


def _day(text: str | None, file: Path) -> date:
    try:
        return date.fromisoformat(text or "")
    except ValueError as error:
        raise LightckError(f"{file}: date {text!r}, expected one such as 2013-05-01") from error


def _table(file: Path) -> pa.Table:
    table = _read(file, [*_FIRST, *_COLUMNS])
    if not set(pc.unique(table["failure"]).to_pylist()) <= {0, 1}:
        raise LightckError(f"{file}: column failure holds more than 0 and 1")
    return table


def _by_day(
    table: pa.Table, file: Path
) -> Iterator[tuple[date, NDArray[np.str_], NDArray[np.bool_], NDArray[np.float64]]]:
    """Yield each day's drives in the order of their serial numbers; values lack as nan."""
    for text in sorted(table["date"].unique().to_pylist()):
        rows = table.filter(pc.equal(table["date"], text)).sort_by("serial_number")
        serials = np.array(rows["serial_number"].to_pylist(), dtype=np.str_)
        if len(np.unique(serials)) < len(serials):
            raise LightckError(f"{file}: {text} holds a drive twice")
        empty = np.full(len(rows), np.nan)
        values = [
            rows[name].to_numpy() if name in rows.column_names else empty for name in _COLUMNS
        ]
        failed = rows["failure"].to_numpy().astype(bool)
        yield date.fromisoformat(text), serials, failed, np.stack(values, axis=1)


def _inputs(
    day: date,
    serials: NDArray[np.str_],
    values: NDArray[np.float64],
    earlier: Sequence[tuple[date, NDArray[np.str_], Floats]],
) -> Floats:
    """Return what `drive_model.inputs` returns for each drive; `earlier` begins with the oldest."""
    known = ~np.isnan(values)
    now = np.log1p(np.maximum(np.nan_to_num(values), 0))
    before, found = now.copy(), np.zeros(len(serials), bool)
    for past, others, logs in earlier:
        if (day - past).days > _DAYS or not len(others):
            continue
        place = np.minimum(np.searchsorted(others, serials), len(others) - 1)
        same = (others[place] == serials) & ~found
        old = logs[place[same]]
        before[same] = np.where(np.isnan(old) | ~known[same], now[same], old)
        found |= same
    return np.concatenate([now, known, now - before], axis=1).astype(np.float32)


# ---- training -----------------------------------------------------------------------------------


def _check_failures(learned: _Rows, held: _Rows, first_held: date) -> None:
    for rows, least, which in zip(
        (learned, held), _LEAST_FAILURES, ("before", "from"), strict=True
    ):
        failed = rows.arrays()[1]
        if failed.sum() < least or failed.all():
            raise LightckError(
                f"{failed.sum()} failures and {(~failed).sum()} healthy drive-days {which}"
                f" {first_held}, expected at least {least} and some; give logs of more days"
            )


def _trained(learned: _Rows, shift: float, seed: int) -> DriveModel:
    """Train by maximum likelihood, all rows at once; the weights decay, as failures are few."""
    inputs, failed = learned.arrays()
    mean, scale = inputs.mean(axis=0), inputs.std(axis=0) + 1e-3
    x = torch.from_numpy((inputs - mean) / scale)
    y = torch.from_numpy(failed.astype(np.float32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[Any] = [
            torch.nn.Linear(wide, out) for wide, out in zip(WIDTHS, WIDTHS[1:], strict=False)
        ]
    network = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=0.1)
    loss_of = torch.nn.BCEWithLogitsLoss()
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss_of(network(x)[:, 0], y).backward()
        optimizer.step()
    return DriveModel(
        mean.tolist(),
        scale.tolist(),
        [(each.weight.tolist(), each.bias.tolist()) for each in layers],
        shift,
        alarm=0.5,
        trained_on="",
    )


def _tried(model: DriveModel, held: _Rows, days: Sequence[date], first_held: date) -> Fit:
    inputs, failed = held.arrays()
    found = (inputs - np.array(model.mean)) / np.array(model.scale)
    for number, (weights, biases) in enumerate(model.layers, 1):
        found = found @ np.array(weights).T + np.array(biases)
        found = np.maximum(found, 0) if number < len(model.layers) else found
    hazards = 1 / (1 + np.exp(-(found[:, 0] + model.shift)))
    cuts = [float(np.quantile(hazards, 1 - share)) for share in ALARM_SHARES]
    rule = (inputs[:, SMART.index(5)] > 0) & (inputs[:, SMART.index(197)] > 0)
    told = f"days {days[0]} to {days[-1]}, tried on those from {first_held}"
    alarm = min(max(cuts[0], 1e-9), 1 - 1e-9)
    return Fit(
        DriveModel(model.mean, model.scale, model.layers, model.shift, alarm, told),
        _auc(hazards, failed),
        tuple(float((hazards >= cut)[failed].mean()) for cut in cuts),
        float(rule.mean()),
        float(rule[failed].mean()),
    )


def _auc(scores: NDArray[np.float64], failed: NDArray[np.bool_]) -> float:
    """Return the share of pairs of a failure and another day that are in order; ties count half."""
    values, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    bad, good = int(failed.sum()), int((~failed).sum())
    return float((ranks[failed].sum() - bad * (bad + 1) / 2) / (bad * good))
