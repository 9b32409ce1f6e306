"""Charts, the page and the tables across definitions: from any files, always the same bytes."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import pytest

from bench import charts, cli, document, page, readme, record, report, summary
from bench.drawing import PARTS
from bench.place import ROOT
from bench.record import Record, Result

pytestmark = pytest.mark.timeout(600)  # new processes load matplotlib, perhaps on a busy machine

_SAMPLE = ROOT / "tests" / "data" / "bench" / "sample.parquet"
_MODELS = {"ResNet-18": ("resnet18", 9e7), "VGG-16": ("vgg16", 1e9), "GPT-2": ("gpt2", 1.5e9)}
_COSTS = {"lightck": 0.002, "torch.save": 0.08, "checkfreq": 0.05}


@pytest.fixture
def drawing() -> None:
    """Skips where nothing can be drawn."""
    pytest.importorskip("matplotlib", reason="SKIPPED: no matplotlib, pip install '.[bench]'")


def _records(label: str, state: float, **values: float) -> list[Record]:
    units = {"extra": "s", "step": "s", "sync_copy": "s", "state": "B"}
    found = [
        Record(label, measure, units.get(measure, ""), x, 0.9 * x, 1.1 * x)
        for measure, x in values.items()
    ]
    return [*found, Record(label, "state", "B", state, state, state)]


def _essential(
    costs: dict[str, float] = _COSTS, policy: str = "blocks", **changes: object
) -> Result:
    """Three models and three engines, every cost in proportion to the state."""
    about = record.read(_SAMPLE).about
    given = about["definition"]
    given = {**given, "method": {**given["method"], "policy": policy}}
    some = given["contenders"][0]
    contenders, records = [], []
    for name, (model, state) in _MODELS.items():
        for engine, cost in costs.items():
            label = f"{name} {engine}"
            work = {"model": model}
            contenders.append({**some, "label": label, "engine": engine, "work": work})
            values = {"extra": cost * state / 1e9, "cost_ratio": 10 * cost, "step": state / 1e9}
            copy = 0.1 * state / 1e9 if model != "vgg16" else 0.01
            steps = {"interval_1pct_steps": 10.0, "interval_5pct_steps": 20.0}
            records += _records(label, state, **values, sync_copy=copy, **steps)
    new = {**given, "name": "essential", "contenders": contenders, "targets": []}
    return Result({**about, "definition": {**new, **changes}}, records)


def _on_a_gpu() -> Result:
    """The same three models, as a GPU's results are stored."""
    found = _essential(
        name="gpu-models", kind="device_training", work={**_work(), "device": "cuda"}
    )
    machine = {**found.about["machine"], "gpu": "Example H100"}
    return replace(found, about={**found.about, "machine": machine})


def _work() -> dict[str, object]:
    work: dict[str, object] = record.read(_SAMPLE).about["definition"]["work"]
    return work


def _files(folder: Path, *results: Result) -> list[str]:
    paths = [folder / f"{result.about['definition']['name']}.parquet" for result in results]
    for result, path in zip(results, paths, strict=True):
        record.write(result, path)
    return [str(path) for path in paths]


# ---- the same bytes ------------------------------------------------------------------------------


def test_report_page_and_charts_of_stored_files_are_the_same_byte_for_byte(
    drawing: None, tmp_path: Path
) -> None:
    files = _files(tmp_path, _essential(), record.read(_SAMPLE))
    worlds = [{"PYTHONHASHSEED": "1", "TZ": "UTC"}, {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"}]
    made = []
    for number, world in enumerate(worlds):
        out = tmp_path / str(number)
        command = [sys.executable, "-m", "bench", "report", *files, "-o", str(out / "report.md")]
        environment = {**os.environ, **world}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert made[0] == made[1]
    assert {"report.md", "report.html", "report-all-models.png"} <= made[0].keys()
    xml.dom.minidom.parseString(made[0]["report-all-models.svg"])
    assert made[0]["report-sample.png"].startswith(b"\x89PNG")


# ---- charts --------------------------------------------------------------------------------------


def _recovery() -> Result:
    about = record.read(_SAMPLE).about
    given = about["definition"]
    parts = {"recovery": 0.6, "detected": 0.1, "saved": 0.2, "ended": 0.1, "restart": 0.2}
    new = {**given, "name": "recovery", "kind": "recovery", "targets": []}
    records = [Record("lightck", m, "s", x, x, x) for m, x in parts.items()]
    return Result({**about, "definition": new}, records)


def test_every_chart_is_drawn_that_there_are_rows_for(drawing: None) -> None:
    drawn = charts.drawn([_essential(), _recovery(), record.read(_SAMPLE)])
    assert set(drawn) == {
        *("all-models", "essential", "essential-state", "recovery", "sample", "sample-stalls")
    }
    assert "detected" in drawn["recovery"].svg and "500 MB" in drawn["essential-state"].svg
    assert all(name in drawn["all-models"].svg for name in (*_MODELS, *_COSTS))


def test_causes_of_a_stall_have_colours_of_their_own_and_models_stand_together(
    drawing: None,
) -> None:
    whole = _essential()
    causes = ("before_update", "begin", "boundary", "fence", "request", "step")
    more = [
        Record(label["label"], f"stall.{cause}", "s", 1.0, 1.0, 1.0)
        for label in whole.about["definition"]["contenders"]
        for cause in causes
    ]
    drawn = charts.drawn([replace(whole, records=[*whole.records, *more])])["essential-stalls"].svg
    colours = {colour for colour in PARTS if f"var(--chart-{colour[1:]},{colour})" in drawn}
    assert len(colours) >= len(causes), "two of one colour cannot be told apart"
    labels = re.findall(rf">((?:{'|'.join(_MODELS)}) [a-z.]+)<", drawn)
    assert [label.split()[0] for label in labels] == [m for m in _MODELS for _ in _COSTS]


def test_a_model_with_one_engine_is_drawn_beside_those_with_more(drawing: None) -> None:
    whole = _essential()
    gone = [
        r for r in whole.records if not re.fullmatch(r"VGG-16 (torch.save|checkfreq)", r.engine)
    ]
    assert "VGG-16" in charts.drawn([replace(whole, records=gone)])["essential"].svg


def test_charts_cope_with_rows_that_are_not_there_yet(drawing: None) -> None:
    whole = _essential()
    assert charts.drawn([replace(whole, records=[])]) == {}
    assert charts.drawn([replace(_recovery(), records=[])]) == {}
    for gone in _COSTS:
        records = [r for r in whole.records if not r.engine.endswith(gone)]
        drawn = charts.drawn([replace(whole, records=records)])
        assert "essential" in drawn
        text = report.render([replace(whole, records=records)], {})
        assert f"| GPT-2 {gone} |" in text, "it has its row, an empty one"
    unbounded = [replace(r, low=-float("inf"), high=float("inf")) for r in whole.records]
    assert "all-models" in charts.drawn([replace(whole, records=unbounded)])


def test_a_chart_brings_nothing_from_elsewhere_into_its_page(drawing: None) -> None:
    for name, drawing_ in charts.drawn([_essential(), _recovery()]).items():
        assert drawing_.svg.startswith("<svg"), name
        assert "<metadata" not in drawing_.svg and "DejaVu" not in drawing_.svg
        left = re.findall(r"#[0-9a-f]{6}(?!\))", drawing_.svg)
        assert not set(left) - {"#ffffff", "#000000"}, "colours that dark readers would not see"


# ---- the page ------------------------------------------------------------------------------------


class _Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order; notes what is looked up elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elsewhere: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "action") and not str(value).startswith("#"):
                self.elsewhere.append(f"{tag} {key}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _page(*results: Result) -> tuple[str, _Reader]:
    svg = {name: drawing.svg for name, drawing in charts.drawn(results).items()}
    text = page.page(report.document(results), svg)
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    return text, reader


def test_the_page_needs_nothing_but_itself_and_fits_its_reader(drawing: None) -> None:
    text, reader = _page(_essential(), record.read(_SAMPLE))
    assert reader.elsewhere == [] and "@import" not in text and "url(http" not in text
    assert reader.seen.count("svg") == 5
    assert 'name="viewport"' in text and "prefers-color-scheme:dark" in text


def test_losses_stand_before_targets_on_the_page(drawing: None) -> None:
    text, _ = _page(record.read(_SAMPLE))
    lost = text.index("Where another engine wins")
    assert lost < text.index("<td>torch.save tmpfs</td>") < text.index(">missed</span>")
    assert text.index(">missed</span>") < text.index(">met</span>")


def test_what_a_definition_says_cannot_become_markup() -> None:
    blocks = [
        document.Heading(1, "a <b>"),
        document.Table(["<i>"], [["<script>x</script>"], [document.Cell("&", 1.0, "<u>")]]),
        document.Text("`<x>` **<y>**"),
    ]
    text = page.page(blocks, {})
    body = text.partition("<main>")[2].partition("</main>")[0]
    assert not re.search(r"<(b|i|u|x|y|script)>", body)
    assert "<code>&lt;x&gt;</code> <strong>&lt;y&gt;</strong>" in text


def test_tables_can_be_sorted_by_value_and_not_by_its_unit(drawing: None) -> None:
    text, _ = _page(_essential())
    assert '<td class="n" data-v="0.12">120 ms' in text and 'data-v="0.00018">180 us' in text


# ---- across definitions --------------------------------------------------------------------------


def _cells(table: document.Table | None, model: str) -> list[str]:
    assert table is not None
    return next(list(map(str, row)) for row in table.rows if row[0] == model)


def test_models_stand_beside_each_other_with_the_least_ratio_to_lightck() -> None:
    table = summary.models([_essential()])
    assert table is not None and [str(row[0]) for row in table.rows] == list(_MODELS)
    assert table.head[-2:] == ["torch.save", "checkfreq"]
    cells = _cells(table, "GPT-2")
    assert cells[3] == "3.00 ms [2.70 ms, 3.30 ms]"
    assert cells[-2:] == ["120 ms (>= 32.7 x)", "75.0 ms (>= 20.5 x)"], "near end by far end"
    assert _cells(table, "VGG-16")[2] == "1.00 % easy"


def test_a_model_that_a_peer_wins_is_marked() -> None:
    table = summary.models([_essential({**_COSTS, "checkfreq": 0.001})])
    assert _cells(table, "GPT-2")[-1] == "**1.50 ms** (>= 0.409 x)"
    assert _cells(table, "GPT-2")[-2].startswith("120 ms")


def test_what_cannot_be_told_apart_gets_no_ratio() -> None:
    whole = _essential()
    noise = [
        replace(r, low=-1.0) if r.engine.endswith("torch.save") and r.measure == "extra" else r
        for r in whole.records
    ]
    assert _cells(summary.models([replace(whole, records=noise)]), "GPT-2")[-2].endswith(
        "(not told apart)"
    )
    free = [
        replace(r, value=-0.01, low=-0.02, high=-0.001)
        if r.engine.endswith("lightck") and r.measure == "extra"
        else r
        for r in whole.records
    ]
    found = _cells(summary.models([replace(whole, records=free)]), "GPT-2")
    assert found[-2] == "120 ms (any times)"


def test_a_companion_adds_the_model_that_is_only_there() -> None:
    whole = _essential()
    given = whole.about["definition"]
    kept = [c for c in given["contenders"] if c["label"].startswith("GPT-2")]
    more = [{**c, "label": c["label"].replace("GPT-2", "BERT"), "work": {}} for c in kept]
    bert = {**given, "name": "essential-bert", "contenders": more}
    bert["work"] = {**given["work"], "model": "bert-large"}
    records = [
        replace(r, engine=r.engine.replace("GPT-2", "BERT"))
        for r in whole.records
        if r.engine.startswith("GPT-2")
    ]
    companion = Result({**whole.about, "definition": bert}, records)
    same = {**bert, "name": "essential-stress", "work": {**given["work"], "model": "gpt2"}}
    again = Result({**whole.about, "definition": same}, records)
    table = summary.models([whole, companion, again])
    assert table is not None
    assert [str(row[0]) for row in table.rows] == [*_MODELS, "BERT"]
    assert summary.models([companion, record.read(_SAMPLE)]) is None


def _larger() -> Result:
    """Two models that lightck alone trains with; no snapshots at all are measured for one."""
    about = record.read(_SAMPLE).about
    given = about["definition"]
    some = given["contenders"][0]
    contenders, records = [], []
    for name, engine, batch in (
        *(("VGG-16", "none", 16), ("VGG-16", "lightck", 16)),
        ("GPT-2", "lightck", 1),
    ):
        label, model = f"{name} {engine}", name.lower().replace("-1", "1").replace("-2", "2")
        work = {"model": model, "batch": batch, "sequence": 512}
        contenders.append({**some, "label": label, "engine": engine, "work": work})
        cost = 0.0 if engine == "none" else 0.004
        values = {"extra": 6 * cost, "cost_ratio": cost * 100, "overhead": cost, "step": 6.0}
        records += _records(label, 1e9, **values, sync_copy=0.04 if name == "VGG-16" else 0.4)
    target = {"row": "share", "measure": "overhead", "engine": "GPT-2 lightck", "at_most": 0.01}
    target |= {"at_least": None, "against": [], "unavailable": ""}
    new = {"name": "seed-batches", "contenders": contenders, "targets": [target]}
    return Result({**about, "definition": {**given, **new}}, records)


def test_models_without_peers_stand_apart_each_share_beside_its_cost_ratio() -> None:
    table = summary.overheads([_essential(), _larger()])
    assert summary.models([_essential(), _larger()]) == summary.models([_essential()])
    assert summary.intervals([_essential(), _larger()]) == summary.intervals([_essential()])
    assert summary.overheads([_essential(), _scaling()]) is None
    assert summary.models([_scaling()]) is None, "one model in several sizes"
    assert table is not None and len(table.rows) == 2
    assert table.head[5:7] == ["lightck, of a step", "of a plain copy"]
    cells = _cells(table, "VGG-16")
    assert cells[1:3] == ["16", "1.00 GB"] and cells[4] == "0.667 % easy"
    assert cells[5:7] == ["0.400 % [0.360 %, 0.440 %]", "0.400 [0.360, 0.440]"]
    assert cells[8] == "0 %", "what the method is wrong by"
    cells = _cells(table, "GPT-2")
    assert cells[1] == "1 x 512" and cells[4] == "6.67 %" and cells[8] == ""
    for text in (report.render([_larger()], {}), readme.overview([_larger()])):
        assert "| VGG-16 | 16 | 1.00 GB | 6.00 s" in text


def _pieces(*labels: str) -> Result:
    """One model: lightck as it is and otherwise, and an engine beside it."""
    about = record.read(_SAMPLE).about
    given = about["definition"]
    some = given["contenders"][0]
    engines = {label: "lightck" for label in labels} | {"CheckFreq": "checkfreq", "none": "none"}
    contenders = [{**some, "label": k, "engine": e, "work": {}} for k, e in engines.items()]
    costs = {"lightck": 0.01, "no overlap": 0.1, "one thread": 0.008, "CheckFreq": 1.0, "none": 0.0}
    records = [r for k in engines for r in _records(k, 1e9, extra=costs[k])]
    new = {"name": "ablation", "kind": "training", "contenders": contenders, "targets": []}
    return Result({**about, "definition": {**given, **new}}, records)


def test_each_piece_that_is_switched_off_stands_with_what_it_costs() -> None:
    result = _pieces("lightck", "no overlap", "one thread")
    table = summary.pieces(result)
    assert table is not None
    assert [str(row[0]) for row in table.rows] == ["one thread", "no overlap", "CheckFreq"]
    cells = _cells(table, "no overlap")
    assert cells[1:] == ["100 ms [90.0 ms, 110 ms]", "90.0 ms [79.0 ms, 101 ms]", "(>= 8.18 x)"]
    assert _cells(table, "one thread")[2] == "-2.00 ms [-3.80 ms, -200 us]", "it saves something"
    assert summary.pieces(_pieces("lightck", "no overlap")) is None, "not an ablation"
    assert summary.pieces(_essential()) is None
    limited = {**result.about["definition"]["contenders"][0], "settings": {"write_limit": 1}}
    given = {**result.about["definition"]}
    given["contenders"] = [limited, *given["contenders"][1:]]
    changed = replace(result, about={**result.about, "definition": given})
    assert summary.pieces(changed) is None, "these are not the defaults"
    assert "| no overlap | 100 ms [90.0 ms, 110 ms] | 90.0 ms" in report.render([result], {})


def _scaling() -> Result:
    """One model in four sizes and three numbers of tensors; where it is largest, a peer wins."""
    about = record.read(_SAMPLE).about
    given = about["definition"]
    some = given["contenders"][0]
    sizes = {"10 MB": (96, 1e7), "100 MB": (96, 1e8), "1 GB": (96, 1e9), "4 GB": (96, 4e9)}
    sizes |= {"16 tensors": (16, 1.01e8), "100,000 tensors": (100_000, 1e8)}
    contenders, records = [], []
    for name, (tensors, state) in sizes.items():
        for engine, cost in {"lightck": 0.01, "torch.save": 0.005 if name == "4 GB" else 1}.items():
            label = f"{name} {engine}"
            work = {"model": "bag", "tensors": tensors, "width": round(state / tensors)}
            contenders.append({**some, "label": label, "engine": engine, "work": work})
            records += _records(label, state, extra=cost * state / 1e9, step=1, sync_copy=1)
            records.append(Record(label, "tensors", "", tensors, tensors, tensors))
    new = {**given, "name": "scaling", "contenders": contenders, "targets": []}
    return Result({**about, "definition": new}, records)


def test_a_loss_in_one_of_many_sizes_is_told_and_each_size_has_its_table() -> None:
    text = report.render([_scaling()], {})
    lost = text[text.index("## Where another engine wins") : text.index("## Targets")]
    assert lost.count("`scaling`") == 1 and "| 4 GB | " in lost
    assert text.index("### 10 MB, ") < text.index("### 4 GB, ") < text.index("### 16 tensors, ")


def test_cost_is_drawn_against_size_with_the_number_of_tensors_held(drawing: None) -> None:
    found = charts._lines(_scaling(), "extra", "state")
    assert [[size for size, _ in line] for line in found.values()] == 2 * [[1e7, 1e8, 1e9, 4e9]]
    found = charts._lines(_scaling(), "extra", "tensors")
    assert [[size for size, _ in line] for line in found.values()] == 2 * [[16, 96, 100_000]]
    assert {"scaling", "scaling-state", "scaling-tensors"} <= charts.drawn([_scaling()]).keys()


def test_the_smallest_intervals_stand_in_a_table() -> None:
    text = report.render([_essential()], {})
    first = text.index("## Smallest interval")
    assert "| GPT-2 | 11 steps within 1 % (22 steps within 5 %) | 11 steps" in text[first:]
    single = _essential({"lightck": 1.0, "dcp": 1.0}, policy="lone", name="intervals")
    table = summary.intervals([_essential(), single])
    assert table is not None and table.head == ["model", "lightck", "dcp"], "single ones, if there"
    assert len(table.rows) == 3
    assert summary.models([_essential(), single]) == summary.models([_essential()])
    assert summary.intervals([record.read(_SAMPLE)]) is None


def test_readme_and_the_overview_show_the_models_once_they_are_stored() -> None:
    results = [_essential(), record.read(_SAMPLE)]
    text = readme.overview(results)
    assert "| GPT-2 | 1.50 GB | 10.0 % | 3.00 ms [2.70 ms, 3.30 ms] |" in text
    assert "| GPT-2 | 11 steps within 1 % (22 steps within 5 %) |" in text
    told = readme.render(results)["speed"]
    assert "| GPT-2 | 1.50 GB | 10 [9, 11] | 10 [9, 11] |" in told
    assert "copy / step" not in readme.overview([record.read(_SAMPLE)])
    assert "| model |" not in readme.render([record.read(_SAMPLE)])["speed"]


def _apart(**steps: tuple[float, float, float]) -> str:
    """Return README's words for intervals within 1 % that an engine has for all models."""
    whole = _essential()
    records = [
        replace(r, value=value, low=low, high=high) if r.measure == summary.WITHIN_1 else r
        for r in whole.records
        for value, low, high in [steps[r.engine.split()[1].replace(".", "_")]]
    ]
    return " ".join(readme.render([replace(whole, records=records)])["speed"].split())


def test_readme_says_what_the_intervals_say() -> None:
    text = _apart(lightck=(1, 1, 1), torch_save=(50, 40, 60), checkfreq=(30, 20, 40))
    assert "by the whole interval for ResNet-18, VGG-16 and GPT-2." in text
    assert "For all of them every other engine needs at least 20.0 times as many steps" in text
    text = _apart(lightck=(1, 1, 9), torch_save=(50, 40, 60), checkfreq=(9, 8, 10))
    assert "by the whole interval for none." in text and "times as many" not in text
    assert "For ResNet-18, VGG-16 and GPT-2 its interval meets another engine's." in text


def test_a_gpu_s_results_are_not_in_readme_s_table() -> None:
    assert "| GPT-2 |" not in readme.render([_on_a_gpu()])["speed"]
    both = readme.render([_on_a_gpu(), _essential()])["speed"]
    assert both.count("| GPT-2 |") == 1 and "Example H100" not in both


# ---- accelerators --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rendered",
    [lambda r: report.render(r, {}), lambda r: readme.overview(r).partition("## Overview")[2]],
)
def test_results_of_a_gpu_never_share_a_table_with_those_of_a_cpu(rendered: object) -> None:
    assert callable(rendered)
    text = rendered([_on_a_gpu(), _essential()])
    cpu, name, gpu = text.partition("n Example H100")
    assert name and "n the CPU" in cpu and "gpu-models" not in cpu
    assert "essential" not in gpu
    assert cpu.count("| GPT-2 | 1.50 GB |") == gpu.count("| GPT-2 | 1.50 GB |") == 1


def test_what_is_emulated_is_said_to_be_and_stands_apart() -> None:
    emulated = _essential(name="emulated-v100", work={**_work(), "emulated": "v100"})
    text = report.render([emulated, _essential()], {})
    first = text.index("# Benchmarks of lightck, on an emulated V100")
    assert "emulated" not in text[:first] and "`essential`" not in text[first:]


def test_charts_of_a_gpu_are_apart(drawing: None) -> None:
    drawn = charts.drawn([_on_a_gpu(), _essential()])
    assert {
        "all-models",
        "example-h100-all-models",
        "example-h100-gpu-models-state",
    } <= drawn.keys()
    files = {name: f"{name}.png" for name in drawn}
    text = report.render([_on_a_gpu(), _essential()], files)
    assert all(f"({file})" in text for file in files.values()), "each chart has its place"


def test_a_kind_that_the_report_does_not_know_is_shown_with_all_its_measures() -> None:
    text = report.render([_essential(kind="something new")], {})
    assert "| engine | extra per snapshot | of a plain copy | step without | plain copy |" in text


def test_the_command_says_where_it_wrote(
    drawing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = _files(tmp_path, _essential())
    assert cli.main(["report", *files, "-o", str(tmp_path / "out" / "x.md"), "--no-charts"]) == 0
    told = capsys.readouterr().out.split()
    assert told == [str(tmp_path / "out" / "x.md"), str(tmp_path / "out" / "x.html")]
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["x.html", "x.md"]
    assert "<svg" not in (tmp_path / "out" / "x.html").read_text()
