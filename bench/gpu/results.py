"""Keep what parts have found: in a Parquet file per definition, a report, and the repository."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from bench import document, machine, quantity, record, report, rivals
from bench.definition import Definition
from bench.errors import BenchError
from bench.gpu import tree
from bench.place import ROOT
from bench.record import Record, Result

STORED = ROOT / "bench" / "results" / "gpu"
PAGE = ROOT / "docs" / "gpu-check.md"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
_NOTHING = "Nothing has been measured on a GPU yet."
_MEASURES = {
    "device_rate": ("to_region", "captured", "plain", "region_ratio", "captured_ratio"),
    "device_fence": ("fence_idle", "fence_bare", "fence", "idle_hooks", "step"),
    "device_restore": ("restore", "plain", "restore_share"),
    "device_training": ("overhead", "interval", "extra", "cost_ratio", "alone", "step", "plain"),
}


@cache
def machine_of(device: str) -> dict[str, Any]:
    """Describe this machine and its GPU."""
    found = machine.machine()
    if device != "cpu":
        import torch

        about = torch.cuda.get_device_properties(device)
        found["gpu"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda
        found["driver"] = _asked("driver_version")
        found["pcie"] = f"{_asked('pcie.link.gen.max')} x{_asked('pcie.link.width.max')}"
    return found


def _asked(what: str) -> str:
    """Return one answer of nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def add(
    out: Path,
    whole: Definition,
    outcome: Mapping[str, Any],
    failed: Mapping[str, str],
    about: Mapping[str, Any],
) -> Path | None:
    """Add a part's records to its definition's file, beside those of other parts.

    Records of other sources, another machine or another device cannot stay beside them: they are
    dropped.
    """
    path = out / f"{whole.name}.parquet"
    before = record.read(path) if path.exists() else None
    versions = outcome["versions"]
    if not versions and before is not None:  # it ended before it could tell
        versions = before.about["versions"]
    told: dict[str, Any] = {"versions": versions, "definition": whole.as_json(), **about}
    told = json.loads(json.dumps(told))  # in the form in which they are read back
    kept: list[Record] = []
    absent: dict[str, str] = {}
    if before is not None and all(before.about.get(key) == told[key] for key in told):
        kept, absent = before.records, before.about["absent"]
    new = [Record(**each) for each in outcome["records"]]
    again = {each.engine for each in new} | failed.keys()
    records = [*(each for each in kept if each.engine not in again), *new]
    absent = {k: v for k, v in absent.items() if k not in again} | dict(failed)
    if not records:
        return None
    started = datetime.now(UTC).isoformat(timespec="seconds")
    full = {**told, "absent": absent, "started": started, "seconds": 0, "load": machine.load()}
    order = {contender.label: i for i, contender in enumerate(whole.contenders)}
    records.sort(key=lambda each: order[each.engine])
    record.write(Result({**full, "command": "make gpu-check"}, records), path)
    return path


def found_in(folder: Path) -> list[Result]:
    """Return the results in a folder, by name."""
    return [record.read(file) for file in sorted(folder.glob("gpu-*.parquet"))]


def render(out: Path, kept: Mapping[str, Any]) -> str:
    """Return the report of a run: its parts, then what they found."""
    rows = [
        [p["part"], p["state"], f"{p['seconds']:.0f} s", _line(p["why"])] for p in kept["parts"]
    ]
    parts = document.markdown([document.Table(["part", "", "took", ""], rows)], {})
    return f"# make gpu-check on {kept['device']}\n\n{parts}\n{tables(found_in(out)).rstrip()}\n"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def tables(results: Sequence[Result]) -> str:
    """Return machine, targets and every engine's results; the same bytes for the same results."""
    if not results:
        return _NOTHING
    blocks: list[document.Block] = [*_toys(results), _origin(results)]
    blocks += [document.Text("Where another engine is better than lightck:"), report.lost(results)]
    blocks += report.targets(results)
    for result in results:
        kind = result.about["definition"]["kind"]
        for model, contenders in rivals.by_model(result.about["definition"]).items():
            rows = [_row(result, each["label"], _MEASURES[kind]) for each in contenders]
            shown = [row for row in rows if any(row[1:])]
            if shown:
                name = result.about["definition"]["name"]
                blocks.append(document.Text(f"`{name}`, {model}:"))
                blocks.append(document.Table(["", *_MEASURES[kind], "how"], shown))
    return document.markdown(blocks, {})


def _toys(results: Sequence[Result]) -> list[document.Block]:
    toys = any(result.about["tiny"] for result in results)
    return [document.Text("**Made with toys on a CPU: the numbers mean nothing.**")] if toys else []


def _row(result: Result, label: str, measures: Sequence[str]) -> list[str | document.Cell]:
    records = [result.of(label, measure) for measure in measures]
    notes = [each.note for each in records if each is not None and each.note]
    why = result.about["absent"].get(label, "")
    how = notes[-1] if notes else ""
    return [label, *map(quantity.cell, records), _line(why.strip().rpartition("\n")[2] or how)]


def _origin(results: Sequence[Result]) -> document.Bullets:
    lines: dict[str, list[str]] = {}
    for result in results:
        about, where = result.about, result.about["machine"]
        versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
        gpu = ", ".join(f"{k} {where[k]}" for k in ("gpu", "cuda", "driver", "pcie") if k in where)
        text = (
            f"{gpu or 'no GPU'}; {where['cpu']}, {where['cores']} cores,"
            f" {where['memory_bytes'] / 2**30:.0f} GiB, Linux {where['kernel']}; {versions};"
            f" {about['commit']}, {about['started'][:10]}"
        )
        lines.setdefault(text, []).append(f"`{about['definition']['name']}`")
    return document.Bullets([f"{', '.join(names)}: {text}" for text, names in lines.items()])


def take(folder: Path) -> list[Path]:
    """Store a run's results in the repository, and show them on the page.

    A copy without its repository has stored its sources' digest. That must be the digest of the
    commit here, else the results are of something else.

    Raises:
        BenchError: there are no results, they are of tiny models, or of other sources.
    """
    results = found_in(folder)
    if not results:
        raise BenchError(f"{folder}: no gpu-*.parquet in it")
    taken = []
    for result in results:
        name, commit = result.about["definition"]["name"], result.about["commit"]
        if result.about["tiny"]:
            raise BenchError(f"{name}: made with toys, its numbers mean nothing; nothing stored")
        if commit.startswith("tree-"):
            if commit != tree.digest():
                raise BenchError(
                    f"{name}: measured with {commit}, here is {tree.digest()}: check out what was"
                    " sent to the machine; nothing stored"
                )
            commit = machine.commit()
        taken.append(Result({**result.about, "commit": commit}, result.records))
    STORED.mkdir(parents=True, exist_ok=True)
    files = [STORED / f"{result.about['definition']['name']}.parquet" for result in taken]
    for result, file in zip(taken, files, strict=True):
        record.write(result, file)
    PAGE.write_text(shown(PAGE.read_text()))
    return files


def shown(page: str) -> str:
    """Return the page with the stored results between its markers.

    Raises:
        BenchError: the markers are missing.
    """
    head, _, rest = page.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise BenchError(f"{PAGE}: no {BEGIN} ... {END} in it: put the markers back")
    return f"{head}{BEGIN}\n\n{tables(found_in(STORED))}\n\n{END}{tail}"
