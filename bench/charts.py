"""Draw charts of result files, where matplotlib is installed.

What was not measured is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bench import report, rivals, summary
from bench.drawing import ENGINES, FAINT, GRID, INK, OTHERS, PARTS, Drawing, made
from bench.quantity import heading, quantity
from bench.record import Record, Result

_MEASURE = {
    "training": "extra",
    "restore": "restore",
    "native": "write_ratio",
    "commit": "commit",
    "ranks": "extra",
    "commit_ranks": "commit",
    "restore_ranks": "restore",
    "memory": "extra_dram",
    "device_training": "extra",
    "device_restore": "restore",
    "device_rate": "region_ratio",
    "device_fence": "fence_idle",
}
_TITLES = {
    "extra": "extra time per snapshot",
    "commit": "commit beyond the copies",
    "write_ratio": "write rate / best non-temporal copy",
}
_NEAR_S = 1e-3  # the axis of seconds is linear below it, because noise goes below zero
_KEYS = 5
"""The number of keys in one line of a legend."""
_STACKS = {
    "recovery": ("detected", "saved", "ended", "restart"),
    "restart": ("start_s", "restore_s", "first_step_s"),
}
_FROM = {
    "recovery": "from the failure to training again, but for the start of processes",
    "restart": "from the start of a process to the end of its first step",
}


def drawn(results: Sequence[Result]) -> dict[str, Drawing]:
    """Draw all charts that the results have data for, by the names that `bench.report` gives them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    found: dict[str, Drawing] = {}
    for device, each in summary.by_device(results).items():
        if compared := summary.compared(each):
            found[report.chart(device, "all-models")] = made(_models, (compared, "extra"))
        for result in each:
            name = result.about["definition"]["name"]
            for suffix, draw, what in _of(result):
                found[report.chart(device, name + suffix)] = made(draw, what)
    return found


def _of(result: Result) -> list[tuple[str, Callable[[Any, Any], None], Any]]:
    """List what can be drawn of one result: the end of its name, the function, and its argument."""
    found: list[tuple[str, Callable[[Any, Any], None], Any]] = []
    kind = result.about["definition"]["kind"]
    measure = _MEASURE.get(kind, "")
    rows = list(summary.rows(result))
    stack = _STACKS.get(kind, ())
    if any(record.measure in stack for record in result.records):
        found.append(("", _recovery, result))
    elif sum(len(_points(row, measure)) > 1 for row in rows) > 1:
        found.append(("", _models, ([row for row in rows if _points(row, measure)], measure)))
    elif any(record.measure == measure for record in result.records):
        found.append(("", _bars, result))
    for over in ("state", "tensors"):
        if lines := _lines(result, measure, over):
            found.append((f"-{over}", _curves, (lines, measure, over)))
    if any(report.stalls(result, label) for row in rows for label in row.labels.values()):
        found.append(("-stalls", _stalls, result))
    return found


# ---- axes ----------------------------------------------------------------------------------------


def _height(axes: Any, rows: int, beside: float = 0.75) -> None:
    axes.figure.set_figheight(beside + 0.27 * rows)


def _seconds(axis: Any, highest: float, lowest: float) -> None:
    """Scale an axis in seconds.

    It is linear for noise about zero, logarithmic above a thousandth of a second.
    """
    near = max(_NEAR_S, 10 ** math.ceil(math.log10(max(-lowest, 1e-9) / 3)))
    top = 10 ** math.ceil(math.log10(max(highest, near) * 1.3))
    scale = getattr(axis.axes, f"set_{axis.axis_name}scale")
    scale("symlog", linthresh=near, linscale=0.6)
    powers = range(round(math.log10(near)), round(math.log10(top)) + 1)
    places = [*([-near] if lowest < -near / 3 else []), 0.0, *(10.0**power for power in powers)]
    axis.set_ticks(places, labels=[_tick(place) for place in places])
    axis.set_ticks([], minor=True)
    axis.set_view_interval(min(-near / 3, 1.2 * lowest), top, ignore=True)
    axis.grid(color=GRID, linewidth=0.7)


def _tick(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size * 0.999:
            return f"{seconds / size:,.0f} {name}"
    return f"{seconds * 1e6:,.0f} us"


def _ends(records: Sequence[Record]) -> tuple[float, float]:
    """Return the lowest and the highest value to show."""
    found = [x for r in records for x in (r.value, r.low, r.high) if math.isfinite(x)]
    return min(found), max(found)


def _whisker(axes: Any, record: Record, y: float, colour: str) -> None:
    if math.isfinite(record.low) and math.isfinite(record.high):
        axes.plot([record.low, record.high], [y, y], color=colour, linewidth=1.4, zorder=2)


def _legend(axes: Any, handles: Sequence[Any]) -> None:
    axes.figure.legend(
        handles=handles, loc="outside upper left", ncols=_KEYS, handletextpad=0.4, handlelength=0.9
    )


def _beside(axes: Any, text: str, x: float, y: float) -> None:
    """Write a value at the end of its bar."""
    style: dict[str, Any] = {
        "textcoords": "offset points",
        "va": "center",
        "color": FAINT,
        "size": 8,
    }
    axes.annotate(text, (x, y), (5, 0), **style)


def _colour(engine: str) -> str:
    return next((c for name, c in ENGINES.items() if engine.startswith(name)), OTHERS)


def _place(engine: str) -> int:
    """Return an engine's position in a legend."""
    found = (i for i, name in enumerate(ENGINES) if engine.startswith(name))
    return next(found, len(ENGINES))


# ---- charts --------------------------------------------------------------------------------------


def _points(row: summary.Row, measure: str) -> list[tuple[str, Record]]:
    found = ((name, row.of(name, measure)) for name in row.labels)
    return [(name, record) for name, record in found if record is not None]


def _models(axes: Any, what: tuple[Sequence[summary.Row], str]) -> None:
    """Draw a line per model, on it a point per engine, the best on the left."""
    from matplotlib.lines import Line2D

    rows, measure = what
    points = [(row, *point) for row in rows for point in _points(row, measure)]
    shown: dict[str, Any] = {}
    places = {name: _place(engine) for row in rows for name, engine in row.engines.items()}
    for row, name, record in points:
        engine, y = row.engines[name], rows.index(row)
        colour = _colour(engine)
        face, size = "none" if engine == "none" else colour, 52 if engine == "lightck" else 34
        _whisker(axes, record, y, colour)
        axes.scatter(record.value, y, s=size, color=face, edgecolor=colour, zorder=3)
        style: dict[str, Any] = {
            "marker": "o",
            "linestyle": "",
            "color": colour,
            "markerfacecolor": face,
        }
        shown.setdefault(name, Line2D([], [], label=name, **style))
    for y in range(len(rows)):
        axes.axhline(y, color=GRID, linewidth=0.7, zorder=0)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _height(axes, len(rows), 0.8 + 0.2 * -(-len(shown) // _KEYS))
    _axis(axes, [record for _, _, record in points])
    _legend(axes, [shown[name] for name in sorted(shown, key=lambda n: (places[n], n))])


def _axis(axes: Any, records: Sequence[Record]) -> None:
    """Set the axis of one measure, with its title."""
    lowest, highest = _ends(records)
    unit, measure = records[0].unit, records[0].measure
    axes.set_xlabel(_TITLES.get(measure, heading(measure)))
    if unit == "s":
        _seconds(axes.xaxis, highest, lowest)
        return
    axes.set_xlim(min(0.0, 1.1 * lowest), 1.25 * highest if highest > 0 else 1)
    axes.xaxis.set_major_formatter(lambda value, _: quantity(value, unit, measure))
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", color=GRID, linewidth=0.7)


def _bars(axes: Any, result: Result) -> None:
    """Draw the main measure of every engine with its interval, the best on top."""
    definition = result.about["definition"]
    measure = _MEASURE[definition["kind"]]
    engines = {c["label"]: c["engine"] for c in definition["contenders"]}
    records = [record for label in engines if (record := result.of(label, measure))]
    records.sort(key=lambda record: record.value)
    for y, record in enumerate(records):
        axes.barh(y, record.value, height=0.62, color=_colour(engines[record.engine]), zorder=1)
        _whisker(axes, record, y, INK)
        end = max(record.value, record.high if math.isfinite(record.high) else 0.0, 0.0)
        text = quantity(record.value, record.unit, record.measure)
        _beside(axes, text, end, y)
    axes.set_yticks(range(len(records)), [record.engine for record in records])
    axes.set_ylim(len(records) - 0.4, -0.6)
    _height(axes, len(records))
    _axis(axes, records)


_Lines = dict[tuple[str, str], list[tuple[float, Record]]]


def _lines(result: Result, measure: str, over: str) -> _Lines:
    """Return a line per engine, with its name, of engines measured at three or more sizes.

    The size that is not on the axis, tensors or bytes, is about the same along a line.
    """
    beside = "tensors" if over == "state" else "state"
    found: dict[tuple[str, str], dict[float, list[tuple[float, Record]]]] = {}
    for row in summary.rows(result):
        for name, label in row.labels.items():
            size, other, record = (
                result.of(label, over),
                result.of(label, beside),
                row.of(name, measure),
            )
            if size is None or record is None or record.unit != "s" or row.engines[name] == "none":
                continue
            about = 0.0 if other is None else round(math.log10(max(1.0, other.value)), 1)
            line = found.setdefault((name, row.engines[name]), {}).setdefault(about, [])
            line.append((size.value, record))
    longest = {key: max(lines.values(), key=lambda each: len(each)) for key, lines in found.items()}
    return {
        key: sorted(line, key=lambda point: point[0])
        for key, line in longest.items()
        if len({size for size, _ in line}) > 2
    }


def _curves(axes: Any, what: tuple[_Lines, str, str]) -> None:
    """Draw cost against size, both logarithmic."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    lines, measure, over = what
    keys: list[Any] = []
    records = [record for points in lines.values() for _, record in points]
    _, highest = _ends(records)
    axes.figure.set_figheight(3.1)
    axes.set_xscale("log")
    for (name, engine), points in lines.items():
        colour = _colour(engine)
        axes.plot(
            *zip(*((s, r.value) for s, r in points), strict=True), color=colour, linewidth=1.6
        )
        for size, record in points:
            axes.scatter(size, record.value, s=18, color=colour, zorder=3)
            if math.isfinite(record.low) and math.isfinite(record.high):
                axes.plot([size, size], [record.low, record.high], color=colour, linewidth=1.4)
        keys.append(Line2D([], [], color=colour, marker="o", markersize=4, label=name))
    _seconds(axes.yaxis, highest, min(record.value for record in records))
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xlim(sizes[0] * 0.8, sizes[-1] * 1.25)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if sizes[-1] < 100 * sizes[0] else (1,)))
    unit = "B" if over == "state" else ""
    axes.xaxis.set_major_formatter(lambda value, _: quantity(value, unit))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("state" if over == "state" else "tensors")
    axes.set_ylabel(_TITLES.get(measure, heading(measure)))
    _legend(axes, keys)


def _stacked(
    axes: Any, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], share: bool
) -> None:
    """Draw horizontal stacks, each with its sum beside it; with `share` all have one length."""
    from matplotlib.patches import Patch

    parts = list(dict.fromkeys(name for _, stack in rows for name, _ in stack))
    colours = {name: PARTS[i % len(PARTS)] for i, name in enumerate(parts)}
    for y, (_, stack) in enumerate(rows):
        total, begin = sum(value for _, value in stack), 0.0
        scale = total if share and total else 1.0
        for name, value in stack:
            axes.barh(y, value / scale, left=begin, height=0.62, color=colours[name], zorder=1)
            begin += value / scale
        _beside(axes, quantity(total, "s"), begin, y)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _height(axes, len(rows), 0.8)
    _legend(axes, [Patch(color=colours[name], label=name) for name in parts])


def _stalls(axes: Any, result: Result) -> None:
    """Draw the causes of training stalls, for each engine as shares of its sum, model by model."""
    rows = []
    for contenders in rivals.by_model(result.about["definition"]).values():
        for label in rivals.best_first(result, [c["label"] for c in contenders]):
            if found := report.stalls(result, label):
                rows.append((label, [(r.measure.partition(".")[2], r.value) for r in found]))
    _stacked(axes, rows, share=True)
    axes.set_xlim(0, 1.18)
    axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlabel("of the training thread's time inside the engine, per snapshot", loc="right")


def _recovery(axes: Any, result: Result) -> None:
    """Draw the parts of the time from a failure until training goes on."""
    definition = result.about["definition"]
    rows = []
    for label in rivals.best_first(result, [c["label"] for c in definition["contenders"]]):
        found = [r for m in _STACKS[definition["kind"]] if (r := result.of(label, m))]
        if found:
            rows.append((label, [(heading(r.measure), r.value) for r in found]))
    _stacked(axes, rows, share=False)
    axes.set_xlim(0, 1.2 * max(sum(value for _, value in stack) for _, stack in rows))
    axes.xaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_xlabel(_FROM[definition["kind"]])
