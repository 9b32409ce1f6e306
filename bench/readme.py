"""Render what the documents say of speed from the results that are stored in the repository.

`bench/results/` holds one file per definition, as `python -m bench run` wrote it. From them come
the parts of README between its markers, `docs/benchmarks.md` (an overview: losses, models, targets)
and the pages `docs/benchmarks/<topic>.md` (every row). The same files give the same bytes; a test
compares.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench import definition, origin, record, report, summary, topics
from bench.document import Block, Bullets, Heading, Text, markdown
from bench.errors import BenchError
from bench.place import ROOT
from bench.quantity import cell, digits, heading, quantity
from bench.record import Record, Result

RESULTS = Path(__file__).parent / "results"
README = ROOT / "README.md"
OVERVIEW = ROOT / "docs" / "benchmarks.md"
PAGES = ROOT / "docs" / "benchmarks"
PARTS = ("why", "speed")
"""README's parts that are rendered, each between two markers."""
_MADE = "<!-- Made by `make bench-record` from bench/results: change nothing here. -->"
_HOW = (
    "Measured by `make bench` and `make bench-full`, stored in `bench/results` with every sample,"
    " rendered from there by `make bench-record`. How it is measured, and where it leans:"
    " `bench/METHODOLOGY.md`. lightck ran with `failure='off'`, unless a row says *armed* or is"
    " about failures. A target is *met* only if the whole interval (95 %, in brackets) is on its"
    " right side; it is *not shown* if only the value is. Machines have letters where there are"
    " several: only rows of one benchmark are to be compared."
)
_COLUMNS = 119


def take(files: Iterable[Path]) -> list[Path]:
    """Store results in the repository, each replacing its definition's former one.

    Raises:
        BenchError: one is not a result, or of a tiny model: then none is stored.
    """
    files = list(files)
    for file in files:
        if record.read(file).about.get("tiny"):
            raise BenchError(f"{file}: made with --tiny, its numbers mean nothing; nothing stored")
    RESULTS.mkdir(exist_ok=True)
    return [Path(shutil.copyfile(file, RESULTS / file.name)) for file in files]


def stored() -> list[Result]:
    """Return the results in the repository, by name."""
    return [record.read(file) for file in sorted(RESULTS.glob("*.parquet"))]


# ---- the files -----------------------------------------------------------------------------------


def wanted(results: Sequence[Result]) -> dict[Path, str]:
    """Every document with numbers, as it should be; empty: a page that should not be there."""
    found = dict.fromkeys(PAGES.glob("*.md"), "")
    found[README] = replaced(current(README), render(results))
    found[OVERVIEW] = overview(results)
    for topic, each in topics.by_topic(results).items():
        found[PAGES / f"{topic.name}.md"] = page(topic, each)
    return found


def write(documents: Mapping[Path, str]) -> None:
    """Write documents; remove those that should not be there."""
    for file, text in documents.items():
        if text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        else:
            file.unlink()


def current(file: Path) -> str:
    """Return a document's present text; empty where it is missing."""
    return file.read_text() if file.exists() else ""


def markers(part: str) -> tuple[str, str]:
    """The lines of README between which a part stands."""
    return f"<!-- bench:{part}:begin -->", f"<!-- bench:{part}:end -->"


def replaced(document: str, parts: Mapping[str, str]) -> str:
    """The document with what stands between the markers of each part replaced.

    Raises:
        BenchError: the markers are missing.
    """
    for part, text in parts.items():
        begin, end = markers(part)
        head, _, rest = document.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise BenchError(f"{README}: no {begin} ... {end} in it: put the markers back")
        document = f"{head}{begin}\n\n{text}\n{end}{tail}"
    return document


# ---- docs ----------------------------------------------------------------------------------------


def overview(results: Sequence[Result]) -> str:
    """The page of all benchmarks: where the rows are, losses, models, targets, per accelerator."""
    blocks: list[Block] = [Heading(1, "Benchmarks"), Text(_HOW)]
    blocks += [Heading(2, "Pages, with every row"), Bullets(list(_index(results)))]
    missing = _missing(results)
    blocks += [Text(missing)] * bool(missing)
    for each in report.overview(results):
        blocks.append(
            replace(each, level=each.level + 1, text=each.text.replace(_TITLE, "Overview"))
            if isinstance(each, Heading)
            else each
        )
    return f"{_MADE}\n\n{markdown(blocks, {})}"


_TITLE = "Benchmarks of lightck"


def _index(results: Sequence[Result]) -> Iterator[str]:
    for topic, each in topics.by_topic(results).items():
        names = ", ".join(f"`{topics.name_of(r)}`" for r in each)
        yield f"[{topic.title}](benchmarks/{topic.name}.md) ({names}). {topic.question}"


def _missing(results: Sequence[Result]) -> str:
    """A sentence that says what was not measured, or nothing."""
    there = {topics.name_of(result) for result in results}
    missing = [f"`{name}`" for name in definition.names() if name not in there]
    return f"Not measured yet: {', '.join(missing)}." if missing else ""


def page(topic: topics.Topic, results: Sequence[Result]) -> str:
    """Every row of the benchmarks that answer one question."""
    blocks: list[Block] = [Heading(1, topic.title), Text(topic.question)]
    blocks += [
        Text("Losses, targets and what all of this means: [the overview](../benchmarks.md).")
    ]
    for result in results:
        blocks += report.section(result, summary.device(result))
    return f"{_MADE}\n\n{markdown(blocks, {})}"


# ---- README --------------------------------------------------------------------------------------


def render(results: Sequence[Result]) -> dict[str, str]:
    """README's parts by their names."""
    return {"why": _written(why(results)), "speed": _written(speed(results))}


def _written(blocks: Sequence[Block]) -> str:
    """Markdown whose lines are short, except tables'."""
    return markdown([_wrapped(each) for each in blocks], {})


def _wrapped(block: Block) -> Block:
    match block:
        case Text():
            return Text(_filled(block.text, ""))
        case Bullets():
            return Bullets([_filled(item, "  ") for item in block.items])
    return block


def _filled(text: str, indent: str) -> str:
    lines = textwrap.fill(
        text,
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.removeprefix(indent)


def why(results: Sequence[Result]) -> list[Block]:
    """Three numbers: a snapshot every step, a kill without warning, a save when training fails."""
    by_name = {topics.name_of(result): result for result in results}
    lines = [
        line
        for name, sentence in (
            ("essential", _every_step),
            ("restart", _killed),
            ("jit", _just_in_time),
        )
        if name in by_name and (line := sentence(by_name[name]))
    ]
    return [Bullets(lines)] if lines else [Text("Nothing has been measured yet.")]


def _every_step(result: Result) -> str:
    ours, theirs = (result.of(f"GPT-2 {name}", "extra") for name in ("lightck", "torch.save"))
    step, state = (result.of("GPT-2 lightck", each) for each in ("step", "state"))
    if not (ours and theirs and step and state):
        return ""
    nothing = ", which cannot be told from nothing," if ours.low < 0 < ours.high else ""
    return (
        f"A snapshot of GPT-2's whole training state ({_value(state)}) at every step makes a step"
        f" of {_value(step)} longer by {cell(ours)}{nothing} and `torch.save` by"
        f" {_value(theirs)}: {_source(result)}."
    )


def _killed(result: Result) -> str:
    ours, theirs = (result.of(name, "lost_work_s") for name in ("lightck", "torch.save"))
    if not (ours and theirs):
        return ""
    return (
        f"A `kill -9` costs {cell(ours)} of work with a snapshot at every step, and"
        f" {_value(theirs)} with `torch.save` as often as 5 % of the training allows:"
        f" {_source(result)}."
    )


def _just_in_time(result: Result) -> str:
    ours, copy = result.of("lightck", "jit"), result.of("lightck", "sync_copy")
    if not (ours and copy):
        return ""
    return (
        f"When training fails, all of GPT-2's state is saved in {cell(ours)}; a plain copy of it by"
        f" one thread takes {_value(copy)}: {_source(result)}."
    )


def _value(found: Record) -> str:
    return quantity(found.value, found.unit, found.measure)


def _source(result: Result) -> str:
    machine = result.about["machine"]
    return f"{_link(result)}, {machine['cpu']}, {machine['cores']} cores"


def _link(result: Result) -> str:
    """A benchmark's name, to its page, as seen from README."""
    name = topics.name_of(result)
    return f"[`{name}`](docs/benchmarks/{topics.topic(name).name}.md)"


def speed(results: Sequence[Result]) -> list[Block]:
    """How far apart snapshots must be, and where another engine is better."""
    on_cpu = [result for result in results if not summary.device(result)]
    apart = summary.apart(on_cpu)
    blocks: list[Block] = []
    if apart is not None:
        used = {id(row.result): row.result for row in summary.known_intervals(on_cpu)}
        blocks += [Text(f"{APART} Measured on {_places(list(used.values()))}."), apart]
        blocks += [Text(sentence) for sentence in [_reading(on_cpu)] if sentence]
    main, beside = report.losses(results)
    clear = [row for row in main if row[2].high < row[3].low]
    meeting = [row for row in main if row not in clear]
    blocks += [Text("Where another engine is better than lightck:")]
    nowhere = "Nowhere by more than the intervals." if meeting else "Nowhere among these rows."
    blocks += [Bullets([_loss(row) for row in clear]) if clear else Text(nowhere)]
    if meeting:
        words = "; ".join(_in_short(row) for row in meeting)
        blocks += [Text(f"Where another is better by the value and the intervals meet: {words}.")]
    more = f"Another is better in {report.beside_in_short(beside)}. " if beside else ""
    targets = report.counts(results) or "none"
    return [*blocks, Text(f"{more}Targets: {targets}. All of them, and every loss: {_ALL}.")]


APART = (
    "Steps from one snapshot to the next at which snapshots cost at most 1 % of the training, with"
    " the 95 % interval in brackets; less is better."
)
_ALL = "[docs/benchmarks.md](docs/benchmarks.md)"


def _places(results: Sequence[Result]) -> str:
    """The machines of some results, without their commits."""
    letters = origin.letters(results)
    return "; ".join(f"{each} ({at})" if at else each for each, at in letters.items())


def _reading(results: Sequence[Result]) -> str:
    """Say what the intervals of that table tell."""
    rows = summary.known_intervals(results)
    ours = {r.name: found for r in rows if (found := r.of(r.ours or "", summary.WITHIN_1))}
    nearest = {
        row.name: min(lows) / ours[row.name].high
        for row in rows
        if row.name in ours
        if (lows := [other.low for p in row.peers if (other := row.of(p, summary.WITHIN_1))])
    }
    by_value = [name for name, found in ours.items() if found.value <= 1]
    shown = [name for name, found in ours.items() if found.high <= 1]
    text = "A snapshot at every step costs lightck at most 1 %"
    text += f" by the value for {_named(by_value)}, by the whole interval for {_named(shown)}."
    meeting = [name for name, factor in nearest.items() if factor <= 1]
    apart = [factor for factor in nearest.values() if factor > 1]
    if meeting:
        text += f" For {_named(meeting)} its interval meets another engine's."
    if apart:
        others = "the other models" if meeting else "all of them"
        text += f" For {others} every other engine needs at least {digits(min(apart))} times as"
        text += " many steps, by the near end of its interval and the far end of lightck's."
    return text if ours else ""


def _named(names: list[str]) -> str:
    return ", ".join(names[:-2] + [" and ".join(names[-2:])]) if names else "none"


def _loss(row: report.Loss) -> str:
    """A sentence on one row that another engine wins."""
    result, model, winner, ours = row
    return (
        f"{_link(result)}, {model}: {heading(winner.measure)} is {cell(winner)} with"
        f" `{_engine(winner, model)}`, {cell(ours)} with lightck."
    )


def _in_short(row: report.Loss) -> str:
    """The same without the intervals, for a list."""
    result, model, winner, ours = row
    return (
        f"`{topics.name_of(result)}`, {model} ({_value(winner)} with `{_engine(winner, model)}`,"
        f" {_value(ours)} with lightck)"
    )


def _engine(found: Record, model: str) -> str:
    return found.engine.removeprefix(f"{model} ")
