"""Results are stored with what is needed to judge them, and reports say just what they say.

`tests/data/bench/` holds a result file and the report of it. After an intended change of the report
`python -m tests.unit.test_bench_report` writes the new one; look at the difference.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench import (
    cli,
    definition,
    document,
    engines,
    execute,
    launch,
    record,
    report,
    rivals,
    runner,
    verdict,
)
from bench.errors import BenchError
from bench.group import Place
from bench.record import Record, Result

_DATA = Path(__file__).parents[1] / "data" / "bench"
_STORED = _DATA / "sample.parquet"


def _stored() -> Result:
    return record.read(_STORED)


def _rendered() -> str:
    return report.render([_stored()], {"sample": "report-sample.png"})


def test_the_report_of_a_stored_file_is_the_same_byte_for_byte() -> None:
    assert _rendered() == (_DATA / "report.md").read_text()


def test_misses_stand_first_and_what_was_not_measured_is_told() -> None:
    states = [found.state for found in verdict.verdicts([_stored()])]
    assert states == ["missed", "not shown", "not available", "not available", "met", "met"]


def test_whoever_wins_stands_first() -> None:
    rows = [line for line in _rendered().splitlines() if "restored and equal" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| torch.save tmpfs", "| lightck"]


def test_rows_that_another_engine_wins_stand_before_everything_else() -> None:
    text = _rendered()
    first = text.index("## Where another engine wins")
    assert first < text.index("## Targets") < text.index("## sample")
    lost = text[first : text.index("## Targets")]
    assert "torch.save tmpfs" in lost and "lightck" in lost
    second = [
        replace(r, engine="dcp", value=r.value * 1.1)
        for r in _stored().records
        if r.engine == "torch.save tmpfs"
    ]
    both = replace(_stored(), records=[*_stored().records, *second])
    assert [winner.engine for _, winner, _ in rivals.lost(both)] == ["torch.save tmpfs"]
    slower = [
        replace(r, value=9e9, low=9e9, high=9e9) if r.engine == "torch.save tmpfs" else r
        for r in _stored().records
    ]
    none_lost = report.render([replace(_stored(), records=slower)], {})
    assert "Nowhere among these rows." in none_lost


def test_who_is_better_in_what_is_counted_beside_is_told_after_the_losses_in_time() -> None:
    theirs, ours = "torch.save tmpfs", "lightck"
    more = [
        *(
            Record(theirs, "extra_dram_bytes", "B", 1.0, 1.0, 1.0),
            Record(theirs, "cpu_s", "s", 2, 1, 3),
        ),
        *(
            Record(ours, "extra_dram_bytes", "B", 2.0, 2.0, 2.0),
            Record(ours, "cpu_s", "s", 1, 1, 1),
        ),
    ]
    first = replace(_stored(), records=[*_stored().records, *more])
    given = {**_stored().about["definition"], "name": "second"}
    second = replace(_stored(), about={**_stored().about, "definition": given})
    table = report.lost([first, second])
    assert isinstance(table, document.Table)
    told = [(row[0], row[2]) for row in table.rows]
    extra = "extra per snapshot"
    assert told == [("`sample`", extra), ("`second`", extra), ("`sample`", "extra DRAM")]
    main, beside = report.losses([first, second])
    assert [result for result, _, _, _ in main] == [first, second]
    counted = report.beside_in_short(beside)
    assert counted == "1 more by what is counted beside it: 1 in extra DRAM"


def test_where_both_estimates_of_the_extra_time_disagree_the_report_says_so() -> None:
    def with_clock(low: float, high: float) -> str:
        mean = (low + high) / 2
        (wall,) = (r for r in _stored().records if (r.engine, r.measure) == ("lightck", "extra"))
        run = Record("lightck", "extra_run", "s", wall.low * mean, wall.low * low, wall.low * high)
        more = replace(_stored(), records=[*_stored().records, run])
        return report.render([more], {})

    assert "The two estimates" not in _rendered()
    assert "extra, run time" not in _rendered()
    beside = with_clock(0.5, 0.9)
    assert "The two estimates of the extra time disagree for lightck:" in beside
    assert "extra, run time" in beside
    assert "The two estimates" not in with_clock(0.5, 1.0)


def test_on_a_gpu_too_whoever_wins_is_told() -> None:
    for kind, measure in (("device_training", "extra"), ("device_restore", "restore")):
        given = {**_stored().about["definition"], "kind": kind}
        records = [replace(r, measure=measure) for r in _stored().records if r.measure == "extra"]
        lost = rivals.lost(Result({**_stored().about, "definition": given}, records))
        assert [winner.engine for _, winner, _ in lost] == ["torch.save tmpfs"]


def test_a_section_says_what_ran_where_and_how_busy_the_machine_was() -> None:
    section = _rendered().split("## sample")[1]
    about = _stored().about
    assert f"`{about['command']}` on Example CPU, 2 cores, 25 GiB, Linux 6.1.0: commit" in section
    assert f"{about['started']}, {about['seconds']} s, load {about['load'][0]} at" in section


def _with(result: Result, **values: float) -> Result:
    """The same with other values of lightck's measures."""
    records = [
        replace(r, value=values[r.measure], low=values[r.measure], high=values[r.measure])
        if r.engine == "lightck" and r.measure in values
        else r
        for r in result.records
    ]
    return replace(result, records=records)


def test_a_row_says_whether_a_blocking_copy_would_cost_little_too() -> None:
    def told(copy: float) -> str:
        text = report.render([_with(_stored(), step=1.0, sync_copy=copy)], {})
        return next(x for x in text.splitlines() if x.startswith("| lightck | "))

    assert "| 4.90 %, easy |" in told(0.049)
    assert "| 5.10 % |" in told(0.051)


def test_every_percentage_of_a_target_stands_beside_its_cost_ratio() -> None:
    target = {"row": "share", "measure": "overhead", "engine": "lightck", "at_most": 0.01}
    missing = {"at_least": None, "against": [], "unavailable": ""}
    definition_ = {**_stored().about["definition"], "targets": [{**target, **missing}]}
    result = replace(_stored(), about={**_stored().about, "definition": definition_})
    hard = _targets(_with(result, overhead=0.004, cost_ratio=0.3, step=1, sync_copy=0.1))
    assert "| 0.400 % at a cost ratio of 0.300, cut short" in hard
    easy = _targets(_with(result, overhead=0.004, cost_ratio=0.3, step=1, sync_copy=0.01))
    assert "| 0.400 % at a cost ratio of 0.300, an easy row, cut" in easy


def _targets(result: Result) -> str:
    return document.markdown(report.targets([result]), {})


def test_models_stand_apart_each_with_its_winner_first() -> None:
    about = _stored().about
    given = about["definition"]
    two = [
        {**c, "label": f"{model} {c['label']}", "work": {"model": model}}
        for model in ("vgg16", "gpt2")
        for c in given["contenders"]
    ]
    records = [
        replace(r, engine=f"{model} {r.engine}")
        for model in ("vgg16", "gpt2")
        for r in _stored().records
    ]
    changed = {**about, "definition": {**given, "contenders": two, "targets": []}}
    text = report.render([Result(changed, records)], {})
    vgg, gpt = text.index("### vgg16, "), text.index("### gpt2, ")
    for part in (text[vgg:gpt], text[gpt:]):
        assert part.index("torch.save tmpfs |") < part.index(" lightck |")


def test_a_value_meets_a_target_only_with_its_whole_interval() -> None:
    at_most = definition.Target("row", "extra", "lightck", at_most=1.0)
    at_least = definition.Target("row", "extra", "lightck", at_least=1.0)
    cases = [((0.5, 0.4, 0.6), "met", "missed"), ((0.9, 0.7, 1.1), "not shown", "missed")]
    cases += [((2.0, 1.5, 2.5), "missed", "met"), ((1.1, 0.9, 1.3), "missed", "not shown")]
    for found, most, least in cases:
        estimate = verdict.Estimate(*found)
        assert verdict.state(at_most, estimate) == most
        assert verdict.state(at_least, estimate) == least
    # An interval that is wider than what is allowed shows nothing, wherever it lies.
    assert verdict.state(at_most, verdict.Estimate(-3.0, -5.0, -1.0)) == "not shown"
    unknown = verdict.Estimate(math.nan, math.nan, math.nan)
    assert {verdict.state(each, unknown) for each in (at_most, at_least)} == {"not shown"}


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    result = _stored()
    record.write(result, tmp_path / "again.parquet")
    assert record.read(tmp_path / "again.parquet") == result
    assert [file.name for file in tmp_path.iterdir()] == ["again.parquet"]


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    table = pq.read_table(_STORED)
    about = json.loads(table.schema.metadata[b"lightck-bench"])
    assert about["format"] == record.FORMAT
    about["format"] = 99
    old = tmp_path / "old.parquet"
    pq.write_table(table.replace_schema_metadata({b"lightck-bench": json.dumps(about)}), old)
    with pytest.raises(BenchError, match="results of format 99, this bench reads 1.*run sample"):
        record.read(old)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none.parquet: cannot be read"):
        record.read(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("not Parquet at all")
    with pytest.raises(BenchError, match=r"text.parquet: cannot be read"):
        record.read(tmp_path / "text.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(BenchError, match=r"not of `python -m bench run`"):
        record.read(tmp_path / "other.parquet")


def test_a_file_that_is_not_whole_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    table, key = pq.read_table(_STORED), b"lightck-bench"
    about = json.loads(table.schema.metadata[key])
    del about["machine"]
    changed = tmp_path / "changed.parquet"
    pq.write_table(table.replace_schema_metadata({key: json.dumps(about)}), changed)
    with pytest.raises(BenchError, match=r"changed.parquet: not as .* wrote it: no machine$"):
        record.read(changed)
    pq.write_table(table.drop_columns(["capped"]), changed)
    with pytest.raises(BenchError, match=r"changed.parquet: not as .* wrote it: no capped$"):
        record.read(changed)
    pq.write_table(table.replace_schema_metadata({key: "{cut"}), changed)
    with pytest.raises(BenchError, match=r"changed.parquet: cannot be read: what it says of"):
        record.read(changed)
    with pytest.raises(BenchError, match="a folder, not a result"):
        record.read(tmp_path)


def test_what_is_not_a_number_is_not_written(tmp_path: Path) -> None:
    result = replace(_stored(), records=[Record("lightck", "extra", "s", *[float("nan")] * 3)])
    with pytest.raises(BenchError, match="lightck: extra is not a number"):
        record.write(result, tmp_path / "result.parquet")
    assert not list(tmp_path.iterdir())


# ---- nothing is published that does not count ----------------------------------------------------

_DEFINITION = """\
about = "x"
kind = "training"
[work]
model = "tiny"
[[engine]]
engine = "none"
[[engine]]
engine = "blocking"
"""


def _run(tmp_path: Path, text: str = _DEFINITION) -> int:
    (tmp_path / "given.toml").write_text(text)
    return cli.main(["run", str(tmp_path / "given.toml"), "--out", str(tmp_path / "out")])


def test_nothing_is_published_if_one_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(job: dict[str, object], tell: object) -> dict[str, object]:
        if job["contender"]["label"] == "blocking":  # type: ignore[index]
            return {"error": "the restored state of step 7 is not what was saved: x: 1 of 4 bytes"}
        return {"records": [], "versions": execute.machine.versions(["torch"])}

    monkeypatch.setattr(launch, "in_processes_of_their_own", failing)
    monkeypatch.setattr(execute.machine, "commit", lambda: "0123")
    monkeypatch.setattr(execute.machine, "versions", lambda packages: {"torch": "1"})
    assert _run(tmp_path) == 2
    assert "given: blocking: the restored state of step 7 is not what" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_runs_for_an_unknown_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "in_processes_of_their_own", None)
    assert _run(tmp_path, _DEFINITION.replace('"blocking"', '"nebula"')) == 2
    assert "unknown engine 'nebula'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_runs_if_a_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(package: str) -> str:
        if package == "transformers":
            raise execute.machine.PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(launch, "in_processes_of_their_own", None)
    monkeypatch.setattr(execute.machine, "version", version)
    assert _run(tmp_path, _DEFINITION.replace('"tiny"', '"gpt2"')) == 2
    assert "package transformers is not installed, so nothing was run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("packaged", [False, True])
def test_a_peer_that_cannot_run_here_is_listed_with_its_error(
    packaged: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(job: dict[str, object], tell: object) -> dict[str, object]:
        if job["contender"]["engine"] == "torchsnapshot":  # type: ignore[index]
            return {"unavailable": "OSError: libcudart.so|\nnot found"}
        one = {**record.single("extra", "s", 1.0).__dict__, "engine": "none"}
        return {"records": [one], "versions": {"torch": "1"}}

    monkeypatch.setattr(launch, "in_processes_of_their_own", measured)
    monkeypatch.setattr(execute.machine, "commit", lambda: "0123")
    monkeypatch.setattr(execute.machine, "versions", lambda packages: {"torch": "1"})
    monkeypatch.setattr(engines, "installed", lambda package: packaged)
    assert _run(tmp_path, _DEFINITION.replace('"blocking"', '"torchsnapshot"')) == 0
    assert "torchsnapshot cannot run here: " in capsys.readouterr().err
    text = report.render([record.read(tmp_path / "out" / "given.parquet")], {})
    row = next(line for line in text.splitlines() if line.startswith("| torchsnapshot |"))
    why = "OSError: libcudart.so/ not found" if packaged else "no torchsnapshot: pip install"
    assert f"| cannot run here: {why}" in row
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert ("cannot run here: no torchsnapshot: pip install" in listed) is not packaged


def test_an_engine_whose_snapshots_slip_has_no_number_and_misses_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "4 snapshots were due, 3 are complete (1 slipped): no number"

    def measured(job: dict[str, Any], tell: object) -> dict[str, object]:
        if job["contender"]["engine"] == "blocking":
            return {"no_number": why}
        one = {**record.single("extra", "s", 1.0).__dict__, "engine": "none"}
        return {"records": [one], "versions": {"torch": "1"}}

    monkeypatch.setattr(launch, "in_processes_of_their_own", measured)
    monkeypatch.setattr(execute.machine, "commit", lambda: "0123")
    monkeypatch.setattr(execute.machine, "versions", lambda packages: {"torch": "1"})
    target = '[[target]]\nrow = "x"\nmeasure = "extra"\nengine = "blocking"\nat_most = 1.0\n'
    assert _run(tmp_path, f"{_DEFINITION}\n{target}") == 0
    result = record.read(tmp_path / "out" / "given.parquet")
    assert f"| {why}" in report.render([result], {})
    (found,) = verdict.verdicts([result])
    assert (found.state, found.found, found.why) == ("missed", None, why)
    assert launch.merged({1: {"no_number": why}}) == {"no_number": why}


def test_a_target_is_judged_by_the_engines_that_run_here_and_names_the_others() -> None:
    about = _stored().about
    target = {"row": "x", "measure": "extra", "engine": "lightck", "at_most": None, "at_least": 0.1}
    target |= {"against": ["torch.save tmpfs", "nebula"], "unavailable": ""}
    given = {**about["definition"], "targets": [target]}

    def judged(absent: dict[str, str]) -> verdict.Verdict:
        changed = {**about, "definition": given, "absent": absent}
        (found,) = verdict.verdicts([replace(_stored(), about=changed)])
        return found

    assert judged({}).state == "not available", "left out by --engines: nobody knows"
    found = judged({"nebula": "no nebula"})
    assert found.state == "met"
    assert found.why == "against torch.save tmpfs (nebula cannot run here)"


def test_lightck_itself_is_never_listed_as_one_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> object:
        raise RuntimeError("broken\n  File x, line 1\nOSError: EINVAL")

    monkeypatch.setattr(runner.measures, "run", broken)
    job = {"contender": {"label": "x", "engine": "lightck"}, "place": Place().as_json()}
    job |= {"work": {"model": "tiny"}, "method": {}, "kind": "training", "threads": 1}
    job |= {"precision": {}, "folder": str(tmp_path), "packages": []}
    assert "RuntimeError: broken" in runner.perform(job)["error"]
    peer = {**job, "contender": {"label": "x", "engine": "torchsnapshot"}}
    told = {"unavailable": "RuntimeError: broken ... OSError: EINVAL"}
    assert runner.perform(peer) == told
    monkeypatch.setattr(runner.measures, "run", lambda job: _differs())
    assert "x: 1 of 4 bytes" in runner.perform(peer)["error"], "a wrong result is an error"


def _differs() -> None:
    raise BenchError("the restored state of step 7 is not what was saved: x: 1 of 4 bytes")


def test_an_engine_that_is_not_in_the_definition_cannot_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given.toml").write_text(_DEFINITION)
    assert cli.main(["run", str(tmp_path / "given.toml"), "--engines", "none,lightck"]) == 2
    assert "given has no engine 'lightck'; it has none, blocking" in capsys.readouterr().err


def test_engines_are_chosen_by_labels_that_may_have_commas_in_them() -> None:
    scaling = definition.load("scaling")
    labels = ["1.5 MB lightck", "3.6 MB in 2,400 tensors lightck", "1.5 MB foreach"]
    chosen = cli._only(scaling, ",".join(labels))
    assert sorted(contender.label for contender in chosen.contenders) == sorted(labels)


def test_a_report_can_say_with_its_status_that_a_target_is_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["report", str(_STORED), "--check"]) == 1
    assert cli.main(["report", str(_STORED)]) == 0
    assert "**missed**" in capsys.readouterr().out


if __name__ == "__main__":
    (_DATA / "report.md").write_text(_rendered())
