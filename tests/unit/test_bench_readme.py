"""Documents have the numbers of the stored results, and only results that count are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import cli, picture, readme, record, verdict
from bench.errors import BenchError
from bench.place import ROOT
from bench.record import Result

_SAMPLE = ROOT / "tests" / "data" / "bench" / "sample.parquet"


def _saying(result: Result, **changed: object) -> Result:
    return replace(result, about={**result.about, **changed})


def test_readme_and_the_tables_are_rendered_from_the_stored_results() -> None:
    now, stored = readme.README.read_text(), readme.stored()
    assert readme.replaced(now, readme.render(stored)) == now, "run `python -m bench readme`"
    assert readme.tables(stored) == readme.current(readme.TABLES), "run `python -m bench readme`"
    assert "](docs/bench.md)" in now


def test_every_stored_result_counts() -> None:
    stored = readme.stored()
    assert stored, f"nothing in {readme.RESULTS}"
    assert not [r.about["definition"]["name"] for r in stored if r.about.get("tiny")]


def test_another_number_makes_readme_and_the_tables_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = record.read(_SAMPLE)
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme, "TABLES", tmp_path / "tables.md")
    readme.README.write_text(f"above\n{readme.BEGIN}\n{readme.END}\nbelow\n")
    monkeypatch.setattr(cli, "BUILD", tmp_path / "build")
    record.write(result, tmp_path / "build" / "sample.parquet")
    assert cli.main(["readme", "--take"]) == 0
    assert "sample.parquet" in capsys.readouterr().out
    text = readme.README.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n")
    whole = readme.TABLES.read_text()
    assert all(f"| {each['row']} |" in whole for each in result.about["definition"]["targets"])
    for document in (text, whole):
        assert result.about["machine"]["cpu"] in document and result.about["commit"] in document
    assert cli.main(["readme", "--check"]) == 0
    records = [replace(r, value=3 * r.value, high=4 * r.value) for r in result.records]
    record.write(replace(result, records=records), readme.RESULTS / "sample.parquet")
    assert cli.main(["readme", "--check"]) == 1
    assert readme.README.read_text() == text, "--check changes nothing"
    assert readme.TABLES.read_text() == whole
    assert cli.main(["readme"]) == 0
    readme.TABLES.unlink()
    assert cli.main(["readme", "--check"]) == 1, "README alone is not enough"


def test_readme_counts_what_is_met_and_shows_what_is_not() -> None:
    result = record.read(_SAMPLE)
    found = {each.target.row: each.state for each in verdict.verdicts([result])}
    assert set(found.values()) == {"missed", "not shown", "not available", "met"}
    text = readme.render([result])
    for row, state in found.items():
        assert (f"| {row} |" in text) is (state != "met"), row
        assert f"| {row} |" in readme.tables([result])
    assert "1 missed, 1 not shown, 2 not available, 2 met." in text


def test_of_two_machines_every_row_says_on_which_it_was_measured() -> None:
    first = record.read(_SAMPLE)
    machine = {**first.about["machine"], "cpu": "Other CPU"}
    other = {**first.about["definition"], "name": "other"}
    second = _saying(first, machine=machine, definition=other)
    for text in (readme.render([first, second]), readme.tables([first, second])):
        assert "- **A**: Example CPU, 2 cores" in text and "- **B**: Other CPU, 2 cores" in text
        rows = [line for line in text.splitlines() if line.startswith("|") and "`sample`" in line]
        assert rows and all("`sample` (A) |" in row for row in rows)
        rows = [line for line in text.splitlines() if line.startswith("|") and "`other`" in line]
        assert rows and all("`other` (B) |" in row for row in rows)
    assert "Other CPU" in readme.tables([first, second]).split("## other")[1], "in its section"
    again = _saying(first, definition=other, commit="89ab")
    text = readme.render([first, again])
    assert "(A)" not in text and "`sample` |" in text, "one machine needs no letter"
    assert text.count("- Example CPU") == 1 and "`other` (commit 89ab, " in text


def test_readme_shows_a_picture_that_is_there_and_small() -> None:
    assert f"]({picture.PICTURE.relative_to(ROOT)})" in readme.README.read_text()
    content = picture.PICTURE.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 150_000


def test_readme_says_what_was_not_measured_yet() -> None:
    assert "not measured yet: `ablation`, `armed`, `batch`" in readme.render([])
    first = record.read(_SAMPLE)
    given = first.about["definition"]
    work = {**given["work"], "emulated": "v100"}
    emulated = _saying(first, definition={**given, "name": "emulated-v100", "work": work})
    told = readme.render([first, emulated])
    (line,) = [line for line in told.splitlines() if "not measured yet" in line]
    assert "`emulated-h100`" in line and "`emulated-v100`" not in line


def test_whoever_wins_stands_first_in_readme() -> None:
    text = readme.render([record.read(_SAMPLE)])
    first = text.index("Where another engine is better than lightck:")
    assert first < text.index("| torch.save tmpfs |") < text.index("**missed**")


def test_a_toy_s_numbers_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    record.write(record.read(_SAMPLE), tmp_path / "good.parquet")
    record.write(_saying(record.read(_SAMPLE), tiny=True), tmp_path / "toy.parquet")
    with pytest.raises(BenchError, match="toy.parquet: made with --tiny"):
        readme.take([tmp_path / "good.parquet", tmp_path / "toy.parquet"])
    assert not readme.RESULTS.exists(), "all or nothing"


def test_a_readme_without_its_markers_is_an_error() -> None:
    with pytest.raises(BenchError, match="put the markers back"):
        readme.replaced("nothing", "text")
