"""Markdown from result files: targets first, misses at the top; the same bytes for the same files.

Nothing is measured, looked up or typed by hand here: all of it comes from the files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bench import engines, rivals
from bench.record import Record, Result
from bench.verdict import ABSENT, MISSED, Verdict, verdicts

_UNITS = {"B": ("B", 1000), "B/s": ("B/s", 1000)}
_MAIN = {
    "training": ("extra", "cost_ratio", "overhead", "step", "sync_copy"),
    "idle": ("idle_hooks", "idle_seconds", "step"),
    "native": ("write", "nt_copy", "memcpy", "write_ratio"),
    "restore": ("restore", "call", "memcpy", "restore_ratio"),
    "commit": ("commit", "seal", "boundary"),
    "memory": ("extra_dram",),
    "trace": ("trace_overhead", "trace_cpu", "trace_wall", "step", "copies", "thin_copies"),
    "jit": ("jit", "sync_copy", "jit_ratio"),
    "recovery": ("recovery", "detected", "saved", "ended", "restart", "first_step"),
    "restart": (
        *("restart_s", "start_s", "restore_s", "first_step_s", "lost_steps", "lost_work_s"),
        "interval_steps",
    ),
    "ranks": (
        *("extra", "cost_ratio", "cost_ratio_alone", "overhead", "step", "compute", "sync_copy"),
        "written_share",
    ),
    "commit_ranks": ("commit", "seal", "tensors"),
    "restore_ranks": ("restore", "state"),
}
_SHARES = ("overhead", "idle_hooks", "fence_idle", "fence_bare", "trace_overhead", "written_share")


def render(results: Sequence[Result], charts: dict[str, str]) -> str:
    """The whole report.

    Args:
        results: in the order in which they shall appear.
        charts: definition to the chart's file name, relative to the report.
    """
    parts = ["# Benchmarks of lightck", _origin(results)]
    parts += ["## Where another engine wins", lost(results), "## Targets", targets(results)]
    for result in results:
        parts += _section(result, charts)
    return "\n\n".join(parts) + "\n"


def _origin(results: Sequence[Result]) -> str:
    lines = []
    if any(result.about.get("tiny") for result in results):
        lines += [
            "**Made with `--tiny`: this shows that the benchmarks run. The numbers mean nothing.**",
            "",
        ]
    for result in results:
        about, machine = result.about, result.about["machine"]
        versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
        memory = machine["memory_bytes"] / 2**30
        lines.append(
            f"- `{about['definition']['name']}`: commit {about['commit']}, {about['started']},"
            f" {about['seconds']} s, load {about['load'][0]} at the start; {machine['cpu']},"
            f" {machine['cores']} cores, {memory:.0f} GiB, Linux {machine['kernel']}; {versions};"
            f" `{about['command']}`"
        )
    return "\n".join(lines)


def targets(results: Sequence[Result]) -> str:
    """All targets of the results, misses first, with what was found."""
    found = verdicts(results)
    states = list(dict.fromkeys(verdict.state for verdict in found))
    counts = ", ".join(f"{sum(v.state == s for v in found)} {s}" for s in states)
    by_name = {result.about["definition"]["name"]: result for result in results}
    rows = [_target_row(verdict, by_name[verdict.definition]) for verdict in found]
    return f"{counts}.\n\n" + table(["", "target", "bound", "found", "benchmark"], rows)


def lost(results: Sequence[Result]) -> str:
    """Every row in which something else is better than lightck; or that there is none."""
    rows = []
    for result in results:
        definition = result.about["definition"]
        for model, winner, ours in rivals.lost(result):
            noise = "the intervals meet" if winner.high >= ours.low else ""
            where = [f"`{definition['name']}`", model, winner.measure]
            who = [winner.engine, cell(winner), ours.engine, cell(ours), noise]
            rows.append([*where, *who])
    if not rows:
        return "Nowhere among these rows."
    return table(["benchmark", "model", "measure", "best", "", "lightck", "", ""], rows)


def _target_row(verdict: Verdict, result: Result) -> list[str]:
    target = verdict.target
    mark = f"**{verdict.state}**" if verdict.state == MISSED else verdict.state
    if verdict.found is None:
        text = verdict.why
    else:
        low, high = verdict.found.low, verdict.found.high
        unit, measure = verdict.unit, "" if target.against else target.measure
        text = _quantity(verdict.found.value, unit, measure)
        if low != high:
            text += f" [{_quantity(low, unit, measure)}, {_quantity(high, unit, measure)}]"
        if measure == "overhead" and (cost := result.of(target.engine, "cost_ratio")):
            text += f" at a cost ratio of {cell(cost)}"
        if measure == "overhead" and rivals.easy(result, target.engine):
            text += ", an easy row"
        text += f", {verdict.why}" if verdict.why else ""
        text += ", cut short by the cap" if verdict.capped else ""
    return [mark, target.row, _bound(verdict), text, f"`{verdict.definition}`"]


def _bound(verdict: Verdict) -> str:
    target = verdict.target
    if target.bound is None:
        return ""
    unit, measure = verdict.unit, "" if target.against else target.measure
    if verdict.state == ABSENT:
        return ""
    sign = "<=" if target.at_most is not None else ">="
    return f"{sign} {_quantity(target.bound, unit, measure)}"


def _section(result: Result, charts: dict[str, str]) -> list[str]:
    definition = result.about["definition"]
    name, kind = definition["name"], definition["kind"]
    parts = [f"## {name}", definition["about"], _how(definition)]
    labels = []
    groups = rivals.by_model(definition)
    for model, contenders in groups.items():
        if len(groups) > 1:
            work = {**definition["work"], **contenders[0]["work"]}
            parts.append(f"### {model}, {work['optimizer']}, batch {work['batch']}")
        found = rivals.best_first(result, [contender["label"] for contender in contenders])
        share = ["copy / step"] if kind in rivals.SHARING else []
        rows = [_row(result, label, kind) for label in found]
        parts.append(table(["engine", *_MAIN[kind], *share, "samples", "verified"], rows))
        labels += found
    if name in charts:
        parts.append(f"![{name}]({charts[name]})")
    stalls = _stalls(result, labels)
    if stalls:
        parts.append(stalls)
    about = {c["engine"]: engines.KINDS[c["engine"]].about for c in definition["contenders"]}
    parts.append("\n".join(f"- {name}: {text}" for name, text in about.items()))
    return [part for part in parts if part]


def _how(definition: dict[str, Any]) -> str:
    work, method = definition["work"], definition["method"]
    count = f"{method['least']} samples"
    if definition["kind"] in ("training", "ranks"):
        most, seconds = method["most"], method["seconds"]
        count = f"{method['policy']}, {method['least']} to {most} samples or {seconds:g} s"
    ranks = ""
    if work.get("world", 1) > 1:
        link = f"{work['link']:,} Mbit/s each way" if work["link"] else "loopback"
        ranks = f" on each of {work['world']} ranks (DDP, gloo, {link})"
    elif work.get("forks", 0):
        ranks = f" on each of {work['forks']} ranks (DDP, gloo, loopback)"
    return (
        f"{work['model']}, {work['optimizer']}, batch {work['batch']} x {work['sequence']}{ranks};"
        f" {definition['threads']} threads, OMP_WAIT_POLICY {definition['wait']}; {count}, unless"
        " an engine has its own. In brackets: 95 % bootstrap interval of the 20 % trimmed mean."
    )


def _row(result: Result, label: str, kind: str) -> list[str]:
    records = [result.of(label, measure) for measure in _MAIN[kind]]
    first = records[0]
    samples = "" if first is None else f"{len(first.samples) or 1}{', capped' * first.capped}"
    note = _absent(result, label) if first is None else first.note
    share = [_copy_share(result, label)] if kind in rivals.SHARING else []
    return [label, *map(cell, records), *share, samples, note]


def _absent(result: Result, label: str) -> str:
    """Why there is nothing of an engine, on one line of a table."""
    why = result.about.get("absent", {}).get(label)
    return "" if why is None else f"cannot run here: {' '.join(why.split()).replace('|', '/')}"


def _copy_share(result: Result, label: str) -> str:
    """What a copy of the state would cost of a step, if training waited for it."""
    share = rivals.copy_share(result, label)
    if share is None:
        return ""
    return f"{_digits(100 * share)} %" + (", easy" if share < rivals.EASY else "")


def cell(record: Record | None) -> str:
    """A value with its interval; nothing where nothing was measured."""
    if record is None:
        return ""
    text = _quantity(record.value, record.unit, record.measure)
    if record.low == record.high:
        return text
    low, high = (_quantity(x, record.unit, record.measure) for x in (record.low, record.high))
    return f"{text} [{low}, {high}]"


def _stalls(result: Result, labels: Sequence[str]) -> str:
    rows = [
        [record.engine, record.measure.removeprefix("stall."), cell(record)]
        for label in labels
        for record in result.records
        if record.engine == label and record.measure.startswith("stall.")
    ]
    if not rows:
        return ""
    title = "Training-thread time per snapshot, as the engine counts it:\n\n"
    return title + table(["engine", "cause", "time"], rows)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _quantity(value: float, unit: str, measure: str) -> str:
    """Three significant digits with a unit that suits; shares in percent."""
    if math.isnan(value):
        return "unknown"
    if not math.isfinite(value):
        return "unbounded" if value > 0 else "-unbounded"
    if measure in _SHARES:
        return f"{_digits(100 * value)} %"
    if unit == "s":
        for name, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if abs(value) >= size or name == "us":
                return f"{_digits(value / size)} {name}"
    if unit in _UNITS:
        base, step = _UNITS[unit]
        power = 0
        while abs(value) >= step and power < 4:
            value, power = value / step, power + 1
        return f"{_digits(value)} {['', 'k', 'M', 'G', 'T'][power]}{base}"
    return _digits(value)


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
