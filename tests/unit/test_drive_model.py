"""The model of drives: it learns a hazard that is known, and a wrong log is a clear error."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightck.errors import LightckError
from lightck.health import Drives, drive_fit
from lightck.health.drive_fit import ALARM_SHARES, Fit, _drive_days, _inputs, fit
from lightck.health.drive_model import SMART, WIDTHS, DriveModel, inputs
from support.machine import FIRST, HEADER, Disk, Machine, write_drive_logs


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("logs")
    return write_drive_logs(folder, np.random.default_rng(7), drives=400, days=40)


@pytest.fixture(scope="module")
def fitted(logs: Sequence[Path]) -> Fit:
    return fit(logs)


@pytest.fixture
def few_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model learns from 1,000 of the healthy days, not all: that takes a tenth of the time."""
    monkeypatch.setattr(drive_fit, "_LEAST_HEALTHY", 1_000)


@pytest.fixture(scope="module")
def sparse(logs: Sequence[Path]) -> Fit:
    """The same logs, fitted as under `few_healthy`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive_fit, "_LEAST_HEALTHY", 1_000)
        return fit(logs)


def test_a_known_hazard_is_found_on_days_that_were_not_learned_from(fitted: Fit) -> None:
    print(fitted.auc, fitted.recall, fitted.rule_share, fitted.rule_recall)
    assert fitted.auc > 0.95
    assert fitted.recall[1] > 0.9
    assert fitted.recall[0] <= fitted.recall[1]
    assert 0 < fitted.rule_recall < 1


@pytest.mark.parametrize("healthy_days", ["all", "few"])
def test_hazards_are_those_of_all_days_though_few_healthy_ones_were_learned_from(
    fitted: Fit, sparse: Fit, healthy_days: str
) -> None:
    model = {"all": fitted, "few": sparse}[healthy_days].model
    assert (model.shift == 0) == (healthy_days == "all")
    healthy = {5: 0.0, 9: 3000.0, 197: 0.0}
    failing = {5: 3.0, 9: 3000.0, 197: 20.0}
    assert model.hazard(healthy, healthy) < 0.01
    assert 0.04 < model.hazard(failing, {**failing, 197: 8.0}) < 0.5  # .15 is true


@pytest.mark.usefixtures("few_healthy")
def test_nothing_is_learned_from_the_days_that_are_held_out(
    logs: Sequence[Path], sparse: Fit, tmp_path: Path
) -> None:
    def fail(rows: list[list[str]]) -> None:
        for row in rows[1:40]:
            row[HEADER.index("failure")] = "1"

    other = fit([*logs[:-1], rewritten(logs[-1], fail, tmp_path)])
    assert other.model.layers == sparse.model.layers
    assert other.auc < sparse.auc


@pytest.mark.usefixtures("few_healthy")
def test_the_same_logs_and_seed_give_the_same_model(logs: Sequence[Path], sparse: Fit) -> None:
    assert fit([*reversed(logs)]).model == sparse.model
    assert fit(logs, seed=1).model != sparse.model


def test_a_model_is_the_same_when_it_was_written_and_read(fitted: Fit, tmp_path: Path) -> None:
    file = tmp_path / "drives.json"
    file.write_text(fitted.model.as_json())
    read = DriveModel.read(file)
    values = {number: 7.0 for number in SMART}
    assert read.hazard(values, {}) == fitted.model.hazard(values, {})
    assert read.alarm == fitted.model.alarm
    assert "2013-04-10" in read.trained_on


def test_what_is_learned_from_is_what_is_asked_with(rng: np.random.Generator) -> None:
    """The inputs of the training and of a probe are computed in two places."""
    values, earlier = rng.integers(0, 10**6, (2, 50, len(SMART))).astype(float)
    values[rng.random(values.shape) < 0.2] = np.nan
    earlier[rng.random(values.shape) < 0.2] = np.nan
    found = _inputs(values, earlier)
    assert found.shape == (50, WIDTHS[0])
    for number in range(50):
        asked = inputs(_known(values[number]), _known(earlier[number]))
        assert np.allclose(found[number], asked)


def _known(row: Any) -> dict[int, float]:
    return {n: float(v) for n, v in zip(SMART, row, strict=True) if not np.isnan(v)}


def test_the_oldest_reading_of_a_week_is_the_one_before(tmp_path: Path) -> None:
    lines = [
        (0, "a", 1.0),
        (1, "a", 2.0),
        (7, "a", 3.0),  # day 0 is seven days ago
        (9, "a", 4.0),  # day 1 is eight days ago, day 7 two
        (30, "a", 5.0),  # nothing within a week
        (9, "b", 6.0),
        (10, "b", None),
    ]
    text = "date,serial_number,failure,smart_9_raw\n"
    for day, serial, value in lines:
        hours = "" if value is None else value
        text += f"{FIRST + timedelta(days=day)},{serial},0,{hours}\n"
    (tmp_path / "log.csv").write_text(text)
    _, _, values, earlier = _drive_days([tmp_path / "log.csv"], lambda files: None)
    hours = SMART.index(9)
    assert earlier[:, hours].tolist() == [1.0, 1.0, 1.0, 3.0, 5.0, 6.0, 6.0]
    assert values[:, hours].tolist()[:6] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert np.isnan(values[:, hours][6])
    assert np.isnan(values[:, SMART.index(5)]).all()


def test_what_the_file_says_is_what_was_tried(logs: Sequence[Path], fitted: Fit) -> None:
    """The network runs in torch where it is tried, and in plain Python in a probe."""
    days, failed, values, earlier = _drive_days(logs, lambda files: None)
    held = days >= np.unique(days)[-10]
    alarms = [
        fitted.model.hazard(_known(now), _known(before)) >= fitted.model.alarm
        for now, before in zip(values[held & failed], earlier[held & failed], strict=True)
    ]
    # A float of 32 bits may be on the other side of the threshold, which is one of them.
    assert abs(np.mean(alarms) - fitted.recall[0]) <= 1.01 / len(alarms)


# ---- wrong logs --------------------------------------------------------------------------------


def rewritten(file: Path, change: Callable[[list[list[str]]], object], out: Path) -> Path:
    rows = [*csv.reader(file.read_text().splitlines())]
    change(rows)
    target = out / file.name
    target.write_text("\n".join(",".join(row) for row in rows) + "\n")
    return target


def _renamed(column: str) -> Callable[[list[list[str]]], object]:
    def change(rows: list[list[str]]) -> None:
        rows[0][HEADER.index(column)] = "other"

    return change


def _without_smart(rows: list[list[str]]) -> None:
    rows[0] = [name.replace("smart", "clever") for name in rows[0]]


def _set(column: str, value: str) -> Callable[[list[list[str]]], object]:
    def change(rows: list[list[str]]) -> None:
        rows[1][HEADER.index(column)] = value

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_renamed("date"), "there is no column date"),
        (_renamed("serial_number"), "there is no column serial_number"),
        (_renamed("failure"), "there is no column failure"),
        (_without_smart, "there is no column any of smart_1_raw"),
        (_set("date", "10/04/2013"), "cannot be read as CSV"),
        (_set("date", ""), "or one without date"),
        (_set("failure", ""), "or one without date"),
        (_set("failure", "2"), "column failure holds more than 0 and 1"),
        (_set("failure", "yes"), "cannot be read as CSV"),
        (_set("smart_5_raw", "many"), "cannot be read as CSV"),
        (lambda rows: rows[1].append("7"), "cannot be read as CSV"),
        (lambda rows: rows.__delitem__(slice(1, None)), "there is no row below the header"),
    ],
)
def test_a_wrong_log_is_named_with_what_is_wrong(
    logs: Sequence[Path], tmp_path: Path, change: Callable[[list[list[str]]], object], error: str
) -> None:
    wrong = rewritten(logs[0], change, tmp_path)
    with pytest.raises(LightckError, match=error) as raised:
        fit([wrong, *logs[1:]])
    assert str(wrong) in str(raised.value)


def test_a_drive_that_is_there_twice_in_a_day_is_named(logs: Sequence[Path]) -> None:
    with pytest.raises(LightckError, match="the logs hold drive S00000 twice on 2013-04-10"):
        fit([*logs, logs[0]])


def test_too_few_failures_are_refused_with_their_number(logs: Sequence[Path]) -> None:
    with pytest.raises(LightckError, match=r"\d+ failures and \d+ healthy drive-days before"):
        fit(logs[:4])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LightckError, match=r"gone\.csv"):
        fit([tmp_path / "gone.csv"])
    binary = tmp_path / "binary.csv"
    binary.write_bytes(bytes(range(256)) * 9)
    with pytest.raises(LightckError, match=r"binary\.csv"):
        fit([binary])


# ---- wrong models, and a probe with one --------------------------------------------------------


def _plain_model() -> dict[str, Any]:
    """A model that rates a drive by its pending sectors alone."""
    wide = WIDTHS[0]
    first = [[0.0] * wide for _ in range(WIDTHS[1])]
    first[0][SMART.index(197)] = 1.0
    second = [
        [float(row == column == 0) for column in range(WIDTHS[1])] for row in range(WIDTHS[2])
    ]
    third = [[float(column == 0) for column in range(WIDTHS[2])]]
    layers = [
        (weights, [0.0] * out)
        for weights, out in zip((first, second, third), WIDTHS[1:], strict=True)
    ]
    model = DriveModel([0.0] * wide, [1.0] * wide, layers, -5.0, 0.05, "by hand")
    return dict(json.loads(model.as_json()))


def test_a_probe_with_a_model_asks_it_instead_of_the_rule(tmp_path: Path) -> None:
    file = tmp_path / "drives.json"
    file.write_text(json.dumps(_plain_model()))
    machine = Machine(tmp_path)
    disk = Disk(machine)
    probe = disk.probe(model=file)
    disk.sectors(8, 2)  # a symptom by the rule: log1p(2) - 5 is a hazard of .02
    assert probe.read() == {}
    disk.sectors(0, 50)  # none by the rule
    assert probe.read() == {"drive": 1}
    assert "the model reckons with a failure within" in probe.detail
    assert str(file) in probe.reads


def test_a_week_later_the_model_is_given_the_reading_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(DriveModel, "hazard", lambda self, *given: asked.append(given) or 0.0)
    file = tmp_path / "drives.json"
    file.write_text(json.dumps(_plain_model()))
    machine = Machine(tmp_path)
    disk = Disk(machine)
    probe = disk.probe(model=file)
    for number in range(9):
        machine.now_s = number * 86400.0
        disk.sectors(number, 0)
        probe.read()
    ages = [given[0][5] - given[1][5] for given in asked]
    assert ages == [0, 1, 2, 3, 4, 5, 6, 7, 7]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "lightck drive model 9"},
        {"smart": [1, 2, 3]},
        {"layers": []},
        {"layers": [[[[1.0]], [0.0]]] * 3},
        {"mean": "none"},
        {"scale": [0.0] * WIDTHS[0]},
        {"alarm": float("nan")},
        {"alarm": 0},
        {"shift": None},
    ],
    ids=lambda change: str(change)[:30],
)
def test_a_file_that_is_no_model_is_a_clear_error(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "drives.json"
    file.write_text(json.dumps(_plain_model() | change))
    with pytest.raises(LightckError, match="is no drive model of this version"):
        Drives(tmp_path, model=file)


def test_a_model_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LightckError, match="cannot read the drive model: No such file"):
        DriveModel.read(tmp_path / "gone.json")
    (tmp_path / "text").write_text("weights")
    with pytest.raises(LightckError, match="make one with"):
        DriveModel.read(tmp_path / "text")


def test_shares_of_alarms_are_those_of_the_design() -> None:
    assert ALARM_SHARES == (0.0067, 0.09)
