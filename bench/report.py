"""Render the report of result files: losses first, then targets, misses first, then every row.

Nothing is measured, looked up or typed by hand here: all of it comes from the files, and the same
files give the same bytes. Each accelerator has a report of its own, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import engines, origin, rivals, summary
from bench.document import Block, Bullets, Cell, Chart, Heading, Table, Text, markdown
from bench.errors import BenchError
from bench.quantity import bounds, cell, digits, heading, quantity
from bench.record import Record, Result
from bench.verdict import ABSENT, MISSED, Verdict, verdicts

_MAIN = {
    "training": ("extra", "extra_run", "cost_ratio", "overhead", "step", "sync_copy"),
    "idle": ("idle_hooks", "idle_seconds", "step"),
    "native": ("write", "nt_copy", "memcpy", "write_ratio"),
    "restore": ("restore", "call", "memcpy", "restore_ratio"),
    "commit": ("commit", "seal", "boundary"),
    "memory": ("extra_dram",),
    "trace": ("trace_overhead", "trace_cpu", "trace_wall", "step", "copies", "thin_copies"),
    "jit": ("jit", "sync_copy", "jit_ratio"),
    "busy": (
        *("lost", "stall", "stall_p99", "stall_most"),
        *("stall_ratio", "stall_p99_ratio", "copy_p99_ratio"),
    ),
    "recovery": (
        *("recovery", "detected", "saved", "ended", "restart", "first_step", "saved_ratio"),
        "sync_copy",
    ),
    "in_place": (
        *("pause_s", "kill_s", "again_s", "noticed_s", "setup_s", "beyond_s", "step_s"),
        *("moved", "kept_bytes", "cost_s", "cost_cpu_s"),
    ),
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
_TINY = "**Made with `--tiny`: this shows that the benchmarks run. The numbers mean nothing.**"
_COUNTS = ("state", "snapshots", "tensors")
_STALL = "stall."


def render(results: Sequence[Result], charts: Mapping[str, str]) -> str:
    """Return the whole report in Markdown.

    Args:
        results: in the order in which they shall appear.
        charts: names of charts to files, relative to the report.
    """
    return markdown(document(results), charts)


def document(results: Sequence[Result]) -> list[Block]:
    """Return the whole report as blocks.

    Raises:
        BenchError: there are two results of the same definition, on the same accelerator.
    """
    blocks: list[Block] = []
    for device, each in summary.by_device(results).items():
        blocks += _head(results, device, each)
        for result in each:
            blocks += section(result, device)
    return blocks


def overview(results: Sequence[Result]) -> list[Block]:
    """The same without the benchmarks' own sections.

    Raises:
        BenchError: two results of the same definition, on the same accelerator.
    """
    groups = summary.by_device(results).items()
    return [block for device, each in groups for block in _head(results, device, each)]


def _head(results: Sequence[Result], device: str, each: Sequence[Result]) -> list[Block]:
    names = [result.about["definition"]["name"] for result in each]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"two results of `{name}`: a report has one of each, choose")
    several = device or len(summary.by_device(results)) > 1
    where = f", on {device or 'the CPU'}" if several else ""
    return [Heading(1, f"Benchmarks of lightck{where}"), *_overview(each, device)]


def chart(device: str, name: str) -> str:
    """Return a chart's name, which differs for every accelerator."""
    words = "".join(c if c.isalnum() else "-" for c in f"{device} {name}" if c.isascii())
    return words.strip("-").lower()


def _overview(results: Sequence[Result], device: str) -> list[Block]:
    blocks: list[Block] = []
    if any(result.about.get("tiny") for result in results):
        blocks.append(Text(_TINY))
    blocks += [Heading(2, "Where another engine wins"), lost(results)]
    if table := summary.models(results):
        blocks += [Heading(2, "Models"), Text(MODELS)]
        blocks += [Chart(chart(device, "all-models"), "Extra time per snapshot"), table]
    if table := summary.overheads(results):
        blocks += [Heading(2, "Models, larger batches"), Text(LARGER), table]
    blocks += [Heading(2, "Targets"), *targets(results)]
    if table := summary.intervals(results):
        blocks += [Heading(2, "Smallest interval"), Text(INTERVAL), table]
    blocks += [Heading(2, "Where it was measured"), Bullets(origin.origins(results))]
    return blocks


MODELS = (
    "What a snapshot adds to the training. In parentheses: at least how many times lightck's that"
    " is, the near end of one interval by the far end of the other. `easy`: there a plain copy of"
    " the state costs less than a twentieth of a step."
)
LARGER = (
    "A snapshot every step at batches of the seed's, all divided by the same number: what it makes"
    " a step longer by, beside what that is of a plain copy of the state. `none`: the same without"
    " any snapshot, which is what the method is wrong by."
)
_PIECES = (
    "Against lightck with its defaults: what a piece switched off, or something in its place, makes"
    " a snapshot cost more. In brackets the worst ends paired; in parentheses, how many times at"
    " least."
)
INTERVAL = (
    "Steps from one snapshot to the next at which they cost at most so much of the training, by the"
    " far ends of the intervals; from the cost of single snapshots, where that was measured."
)


def _origin(result: Result) -> Text:
    about = result.about
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    return Text(
        f"`{about['command']}` on {origin.host(result)}: commit {about['commit']},"
        f" {about['started']}, {about['seconds']} s, load {about['load'][0]} at the start;"
        f" {versions}."
    )


def counts(results: Sequence[Result]) -> str:
    """How many targets are missed, not shown, not available and met."""
    found = [verdict.state for verdict in verdicts(results)]
    return ", ".join(f"{found.count(state)} {state}" for state in dict.fromkeys(found))


def targets(results: Sequence[Result]) -> list[Block]:
    """All targets of the results, misses first, with what was found."""
    found = verdicts(results)
    if not found:
        return [Text("None.")]
    by_name = {result.about["definition"]["name"]: result for result in results}
    rows = [
        [*_target_row(verdict, result), named(result, results)]
        for verdict in found
        for result in [by_name[verdict.definition]]
    ]
    return [Text(f"{counts(results)}."), Table(["", "target", "bound", "found", "benchmark"], rows)]


def named(result: Result, results: Sequence[Result]) -> str:
    """Return a benchmark's name, with its machine's letter where they ran on several."""
    return f"`{result.about['definition']['name']}`{origin.mark(result, results)}"


def lost(results: Sequence[Result]) -> Block:
    """List every row in which another engine is better than lightck; or say that there is none.

    First come the rows by what the benchmark is about, then those by what is counted beside it.
    """
    main, beside = losses(results)
    return _losses([*main, *beside], results) if main or beside else Text(_NOWHERE)


def beside_in_short(beside: Sequence[Loss]) -> str:
    """How many rows are lost by what is counted beside, and by which of it."""
    words = [heading(ours.measure) for _, _, _, ours in beside]
    found = ", ".join(f"{words.count(word)} in {word}" for word in dict.fromkeys(words))
    return f"{len(beside)} more by what is counted beside it: {found}"


_NOWHERE = "Nowhere among these rows."
Loss = tuple[Result, str, Record, Record]


def losses(results: Sequence[Result]) -> tuple[list[Loss], list[Loss]]:
    """The rows in which something else is better: by what benchmarks are about, and by the rest."""
    main: list[Loss] = []
    beside: list[Loss] = []
    for result in results:
        aside = rivals.BESIDE.get(result.about["definition"]["kind"], ())
        for model, winner, ours in rivals.lost(result):
            (beside if ours.measure in aside else main).append((result, model, winner, ours))
    return main, beside


def _losses(found: Sequence[Loss], results: Sequence[Result]) -> Table:
    rows: list[list[str | Cell]] = []
    for result, model, winner, ours in found:
        noise = "the intervals meet" if winner.high >= ours.low else ""
        rows.append([named(result, results), model, heading(winner.measure)])
        rows[-1] += [winner.engine, cell(winner), ours.engine, cell(ours), noise]
    return Table(["benchmark", "model", "measure", "best", "", "lightck", "", ""], rows)


def _target_row(verdict: Verdict, result: Result) -> list[str | Cell]:
    target = verdict.target
    mark = f"**{verdict.state}**" if verdict.state == MISSED else verdict.state
    if verdict.found is None:
        text = verdict.why
    else:
        low, high = verdict.found.low, verdict.found.high
        unit, measure = verdict.unit, "" if target.against else target.measure
        text = quantity(verdict.found.value, unit, measure)
        if low != high:
            text += f" {bounds(low, high, unit, measure)}"
        if measure == "overhead" and (cost := result.of(target.engine, "cost_ratio")):
            text += f" at a cost ratio of {cell(cost)}"
        if measure == "overhead" and rivals.easy(result, target.engine):
            text += ", an easy row"
        text += f", {verdict.why}" if verdict.why else ""
        text += ", cut short by the cap" if verdict.capped else ""
    return [mark, target.row, _bound(verdict), text]


def _bound(verdict: Verdict) -> str | Cell:
    target = verdict.target
    if target.bound is None or verdict.state == ABSENT:
        return ""
    unit, measure = verdict.unit, "" if target.against else target.measure
    sign = "<=" if target.at_most is not None else ">="
    return Cell(f"{sign} {quantity(target.bound, unit, measure)}", target.bound)


def section(result: Result, device: str) -> list[Block]:
    """Every row of one benchmark."""
    definition = result.about["definition"]
    name = definition["name"]
    blocks: list[Block] = [
        Heading(2, name, folded=True),
        Text(definition["about"]),
        Text(_how(definition)),
        _origin(result),
    ]
    labels: list[str] = []
    groups = rivals.by_model(definition)
    for model, contenders in groups.items():
        if len(groups) > 1:
            work = {**definition["work"], **contenders[0]["work"]}
            title = f"{model}, {work['optimizer']}, batch {summary.batch(work)}"
            blocks.append(Heading(3, title))
        found = rivals.best_first(result, [contender["label"] for contender in contenders])
        blocks.append(_main(result, found))
        labels += found
    if text := _disagreeing(result, labels):
        blocks.append(Text(text))
    blocks.append(Chart(chart(device, name), name))
    if table := summary.pieces(result):
        blocks += [Text(_PIECES), table]
    blocks += _beside(result, labels)
    for more, title in (("state", "by state size"), ("tensors", "by number of tensors")):
        blocks.append(Chart(chart(device, f"{name}-{more}"), f"{name} {title}"))
    blocks += _stalls(result, labels)
    blocks.append(Chart(chart(device, f"{name}-stalls"), f"{name}: where training waits"))
    used = {c["engine"]: engines.KINDS.get(c["engine"]) for c in definition["contenders"]}
    return [*blocks, Bullets([f"{key}: {kind.about}" for key, kind in used.items() if kind])]


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
        " an engine has its own. In brackets: 95 % interval of the 20 % trimmed mean."
    )


def _main(result: Result, labels: Sequence[str]) -> Table:
    kind = result.about["definition"]["kind"]
    share = ["copy / step"] if kind in rivals.SHARING else []
    measures = [
        measure
        for measure in _MAIN.get(kind) or _measures(result, labels)
        if any(result.of(label, measure) for label in labels)
    ]
    rows: list[list[str | Cell]] = []
    for label in labels:
        records = [result.of(label, measure) for measure in measures]
        first = next((record for record in records if record is not None), None)
        samples = "" if first is None else f"{len(first.samples) or 1}{', capped' * first.capped}"
        note = _absent(result, label) if first is None else first.note
        shares = [_copy_share(result, label)] if share else []
        rows.append([label, *map(cell, records), *shares, samples, note])
    return Table(["engine", *map(heading, measures), *share, "samples", "verified"], rows)


def _disagreeing(result: Result, labels: Sequence[str]) -> str:
    """Name the engines whose extra time is another one by the second clock; empty: there is none.

    Either neighbours were on the machine, or the engine's own threads had the training's processor.
    """
    found = []
    for label in labels:
        wall, run = result.of(label, "extra"), result.of(label, "extra_run")
        if wall is not None and run is not None and (wall.low > run.high or run.low > wall.high):
            found.append(label)
    if not found:
        return ""
    return (
        f"The two estimates of the extra time disagree for {', '.join(found)}: the training thread"
        " had to wait for its processor more often with snapshots, or less often, than without:"
        " neighbours on the machine, or the engine's own threads."
    )


def _measures(result: Result, labels: Sequence[str]) -> list[str]:
    """Return what was measured besides stalls and counts, in the order of the records."""
    found = (r.measure for r in result.records if r.engine in labels)
    return [m for m in dict.fromkeys(found) if not m.startswith(_STALL) and m not in _COUNTS]


def _beside(result: Result, labels: Sequence[str]) -> list[Block]:
    """Return what else was counted of each engine: processor, memory, bytes, intervals."""
    main = _MAIN.get(result.about["definition"]["kind"])
    more = [m for m in _measures(result, labels) if main and m not in main]
    rows = [[label, *(cell(result.of(label, m)) for m in more)] for label in labels]
    rows = [row for row in rows if any(row[1:])]
    return [Text("Beside it:"), Table(["engine", *map(heading, more)], rows)] if more else []


def _absent(result: Result, label: str) -> str:
    """Say why there is nothing of an engine, on one line of a table."""
    absent, slipped = (result.about.get(kind, {}).get(label) for kind in ("absent", "slipped"))
    why = f"cannot run here: {absent}" if absent else slipped or ""
    return " ".join(why.split()).replace("|", "/")


def _copy_share(result: Result, label: str) -> str | Cell:
    """Return which share of a step a copy of the state would cost if training waited for it."""
    share = rivals.copy_share(result, label)
    if share is None:
        return ""
    return Cell(f"{digits(100 * share)} %" + (", easy" if share < rivals.EASY else ""), share)


def stalls(result: Result, label: str) -> list[Record]:
    """Return the records of what training waited for in an engine, by cause."""
    return [r for r in result.records if r.engine == label and r.measure.startswith(_STALL)]


def _stalls(result: Result, labels: Sequence[str]) -> list[Block]:
    rows = [
        [record.engine, record.measure.removeprefix(_STALL), cell(record)]
        for label in labels
        for record in stalls(result, label)
    ]
    if not rows:
        return []
    title = "Training-thread time per snapshot inside the engine:"
    return [Text(title), Table(["engine", "cause", "time"], rows)]
