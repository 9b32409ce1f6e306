"""`lightck plan`: what it plays, prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightck.cli import plan_data
from lightck.cli.main import main
from lightck.cli.plan_data import PUBLISHED, read_trace, time_of
from lightck.policy.failure_record import FailureRecord
from lightck.policy.formulas import Waste

_QUICK = ["--days", "2", "--policy", "auto", "--policy", "10 min"]


def _document(capsys: Any, *words: str) -> dict[str, Any]:
    assert main(["plan", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_default_table_has_a_row_for_each_policy(capsys: Any) -> None:
    assert main(["plan", "--days", "2"]) == 0
    text = capsys.readouterr().out
    rows = text.split("POLICY", 1)[1].splitlines()[1:]
    starts = ("auto", "quality", "3.5 %", "1 step", "10 min", "1 h")
    assert [row.startswith(start) for row, start in zip(rows, starts, strict=True)] == [True] * 6
    assert text.count("assumed") >= 5, "what nobody gave is said to be assumed"


def test_the_parts_of_the_time_add_up(capsys: Any) -> None:
    for row in _document(capsys, *_QUICK, "--mtbf", "1 h")["rows"]:
        parts = (row["goodput"], row["stall"], row["rework"], row["down"])
        assert sum(parts) == pytest.approx(1.0)
        assert row["failures"] > 20


def test_given_numbers_are_used_and_said_to_be_given(capsys: Any) -> None:
    numbers = ("--step", "200ms", "--cost", "0.02", "--persist", "2 s", "--restart", "5 min")
    job = _document(capsys, *_QUICK, *numbers)["job"]
    assert (job["step_s"], job["cost_s"], job["persist_s"], job["restart_s"]) == (0.2, 0.02, 2, 300)
    assert set(job["sources"].values()) == {"given"}


def test_more_ranks_fail_oftener(capsys: Any) -> None:
    document = _document(capsys, *_QUICK, "--failures", "llama3", "--ranks", "1024,100000")
    means = {row["ranks"]: row["mtbf_s"] for row in document["rows"]}
    assert means[1024] == pytest.approx(means[100_000] * 100_000 / 1024)


def test_a_plan_of_the_same_seed_is_the_same(capsys: Any) -> None:
    first = _document(capsys, *_QUICK, "--mtbf", "1h")
    assert _document(capsys, *_QUICK, "--mtbf", "1h") == first
    assert _document(capsys, *_QUICK, "--mtbf", "1h", "--seed", "8") != first


def test_without_the_failure_path_failures_lose_more(capsys: Any) -> None:
    armed, off = (
        {row["policy"]: row for row in _document(capsys, *_QUICK, "--mtbf", "1h", way)["rows"]}
        for way in ("--jit", "--no-jit")
    )
    assert off["10 min"]["rework"] > 2 * armed["10 min"]["rework"]
    assert off["auto"]["interval_s"] < 0.8 * armed["auto"]["interval_s"]


@pytest.mark.parametrize(
    ("name", "hours"),
    [("llama3", 3.09), ("opt-175b", 14.9), ("bloom", 168), ("rsc-1", 28.8), ("infinitehbd", 14.3)],
)
def test_published_rates_are_those_of_their_sources(name: str, hours: float) -> None:
    known = PUBLISHED[name]
    assert known.rank_s / known.ranks / 3600 == pytest.approx(hours, rel=0.01)
    assert "arXiv" in known.source


def test_gpus_from_which_just_in_time_pays_are_as_by_the_formula() -> None:
    rank_s = PUBLISHED["rsc-1"].rank_s

    def waste(ranks: int) -> Waste:
        return Waste(mtbf_s=rank_s / ranks, stall_s=5.0, restore_s=120.0, detect_s=4.0, jit_s=2.0,
                     jit_restore_s=120.0, armed=0.001, unrecoverable=0.3)  # fmt: skip

    assert waste(8).jit() > waste(8).periodic()
    assert waste(16).jit() < waste(16).periodic()


# ---- traces --------------------------------------------------------------------------------------


def _file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "trace"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("30\n# a comment\n\n10.5  # one\n", (10.5, 30.0)),
        ("2026-01-01T00:00:00\n2026-01-01 01:00:00+00:00\n", (0.0, 3600.0)),
        (
            '[{"event_time": 1, "event_type": "fault"},'
            ' {"event_time": 2, "event_type": "fault_end"}]',
            (86400.0,),
        ),
        ("2026-01-02\n2026-01-01\n", (0.0, 86400.0)),
        ("\ufeff30\n", (30.0,)),
        ('{"event_time": 0.5}\n{"event_time": 0.25}\n', (21600.0, 43200.0)),
    ],
)
def test_a_trace_is_seconds_dates_or_events(
    tmp_path: Path, text: str, times: tuple[float, ...]
) -> None:
    assert read_trace(_file(tmp_path, text)) == times


def test_a_trace_is_played_once_for_every_policy(tmp_path: Path, capsys: Any) -> None:
    file = _file(tmp_path, "\n".join(str(3600 * i + 7) for i in range(1, 9)))
    document = _document(capsys, "--failures", str(file), "--policy", "auto", "--policy", "60 s")
    assert [row["failures"] for row in document["rows"]] == [8, 8]
    assert main(["plan", "--failures", str(file), "--ranks", "1,2"]) == 2
    assert "one number of ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no failures in it"),
        ("# none\n", "no failures in it"),
        ("5\n-3\n", "line 2: -3.0 is no time"),
        ("5\nnan\n", "line 2: nan is no time"),
        ("inf", "line 1: inf is no time"),
        ("5\nsoon\n", "line 2: 'soon' is neither"),
        ('[{"event_type": "x"}]', "event 1: no number event_time"),
        ('[{"event_time": NaN}]', "event 1: nan is no time"),
        ("[{]", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ('[{"event_time": 1' + 400 * "0" + "}]", "event 1: inf is no time"),
        ("5\n2026-01-01\n", "line 1 has seconds, line 2 a date: give one kind"),
        ("1e300\n", "line 1: 1e+300 is no time from 0 s to"),
        ("0\n0\n", "all failures at 0 s"),
        ("2026-01-01\n", "all failures at 0 s, where the job begins"),
    ],
)
def test_a_trace_that_cannot_be_used_is_told(
    tmp_path: Path, capsys: Any, text: str, told: str
) -> None:
    file = _file(tmp_path, text)
    assert main(["plan", "--failures", str(file)]) == 1
    error = capsys.readouterr().err
    assert told in error and str(file) in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--failures", "llama4"], "none of the names llama3"),
        (["--policy", "often"], "'often'"),
        (["--policy", "nan s"], "nan"),
        (["--policy", "best val_loss"], "no epochs, metrics"),
        (["--policy", "1 epoch or 10 min"], "no epochs, metrics"),
        (["--mtbf", "nan"], "must be a finite time"),
        (["--mtbf", "0"], "above 0"),
        (["--cost=-1"], "must be a finite time"),
        (["--step", "1e-300"], "a microsecond or more"),
        (["--days", "x"], "'x': must be a number of days above 0"),
        (["--days", "0"], "'0': must be a number of days above 0"),
        (["--failures", "."], ".: cannot be read: Is a directory"),
        (["-o", "/no/such/plan.png", "--days", "1e9"], "the folder /no/such does not exist"),
        (["--ranks", "0"], "from 1 to 100000"),
        (["--ranks", "8,x"], "must be like 8"),
        (["--mtbf", "1h", "--failures", "bloom"], "not allowed with"),
    ],
)
def test_bad_arguments_are_told(capsys: Any, words: list[str], told: str) -> None:
    assert main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.2", 0.2), ("200ms", 0.2), ("10 min", 600.0), ("12h", 43200.0), ("1e3", 1000.0)],
)
def test_times_have_units(text: str, value: float) -> None:
    assert time_of(text) == value


def test_a_job_that_fails_all_the_time_is_played_in_the_end(capsys: Any) -> None:
    rows = _document(capsys, "--mtbf", "1ms", "--ranks", "1,100000")["rows"]
    assert all(row["goodput"] < 0.01 for row in rows)


def test_ranks_that_are_given_twice_are_played_once(capsys: Any) -> None:
    rows = _document(capsys, "--days", "1", "--policy", "1 h", "--ranks", "2,2,1")["rows"]
    assert [row["ranks"] for row in rows] == [2, 1]


def test_at_0_s_no_failure_is_counted_for_the_mean(tmp_path: Path, capsys: Any) -> None:
    file = _file(tmp_path, "2026-01-01\n2026-01-03\n")
    (row,) = _document(capsys, "--failures", str(file), "--policy", "1 h")["rows"]
    assert (row["mtbf_s"], row["failures"]) == (2 * 86400.0, 1)


def test_a_trace_may_come_out_of_a_pipe(tmp_path: Path) -> None:
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("30\n60\n",))
    writer.start()
    assert main(["plan", "--failures", str(pipe), "--policy", "1 h"]) == 0
    writer.join()


def _learned(**values: Any) -> Any:
    """Return what `lightck.examine.contents` returns, as far as a plan looks."""
    from types import SimpleNamespace

    return lambda path, step: SimpleNamespace(learned=json.dumps({"version": 1, **values}))


def _planned(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, contents: Any
) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr("lightck.examine.contents", contents)
    monkeypatch.setattr("lightck.cli.plan_data._sizes", lambda path: (1, 1000))
    document = _document(capsys, str(tmp_path), "--days", "1", "--policy", "1 h")
    return document, document["failures"]


def test_a_run_s_own_ranks_fail_at_a_published_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("lightck.examine.contents", _learned())
    monkeypatch.setattr("lightck.cli.plan_data._sizes", lambda path: (8, 1000))
    document = _document(capsys, str(tmp_path), *_QUICK, "--failures", "llama3")
    assert [row["ranks"] for row in document["rows"]] == [8, 8]


@pytest.mark.parametrize(
    ("files", "sizes"),
    [
        ({"region-00000.lck": (0, 500), "region-00001.lck": (1, 480)}, (2, 980)),
        ({"region-00000.lck": (0, 500), "failure-00000-0.lck": (0, 1000)}, (2, 1000)),
        ({"failure-00000-0.lck": (0, 1000)}, (2, 1000)),
    ],
    ids=["both", "one and a failure's", "a failure's"],
)
def test_a_run_s_ranks_and_bytes_are_those_of_its_job_after_a_failure_too(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, tuple[int, int]], sizes: tuple[int, int]
) -> None:
    rows = [
        {"step": 9, "state": "whole", "world": 2, "rank": r, "payload_bytes": size, "file": name}
        for name, (r, size) in files.items()
    ]
    early = [{**rows[0], "early": True}]  # of the same step, in another slot
    monkeypatch.setattr(plan_data, "rows_at", lambda path, whole: [*rows, *early])
    assert plan_data._sizes("run") == sizes


def test_a_run_without_failures_is_not_said_to_fail_often(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    young = _learned(failures=FailureRecord().ran(60.0, 1).to_plain(), quiet_s=0.25)
    document, told = _planned(monkeypatch, capsys, tmp_path, young)
    assert told == "assumed: one a day; the run has seen none"
    assert document["rows"][0]["mtbf_s"] == 86400.0
    assert document["job"]["step_s"] == 0.25

    proven = _learned(failures=FailureRecord().ran(1e8, 1).to_plain())
    document, told = _planned(monkeypatch, capsys, tmp_path, proven)
    assert told == "learned from 0 failures of the run"
    assert document["rows"][0]["mtbf_s"] > 10 * 86400.0

    failing = FailureRecord().ran(600.0, 1).failed(recovered=True)
    document, told = _planned(monkeypatch, capsys, tmp_path, _learned(failures=failing.to_plain()))
    assert told == "learned from 1 failure of the run"
    assert document["rows"][0]["mtbf_s"] < 86400.0


def test_what_the_just_in_time_path_has_not_saved_in_a_run_is_not_saved_in_its_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    shares = []
    for recovered in (True, False):
        record = FailureRecord()
        for _ in range(18):
            record = record.ran(86400.0, 1).failed(recovered=recovered)
        document, _ = _planned(monkeypatch, capsys, tmp_path, _learned(failures=record.to_plain()))
        shares.append(document["job"]["unsaved"])
    assert shares == pytest.approx([0.6 / 20, 18.6 / 20])
    assert main(["plan", str(tmp_path), "--days", "1", "--policy", "1 h"]) == 0
    assert "7 % of failures just in time" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["[]", "null", "{", '{"version": 99, "quiet_s": 9}', '{"version": 1, "quiet_s": "x"}']
)
def test_what_was_learned_and_is_damaged_or_newer_is_assumed(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, text: str
) -> None:
    from types import SimpleNamespace

    held = SimpleNamespace(learned=text)
    document, _ = _planned(monkeypatch, capsys, tmp_path, lambda path, step: held)
    assert set(document["job"]["sources"].values()) == {"assumed"}


# ---- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--mtbf", "2h"], ["--failures", "rsc-1", "--ranks", "64,4096"]])
def test_a_picture_is_drawn_and_not_replaced_without_force(
    tmp_path: Path, capsys: Any, words: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "plan.png"
    command = ["plan", *_QUICK, *words, "-o", str(out)]
    assert main(command) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    out.write_text("mine")
    assert main(command) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert main(["plan", *_QUICK, "-o", str(tmp_path / "plan.txt")]) == 2
    assert "suffix" in capsys.readouterr().err


def test_free_snapshots_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for ranks in ("1", "1,100"):
        out = ["-o", str(tmp_path / f"{ranks}.png")]
        assert main(["plan", *_QUICK, "--cost", "0", "--persist", "0", "--ranks", ranks, *out]) == 0
