"""The command: what runs without names, under which name it is called, and what it refuses."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bench import cli, definition, execute, launch, readme, record
from bench.errors import BenchError
from bench.place import ROOT
from bench.record import Result
from support.processes import closed_output

_SAMPLE = ROOT / "tests" / "data" / "bench" / "sample.parquet"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Definitions that would have run, in order."""
    names: list[str] = []

    def run(given: definition.Definition, command: str, launched: object, tell: object) -> Result:
        names.append(given.name)
        about = {**record.read(_SAMPLE).about, "definition": given.as_json(), "absent": {}}
        return Result(about, [])

    monkeypatch.setattr(execute, "run", run)
    return names


def test_without_names_the_essential_definitions_run(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--out", str(tmp_path)]) == 0
    assert ran == definition.essential()
    assert set(ran) < set(definition.names())
    minutes = sum(definition.load(name).minutes for name in ran)
    assert 0 < minutes <= 45, "what `make bench` promises"
    assert f"about {minutes:.0f} minutes on two quiet cores\n" in capsys.readouterr().err
    assert cli.main(["list"]) == 0
    assert "\nessential (about 22 minutes, essential): Five of" in capsys.readouterr().out


def test_a_reader_that_closes_the_output_ends_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with closed_output() as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["list"]) == 0
    assert capsys.readouterr().err == ""


def test_full_runs_all_definitions_and_says_so_in_the_results(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["run", "--full", "--out", str(tmp_path)]) == 0
    assert ran == definition.names()
    parsed = cli._parser().parse_args(["run", "--full", "--tiny"])
    assert cli._command(parsed) == "python -m bench run --full --tiny"


def test_full_and_names_exclude_each_other(
    ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "stress", "--full"]) == 2
    assert "--full runs all definitions, not stress" in capsys.readouterr().err
    assert ran == []


def test_the_console_command_is_there_and_takes_every_package_along() -> None:
    project = tomllib.loads((ROOT / "bench" / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["lightck-bench"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main
    folders = {file.parent for file in (ROOT / "bench").rglob("__init__.py")} - {
        ROOT / "bench" / "micro"
    }
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == names


def test_the_command_shows_the_name_that_it_was_called_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for called, shown in (("/x/bin/lightck-bench", "lightck-bench"), ("-m", "python -m bench")):
        monkeypatch.setattr(sys, "argv", [called])
        with pytest.raises(SystemExit, match="0"):
            cli.main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {shown} ")


def test_a_folder_of_results_is_reported_as_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = record.read(_SAMPLE)
    given = {**first.about["definition"], "name": "second"}
    second = replace(first, about={**first.about, "definition": given})
    record.write(first, tmp_path / "results" / "first.parquet")
    record.write(second, tmp_path / "results" / "second.parquet")
    assert cli.main(["report", str(tmp_path / "results")]) == 0
    told = capsys.readouterr().out
    assert "\n## sample\n" in told and "\n## second\n" in told
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"no results in {tmp_path}: run `python -m bench run`" in capsys.readouterr().err


# ---- nothing is published ------------------------------------------------------------------------


def test_where_nothing_can_be_written_nothing_runs(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["run", "native", "--out", str(tmp_path / "file" / "results")]) == 2
    told = capsys.readouterr().err
    assert f"nothing was run: {tmp_path / 'file'} is no folder to write to" in told
    assert ran == []
    with pytest.raises(BenchError, match=r"x.parquet: cannot be written: "):
        record.write(record.read(_SAMPLE), tmp_path / "file" / "x.parquet")
    out = tmp_path / "file" / "report.md"
    assert cli.main(["report", str(_SAMPLE), "-o", str(out), "--no-charts"]) == 2
    assert "report.md: cannot be written: " in capsys.readouterr().err


def _of_another_version(path: Path) -> Path:
    table = pq.read_table(_SAMPLE)
    about = json.loads(table.schema.metadata[b"lightck-bench"])
    changed = json.dumps({**about, "format": 99})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({b"lightck-bench": changed}), path)
    return path


def test_no_report_is_written_of_a_file_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = _of_another_version(tmp_path / "old.parquet")
    out = tmp_path / "out" / "report.md"
    assert cli.main(["report", str(_SAMPLE), str(old), "-o", str(out)]) == 2
    told = capsys.readouterr().err
    assert "old.parquet: results of format 99, this bench reads 1" in told
    assert "run `python -m bench run sample` again" in told
    assert not out.parent.exists()


def test_results_of_another_version_are_not_stored_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(cli, "BUILD", tmp_path / "build")
    readme.README.write_text("as it was")
    record.write(record.read(_SAMPLE), tmp_path / "build" / "good.parquet")
    _of_another_version(tmp_path / "build" / "old.parquet")
    assert cli.main(["readme", "--take"]) == 2
    assert "results of format 99" in capsys.readouterr().err
    assert not readme.RESULTS.exists(), "all or nothing"
    assert readme.README.read_text() == "as it was"


def test_two_results_of_one_definition_are_not_rendered_as_if_they_were_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = replace(record.read(_SAMPLE))
    record.write(again, tmp_path / "again.parquet")
    assert cli.main(["report", str(_SAMPLE), str(tmp_path / "again.parquet")]) == 2
    assert "two results of `sample`" in capsys.readouterr().err


def test_a_former_result_stays_when_a_new_one_fails_its_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(job: object, tell: object) -> dict[str, object]:
        return {"error": "the restored state of step 7 is not what was saved: x: 1 of 4 bytes"}

    monkeypatch.setattr(launch, "in_processes_of_their_own", wrong)
    monkeypatch.setattr(execute.machine, "commit", lambda: "0123")
    monkeypatch.setattr(execute.machine, "versions", lambda packages: {"torch": "1"})
    record.write(record.read(_SAMPLE), tmp_path / "native.parquet")
    before = (tmp_path / "native.parquet").read_bytes()
    assert cli.main(["run", "native", "--out", str(tmp_path)]) == 2
    assert "native: lightck: the restored state of step 7 is not what" in capsys.readouterr().err
    assert (tmp_path / "native.parquet").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["native.parquet"]
