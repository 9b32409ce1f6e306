"""What README says of speed, rendered from the results that are stored in the repository.

`bench/results/` holds one file per definition, as `python -m bench run` wrote it. README's part
stands between two markers and is the same bytes for the same files; a test compares.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import definition, record, report, rivals
from bench.errors import BenchError
from bench.place import ROOT
from bench.record import Result

RESULTS = Path(__file__).parent / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_LINK = "A snapshot every step of {}, two ranks over 1 Gbit/s"
_OVERHEAD = ("extra", "cost_ratio", "overhead", "step")
_ENGINES = {
    "stress": ("A snapshot every step of GPT-2 small", ("extra", "cost_ratio", "step")),
    "essential": ("A snapshot every step of the seed table's models", _OVERHEAD),
    "essential-bert": ("A snapshot every step of BERT-large, 4.0 GB", _OVERHEAD),
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
    parts = [BEGIN, _origins(results), report.targets(results)]
    for result in results:
        if result.about["definition"]["name"] in _ENGINES:
            parts.append(_engines(result))
    return "\n\n".join([*parts, END])


def _origins(results: Sequence[Result]) -> str:
    """On what machine, in which versions, a line per combination; and what is missing."""
    names: dict[str, list[str]] = {}
    for result in results:
        about, machine = result.about, result.about["machine"]
        torch = about["versions"]["torch"]
        memory = machine["memory_bytes"] / 2**30
        where = (
            f"{machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB, Linux"
            f" {machine['kernel']}; Python {about['versions']['python']}, torch {torch}; commit"
            f" {about['commit']}, {about['started'][:10]}"
        )
        names.setdefault(where, []).append(f"`{about['definition']['name']}`")
    lines = [f"- {', '.join(each)}: {where}" for where, each in names.items()]
    there = {result.about["definition"]["name"] for result in results}
    if missing := [f"`{name}`" for name in definition.names() if name not in there]:
        lines.append(f"- not measured yet: {', '.join(missing)}")
    return "\n".join(lines)


def _engines(result: Result) -> str:
    name = result.about["definition"]["name"]
    title, measures = _ENGINES[name]
    rows = []
    for contenders in rivals.by_model(result.about["definition"]).values():
        for label in rivals.best_first(result, [each["label"] for each in contenders]):
            cells = [report.cell(result.of(label, each)) for each in measures]
            rows.append([label, *cells])
    return f"{title} (`{name}`):\n\n" + report.table(["", *(_WORDS[m] for m in measures)], rows)


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
