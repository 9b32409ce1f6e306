"""Documents have the numbers of the stored results, and only results that count are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import cli, definition, picture, readme, record, topics, verdict
from bench.errors import BenchError
from bench.place import ROOT
from bench.record import Result

_SAMPLE = ROOT / "tests" / "data" / "bench" / "sample.parquet"


def _saying(result: Result, **changed: object) -> Result:
    return replace(result, about={**result.about, **changed})


def test_readme_and_the_pages_are_rendered_from_the_stored_results() -> None:
    stale = [f for f, text in readme.wanted(readme.stored()).items() if readme.current(f) != text]
    assert not stale, "run `python -m bench readme`"
    assert "](docs/benchmarks.md)" in readme.README.read_text()


def test_every_definition_has_a_page_and_every_page_a_definition() -> None:
    placed = [name for topic in topics.TOPICS for name in topic.definitions]
    assert sorted(placed) == sorted(definition.names())


def test_every_stored_result_counts() -> None:
    stored = readme.stored()
    assert stored, f"nothing in {readme.RESULTS}"
    assert not [r.about["definition"]["name"] for r in stored if r.about.get("tiny")]


def _empty() -> str:
    """A README with nothing rendered yet."""
    between = "\n".join(line for part in readme.PARTS for line in readme.markers(part))
    return f"above\n{between}\nbelow\n"


def test_another_number_makes_readme_and_the_pages_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = record.read(_SAMPLE)
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme, "OVERVIEW", tmp_path / "benchmarks.md")
    monkeypatch.setattr(readme, "PAGES", tmp_path / "benchmarks")
    readme.README.write_text(_empty())
    monkeypatch.setattr(cli, "BUILD", tmp_path / "build")
    record.write(result, tmp_path / "build" / "sample.parquet")
    assert cli.main(["readme", "--take"]) == 0
    assert "sample.parquet" in capsys.readouterr().out
    text = readme.README.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n")
    whole, page = readme.OVERVIEW.read_text(), readme.PAGES / "others.md"
    assert all(f"| {each['row']} |" in whole for each in result.about["definition"]["targets"])
    assert result.about["machine"]["cpu"] in whole and result.about["commit"] in whole
    assert "## sample" in page.read_text() and "(benchmarks/others.md)" in whole
    assert cli.main(["readme", "--check"]) == 0
    records = [replace(r, value=3 * r.value, high=4 * r.value) for r in result.records]
    record.write(replace(result, records=records), readme.RESULTS / "sample.parquet")
    assert cli.main(["readme", "--check"]) == 1
    assert readme.README.read_text() == text, "--check changes nothing"
    assert readme.OVERVIEW.read_text() == whole
    assert cli.main(["readme"]) == 0
    page.unlink()
    assert cli.main(["readme", "--check"]) == 1, "README alone is not enough"
    assert cli.main(["readme"]) == 0
    former = readme.PAGES / "former.md"
    former.write_text("of a topic that is no more")
    assert cli.main(["readme", "--check"]) == 1
    assert cli.main(["readme"]) == 0 and not former.exists()


def test_readme_counts_targets_and_the_overview_shows_them() -> None:
    result = record.read(_SAMPLE)
    found = {each.target.row: each.state for each in verdict.verdicts([result])}
    assert set(found.values()) == {"missed", "not shown", "not available", "met"}
    for row in found:
        assert f"| {row} |" in readme.overview([result]), row
    for text in (" ".join(readme.render([result])["speed"].split()), readme.overview([result])):
        assert "1 missed, 1 not shown, 2 not available, 2 met." in text


def test_of_two_machines_every_row_says_on_which_it_was_measured() -> None:
    first = record.read(_SAMPLE)
    machine = {**first.about["machine"], "cpu": "Other CPU"}
    other = {**first.about["definition"], "name": "other"}
    second = _saying(first, machine=machine, definition=other)
    text = readme.overview([first, second])
    assert "- **A**: Example CPU, 2 cores" in text and "- **B**: Other CPU, 2 cores" in text
    rows = [line for line in text.splitlines() if line.startswith("|") and "`sample`" in line]
    assert rows and all("`sample` (A) |" in row for row in rows)
    rows = [line for line in text.splitlines() if line.startswith("|") and "`other`" in line]
    assert rows and all("`other` (B) |" in row for row in rows)
    page = readme.page(topics.OTHERS, [first, second])
    assert "Other CPU" in page.split("## other")[1], "in its section"
    again = _saying(first, definition=other, commit="89ab")
    text = readme.overview([first, again])
    assert "(A)" not in text and "`sample` |" in text, "one machine needs no letter"
    assert text.count("- Example CPU") == 1 and "`other` (commit 89ab, " in text


def test_readme_is_short() -> None:
    text = readme.README.read_text()
    assert len(text.splitlines()) <= 200 and len(text.encode()) <= 14_000
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert not [line for line in lines if len(line) > 120]


def test_readme_shows_a_picture_that_is_there_and_small() -> None:
    assert f"]({picture.PICTURE.relative_to(ROOT)})" in readme.README.read_text()
    content = picture.PICTURE.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 150_000


def test_the_overview_says_what_was_not_measured_yet() -> None:
    assert "Not measured yet: `ablation`, `armed`, `batch`" in readme.overview([])
    first = record.read(_SAMPLE)
    given = first.about["definition"]
    work = {**given["work"], "emulated": "v100"}
    emulated = _saying(first, definition={**given, "name": "emulated-v100", "work": work})
    told = readme.overview([first, emulated])
    (line,) = [line for line in told.splitlines() if "Not measured yet" in line]
    assert "`emulated-h100`" in line and "`emulated-v100`" not in line


def test_whoever_wins_stands_in_readme_and_first_in_the_overview() -> None:
    result = record.read(_SAMPLE)
    told = " ".join(readme.render([result])["speed"].split())
    assert told.index("Where another engine is better") < told.index("`torch.save tmpfs`")
    text = readme.overview([result])
    first = text.index("Where another engine wins")
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
        readme.replaced("nothing", {"why": "text"})
