"""The training of a drive model on logs in Backblaze's format, with torch.

A file holds one line for each drive and day: `date`, `serial_number`, `failure` (1 on the drive's
last day) and `smart_N_raw`; other columns are not read.
Source of the format: https://www.backblaze.com/cloud-storage/resources/hard-drive-test-data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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
_TYPES = {"date": pa.date32(), "serial_number": pa.string(), "failure": pa.int8()}
_COLUMNS = tuple(f"smart_{number}_raw" for number in SMART)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


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


def fit(
    files: Sequence[Path], *, seed: int = 0, done: Callable[[int], object] = lambda files: None
) -> Fit:
    """Train a model on the first three quarters of the days, and try it on the last quarter.

    All logs are in memory at once, at some 400 bytes for each drive and day.

    Args:
        files: CSV files, in any order.
        seed: of the weights' beginning, and of which healthy days are learned from.
        done: called with 1 after each file.

    Raises:
        LightckError: a file is no such log, a drive's day comes twice, or failures are too few.
    """
    days, failed, values, earlier = _drive_days(files, done)
    every = np.unique(days)
    first_held = every[-max(1, len(every) // 4)]
    held = days >= first_held
    keep = max(1 / _SPARSE, min(1.0, _LEAST_HEALTHY / len(days)))
    learned = ~held & (failed | (np.random.default_rng(seed).random(len(days)) < keep))
    for rows, least, which in zip(
        (learned, held), _LEAST_FAILURES, ("before", "from"), strict=True
    ):
        failures = int(failed[rows].sum())
        if failures < least or failures == rows.sum():
            raise LightckError(
                f"{failures} failures and {rows.sum() - failures} healthy drive-days {which}"
                f" {_day(first_held)}, expected at least {least} and 1; give logs of more days"
            )
    inputs = _inputs(values[learned], earlier[learned])
    mean, scale = inputs.mean(axis=0), inputs.std(axis=0) + 1e-3
    layers = _trained((inputs - mean) / scale, failed[learned], seed)
    tried = (_inputs(values[held], earlier[held]) - mean) / scale
    with torch.no_grad():
        logits = _network(layers)(torch.from_numpy(tried.astype(np.float32)))[:, 0].double()
        hazards = torch.sigmoid(logits + math.log(keep)).numpy()
    cuts = [float(np.quantile(hazards, 1 - share)) for share in ALARM_SHARES]
    model = DriveModel(
        mean.tolist(),
        scale.tolist(),
        [(each.weight.tolist(), each.bias.tolist()) for each in layers],
        math.log(keep),
        min(max(cuts[0], 1e-9), 1 - 1e-9),
        f"days {_day(every[0])} to {_day(every[-1])}, tried on those from {_day(first_held)}",
    )
    rule = (values[held][:, SMART.index(5)] > 0) & (values[held][:, SMART.index(197)] > 0)
    lost = failed[held]
    recall = tuple(float((hazards >= cut)[lost].mean()) for cut in cuts)
    return Fit(model, _auc(hazards, lost), recall, float(rule.mean()), float(rule[lost].mean()))


def _day(number: np.int64) -> date:
    return date.fromordinal(int(number) + date(1970, 1, 1).toordinal())


# ---- reading ------------------------------------------------------------------------------------


def _drive_days(
    files: Sequence[Path], done: Callable[[int], object]
) -> tuple[NDArray[np.int64], Flags, Floats, Floats]:
    """Return day, failure, SMART values and the oldest ones within a week, of each drive-day.

    Days count from 1970. What is not known is nan.
    """
    tables = []
    for file in files:
        tables.append(_read(file))
        done(1)
    table = pa.concat_tables(tables).sort_by(
        [("serial_number", "ascending"), ("date", "ascending")]
    )
    days = table["date"].cast(pa.int32()).to_numpy().astype(np.int64)
    drives = table["serial_number"].combine_chunks().dictionary_encode().indices.to_numpy()
    values = np.stack([table[name].to_numpy() for name in _COLUMNS], axis=1)
    twice = np.flatnonzero((drives[1:] == drives[:-1]) & (days[1:] == days[:-1]))
    if len(twice):
        serial = table["serial_number"][int(twice[0])]
        raise LightckError(f"the logs hold drive {serial} twice on {_day(days[twice[0]])}")
    earlier = values.copy()
    for back in range(1, _DAYS + 1):  # the further back, the older: the last one counts
        same = (drives[back:] == drives[:-back]) & (days[back:] - days[:-back] <= _DAYS)
        earlier[back:][same] = values[:-back][same]
    return days, table["failure"].to_numpy().astype(bool), values, earlier


def _read(file: Path) -> pa.Table:
    try:
        with csv.open_csv(file) as head:
            names = head.schema.names
        missing = [name for name in _TYPES if name not in names]
        if not missing and not set(_COLUMNS) & set(names):
            missing = [f"any of {', '.join(_COLUMNS)}"]
        if missing:
            raise LightckError(
                f"{file}: there is no column {', '.join(missing)}; expected a log in Backblaze's"
                f" format, with {', '.join(_TYPES)} and smart_N_raw; found {', '.join(names[:8])}"
            )
        options = csv.ConvertOptions(
            include_columns=[*_TYPES, *_COLUMNS],
            include_missing_columns=True,
            column_types=_TYPES | dict.fromkeys(_COLUMNS, pa.float64()),
        )
        table = csv.read_csv(file, convert_options=options)
    except (pa.ArrowInvalid, OSError) as error:
        raise LightckError(f"{file}: cannot be read as CSV: {error}") from error
    if not len(table) or any(table[name].null_count for name in _TYPES):
        raise LightckError(
            f"{file}: there is no row below the header, or one without {', '.join(_TYPES)}"
        )
    if not set(table["failure"].unique().to_pylist()) <= {0, 1}:
        raise LightckError(f"{file}: column failure holds more than 0 and 1")
    return table


def _inputs(values: Floats, earlier: Floats) -> Floats:
    """Return what `drive_model.inputs` returns, for each drive-day."""
    known = ~np.isnan(values)
    now, before = (np.log1p(np.maximum(np.nan_to_num(each), 0)) for each in (values, earlier))
    grown = np.where(known & ~np.isnan(earlier), now - before, 0)
    return np.concatenate([now, known, grown], axis=1)


# ---- training -----------------------------------------------------------------------------------


def _network(layers: Sequence[Any]) -> Any:
    first, second, third = layers
    return torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), third)


def _trained(inputs: Floats, failed: Flags, seed: int) -> list[Any]:
    """Train by maximum likelihood, all rows at once; the weights decay, as failures are few."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[Any] = [
            torch.nn.Linear(wide, out) for wide, out in zip(WIDTHS, WIDTHS[1:], strict=False)
        ]
    network, loss_of = _network(layers), torch.nn.BCEWithLogitsLoss()
    x, y = (torch.from_numpy(each.astype(np.float32)) for each in (inputs, failed))
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=0.1)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss_of(network(x)[:, 0], y).backward()
        optimizer.step()
    return layers


def _auc(scores: Floats, failed: Flags) -> float:
    """Return the share of pairs of a failure and another day that are in order; ties count half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    bad, good = int(failed.sum()), int((~failed).sum())
    return float((ranks[failed].sum() - bad * (bad + 1) / 2) / (bad * good))
