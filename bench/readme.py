"""What README says of speed, rendered from the results that are stored in the repository.

`bench/results/` holds one file per definition, as `python -m bench run` wrote it. README's part
stands between two markers and is the same bytes for the same files; a test compares.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import definition, record, report, rivals, summary
from bench.document import Block, Bullets, Heading, Table, Text, markdown
from bench.errors import BenchError
from bench.place import ROOT
from bench.quantity import cell
from bench.record import Result

RESULTS = Path(__file__).parent / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_LINK = "A snapshot every step of {}, two ranks over 1 Gbit/s"
_OVERHEAD = ("extra", "cost_ratio", "overhead", "step")
_ENGINES = {
    "stress": ("A snapshot every step of GPT-2 small", ("extra", "cost_ratio", "step")),
    "peers": ("A snapshot every step of GPT-2 small, whatever else there is", _OVERHEAD),
    "ablation": ("lightck with pieces switched off, GPT-2 small", _OVERHEAD),
    "ddp-link-gpt2": (_LINK.format("GPT-2 small"), ("extra", "cost_ratio", "step")),
    "ddp-link-vgg16": (_LINK.format("VGG-16"), ("extra", "cost_ratio", "step")),
    "restore": ("The state back into live tensors", ("restore", "memcpy", "restore_ratio")),
}
_WORDS = {
    "extra": "training longer by, per snapshot",
    "cost_ratio": "of a plain copy",
    "overhead": "of a step",
    "step": "step without",
    "restore": "restore",
    "memcpy": "plain memcpy",
    "restore_ratio": "ratio",
}


def take(files: Iterable[Path]) -> list[Path]:
    """Store results in the repository, each in place of its definition's former one.

    Raises:
        BenchError: one is no result, or a toy's: then none is stored.
    """
    files = list(files)
    for file in files:
        if record.read(file).about.get("tiny"):
            raise BenchError(f"{file}: made with --tiny, its numbers mean nothing; nothing stored")
    RESULTS.mkdir(exist_ok=True)
    return [Path(shutil.copyfile(file, RESULTS / file.name)) for file in files]


def stored() -> list[Result]:
    """The results in the repository, by name."""
    return [record.read(file) for file in sorted(RESULTS.glob("*.parquet"))]


def render(results: Sequence[Result]) -> str:
    """The text between the markers, markers included."""
    blocks: list[Block] = []
    groups = summary.by_device(results) or {"": []}
    for device, each in groups.items():
        if device or len(groups) > 1:
            blocks.append(Heading(3, f"On {device or 'the CPU'}"))
        missing = [] if device else _missing(each)
        blocks.append(Bullets([*report.origins(each), *missing]))
        if table := summary.models(each):
            blocks += [Text(f"A snapshot every step. {report.MODELS}"), table]
        blocks += report.targets(each)
        for result in each:
            blocks += _engines(result)
    return f"{BEGIN}\n\n{markdown(blocks, {})}\n{END}"


def _missing(results: Sequence[Result]) -> list[str]:
    """A line that says what was not measured, or none."""
    there = {result.about["definition"]["name"] for result in results}
    missing = [f"`{name}`" for name in definition.names() if name not in there]
    return [f"not measured yet: {', '.join(missing)}"] if missing else []


def _engines(result: Result) -> list[Block]:
    name = result.about["definition"]["name"]
    if name not in _ENGINES:
        return []
    title, measures = _ENGINES[name]
    rows = []
    for contenders in rivals.by_model(result.about["definition"]).values():
        for label in rivals.best_first(result, [each["label"] for each in contenders]):
            rows.append([label, *(cell(result.of(label, each)) for each in measures)])
    return [Text(f"{title} (`{name}`):"), Table(["", *(_WORDS[m] for m in measures)], rows)]


def replaced(document: str, text: str) -> str:
    """The document with what stands between the markers replaced.

    Raises:
        BenchError: the markers are not there.
    """
    head, _, rest = document.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise BenchError(f"{README}: no {BEGIN} ... {END} in it: put the markers back")
    return head + text + tail
