"""Render what the documents say of speed from the results that are stored in the repository.

`bench/results/` holds one file per definition, as `python -m bench run` wrote it. README's part, a
summary, stands between two markers; `docs/bench.md` is the whole report. Both are the same bytes
for the same files; a test compares.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import definition, origin, record, report, summary
from bench.document import Block, Bullets, Heading, Text, markdown
from bench.errors import BenchError
from bench.place import ROOT
from bench.record import Result
from bench.verdict import MET

RESULTS = Path(__file__).parent / "results"
README = ROOT / "README.md"
TABLES = ROOT / "docs" / "bench.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_MADE = "<!-- Made by `make bench-record` from bench/results; README has the summary. -->"
_LEFT_OUT = "What is met, and every row of every benchmark: [docs/bench.md](docs/bench.md)."


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


def tables(results: Sequence[Result]) -> str:
    """Return the whole report, without charts."""
    return f"{_MADE}\n\n{report.render(results, {})}"


def render(results: Sequence[Result]) -> str:
    """Return README's summary with its markers.

    It has losses first, and of the targets only the misses.
    """
    blocks: list[Block] = []
    groups = summary.by_device(results) or {"": []}
    for device, each in groups.items():
        if device or len(groups) > 1:
            blocks.append(Heading(3, f"On {device or 'the CPU'}"))
        missing = [] if device else _missing(results)
        blocks += [Bullets([*origin.origins(each), *missing])]
        blocks += [Text("Where another engine is better than lightck:")]
        blocks += report.lost_in_short(each)
        if table := summary.models(each):
            blocks += [Text(f"A snapshot every step. {report.MODELS}"), table]
        if table := summary.overheads(each):
            blocks += [Text(report.LARGER), table]
        if table := summary.intervals(each):
            blocks += [Text(report.INTERVAL), table]
        blocks += report.targets(each, but=MET)
    return f"{BEGIN}\n\n{markdown([*blocks, Text(_LEFT_OUT)], {})}\n{END}"


def _missing(results: Sequence[Result]) -> list[str]:
    """Return a line that says what was not measured, or none."""
    there = {result.about["definition"]["name"] for result in results}
    missing = [f"`{name}`" for name in definition.names() if name not in there]
    return [f"not measured yet: {', '.join(missing)}"] if missing else []


def current(file: Path) -> str:
    """Return a document's present text; empty where it is missing."""
    return file.read_text() if file.exists() else ""


def replaced(document: str, text: str) -> str:
    """Return the document with the text between the markers replaced.

    Raises:
        BenchError: the markers are missing.
    """
    head, _, rest = document.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise BenchError(f"{README}: no {BEGIN} ... {END} in it: put the markers back")
    return head + text + tail
