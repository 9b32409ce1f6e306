"""README's numbers are those of the stored results, and only results that count are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import cli, picture, readme, record
from bench.errors import BenchError
from bench.place import ROOT
from bench.record import Result

_SAMPLE = ROOT / "tests" / "data" / "bench" / "sample.parquet"


def _saying(result: Result, **changed: object) -> Result:
    return replace(result, about={**result.about, **changed})


def test_readme_is_rendered_from_the_stored_results() -> None:
    now = readme.README.read_text()
    assert readme.replaced(now, readme.render(readme.stored())) == now, (
        "run `python -m bench readme`"
    )


def test_every_stored_result_counts() -> None:
    stored = readme.stored()
    assert stored, f"nothing in {readme.RESULTS}"
    assert not [r.about["definition"]["name"] for r in stored if r.about.get("tiny")]


def test_another_number_makes_readme_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = record.read(_SAMPLE)
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    readme.README.write_text(f"above\n{readme.BEGIN}\n{readme.END}\nbelow\n")
    monkeypatch.setattr(cli, "BUILD", tmp_path / "build")
    record.write(result, tmp_path / "build" / "sample.parquet")
    assert cli.main(["readme", "--take"]) == 0
    assert "sample.parquet" in capsys.readouterr().out
    text = readme.README.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n")
    assert all(each["row"] in text for each in result.about["definition"]["targets"])
    assert result.about["machine"]["cpu"] in text and result.about["commit"] in text
    assert cli.main(["readme", "--check"]) == 0
    records = [replace(r, value=3 * r.value, high=4 * r.value) for r in result.records]
    record.write(replace(result, records=records), readme.RESULTS / "sample.parquet")
    assert cli.main(["readme", "--check"]) == 1
    assert readme.README.read_text() == text, "--check changes nothing"


def test_readme_shows_a_picture_that_is_there_and_small() -> None:
    assert f"]({picture.PICTURE.relative_to(ROOT)})" in readme.README.read_text()
    content = picture.PICTURE.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 150_000


def test_readme_says_what_was_not_measured_yet() -> None:
    assert "not measured yet: `ablation`, `armed`, `batch`" in readme.render([])


def test_whoever_wins_stands_first_in_readme() -> None:
    result = record.read(_SAMPLE)
    named = _saying(result, definition={**result.about["definition"], "name": "stress"})
    text = readme.render([named])
    assert 0 < text.index("\n| torch.save tmpfs |") < text.index("\n| lightck |")


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
