"""Draw a trace with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lightck.cli.output import size, span
from lightck.cli.timeline_data import (
    PHASES,
    RECOVERY,
    REDUCTION,
    TRAINING,
    Bar,
    Recording,
    row_of,
)

SUFFIXES = (".png", ".svg", ".pdf")
_INK, _FAINT, _GRID = "#1f2430", "#6b7280", "#d5d9e0"
_COLOURS = {
    "forward": "#8ecae6",
    "backward": "#4895c4",
    "wait": "#e3e7ec",
    "allreduce": "#f2cc8f",
    "update": "#c3b1e1",
    "boundary": "#f4a261",
    "fence": "#d62828",
    "step": "#e9c46a",
    "request": "#bc6c25",
    "drain": "#9aa5b1",
    "invalidate": "#adb5bd",
    "recovery": "#6d3b47",
    "commit": "#2a9d8f",
}
_PARTS = "YlGnBu", 0.1, 0.6
"""The colours of a model's parts, from first to last: a colour map, and which range of it."""
_SNAPSHOTS = ("#2f7f4f", "#7fbf7b", "#b8860b")
"""The colours of snapshots, in turn: neighbours differ."""
_LANE = 0.74
"""Height of a bar in its row."""
_STRIP = 0.26
"""Height of a strip at the bottom of a row."""
_COPY_LANE = 0.6
"""Height of a bar with a line of text below it."""
_LETTER = 0.64
"""The width of a letter in parts of its size, with some room."""
_GAP_MS = 0.08
"""The gap in ms below which two chunks are drawn as one bar."""


def draw(recording: Recording, out: Path, suffix: str) -> None:
    """Draw all of the recording."""
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "none"}):
        figure = _figure(recording)
        smaller: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if suffix == ".png" else {}
        figure.savefig(out, format=suffix[1:], dpi=150, facecolor="white", **smaller)


def _figure(recording: Recording) -> Figure:
    rows: dict[str, Callable[[Any, Recording, int, float], None]]
    rows = {TRAINING: _phases, "held up by lightck": _stalls}
    if recording.of("allreduce"):
        rows[REDUCTION] = _reductions
    if recording.of("recovery"):
        rows[RECOVERY] = _recoveries
    busy = {bar.track for bar in recording.of("copy", "drain")}
    workers = [track for track in recording.tracks if track.startswith("worker") and track in busy]
    rows |= {track: partial(_copies, track) for track in workers} | {"commits": _commits}
    wide = len(recording.steps) > 1
    height = (3.4 if wide else 3.8) + 0.62 * len(rows)
    figure = Figure(figsize=(15 if wide else 11, height))
    top, bottom = figure.subplots(
        2, 1, sharex=True, height_ratios=[len(rows) * 0.62 + 0.3, 1.5], gridspec_kw={"hspace": 0.09}
    )
    figure.subplots_adjust(
        left=0.1 if wide else 0.14,
        right=0.985,
        top=1 - (1.15 if wide else 1.3) / height,
        bottom=(0.8 if wide else 1.0) / height,
    )
    end = recording.steps[-1].end
    for axes in (top, bottom):
        axes.set_xlim(0, end)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=_FAINT, length=0)
        axes.grid(axis="x", color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    _steps(top, bottom, recording, len(rows))
    for place, paint in enumerate(rows.values()):
        paint(top, recording, len(rows) - 1 - place, end)
    top.set_yticks(range(len(rows) - 1, -1, -1), rows, color=_INK)
    top.set_ylim(-0.55, len(rows) - 0.3)
    _curves(bottom, recording, end)
    _words(figure, recording)
    return figure


# ---- rows ----------------------------------------------------------------------------------------


def _bars(
    axes: Any, spans: Sequence[tuple[float, float]], y: float, colour: str, **how: Any
) -> None:
    """Draw spans, given as (begin, end); the shortest stay visible."""
    least = axes.get_xlim()[1] / 2500
    height = how.pop("height", _LANE)
    axes.broken_barh(
        [(begin, max(end - begin, least)) for begin, end in spans],
        (y - height / 2, height),
        facecolors=colour,
        linewidth=0,
        **how,
    )


def _says(axes: Any, bar: Bar, y: float, texts: Sequence[str], end: float, **how: Any) -> None:
    """Write the first of the texts that fits into the bar, if one does."""
    begin, stop = max(bar.begin, 0.0), min(bar.end, end)
    points = 72 * axes.figure.get_figwidth() * axes.get_position().width * (stop - begin) / end
    for text in texts:
        if len(text) * _LETTER * how.get("fontsize", 10) < points:
            at = (begin + stop) / 2, y
            axes.text(*at, text, ha="center", va="center", **{"color": _INK, **how})
            return


def _parts(recording: Recording) -> dict[str, str]:
    """Map the model's parts, first to last, to colours; empty where colours tell snapshots apart.

    Gradients come from the last part to the first. In a picture of one step each part has a
    colour, in one of several steps each snapshot has.
    """
    if len(recording.steps) > 1:
        return {}
    last_first = dict.fromkeys(_part(bar.name) for bar in recording.of("gradient"))
    found = [*reversed(last_first)]
    found += sorted({_part(bar.name) for bar in recording.of("copy")} - set(found))
    name, low, high = _PARTS
    steps = max(1, len(found) - 1)
    colours = mpl.colormaps[name]
    return {p: to_hex(colours(low + (high - low) * i / steps)) for i, p in enumerate(found)}


def _part(layer: str) -> str:
    """Return a layer's name up to its first number (a block of a stack), shortened to its end."""
    words = layer.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1][-2:]) if numbers else words[-1]


def _runs(bars: Sequence[Bar]) -> list[Bar]:
    """Group bars by part, joining those of one part that follow each other."""
    runs: list[Bar] = []
    for bar in sorted(bars, key=lambda b: b.begin):
        part = _part(bar.name)
        if runs and runs[-1].name == part and bar.begin - runs[-1].end < _GAP_MS:
            bar = replace(bar, begin=runs.pop().begin)
        runs.append(replace(bar, name=part))
    return runs


def _coloured(
    axes: Any, bars: Sequence[Bar], y: float, colours: dict[str, str], end: float, height: float
) -> None:
    """Draw bars in their part's colour, with the part's name where there is room."""
    for run in _runs(bars):
        _bars(axes, [(run.begin, run.end)], y, colours[run.name], height=height)
        _says(axes, run, y, [run.name], end, fontsize=7.5)


def _phases(axes: Any, recording: Recording, y: int, end: float) -> None:
    parts = _parts(recording)
    for phase in PHASES:
        found = recording.of(phase)
        _bars(axes, [(b.begin, b.end) for b in found], y, _COLOURS[phase])
        for bar in found:
            raised = _STRIP / 2 if parts and phase == "backward" else 0.0
            _says(axes, bar, y + raised, [f"{phase}  {bar.length:.0f} ms", phase], end)
    if parts:
        strip = y - (_LANE - _STRIP) / 2
        _coloured(axes, recording.of("gradient"), strip, parts, end, _STRIP)
        return
    layers = [b for b in recording.of("gradient") if b.length > end / 400]
    for bar in layers:
        axes.plot([bar.end] * 2, [y - _LANE / 2, y - _LANE / 4], color="white", linewidth=0.8)


def _stalls(axes: Any, recording: Recording, y: int, end: float) -> None:
    found = recording.of("lightck")
    for cause in sorted({bar.name for bar in found}):
        colour = _COLOURS.get(cause, _COLOURS["request"])
        of_cause = [bar for bar in found if bar.name == cause]
        _bars(axes, [(b.begin, b.end) for b in of_cause], y, colour)
    helped = [bar for bar in recording.of("copy") if bar.track == TRAINING]
    _bars(axes, _joined(helped), y, _SNAPSHOTS[1], height=_LANE / 2)
    for step in recording.steps:
        parts: dict[str, float] = {}
        for bar in recording.during(step, "lightck"):
            parts[bar.name] = parts.get(bar.name, 0.0) + bar.length
        told = ", ".join(f"{_SHORT.get(cause, cause)} {ms:.1f}" for cause, ms in parts.items())
        total = f"{sum(parts.values()):.1f} ms"
        if parts:
            _says(axes, step, y, [f"{total}:  {told}", total], end, fontsize=9, color=_FAINT)


def _reductions(axes: Any, recording: Recording, y: int, end: float) -> None:
    for bar in recording.of("allreduce"):
        hatch = "///" if "estimated" in bar.args["known"] else ""
        _bars(axes, [(bar.begin, bar.end)], y, _COLOURS["allreduce"], height=_COPY_LANE,
              hatch=hatch, edgecolor="white")  # fmt: skip
        _says(axes, bar, y, [bar.name, bar.name.removeprefix("bucket ")], end, fontsize=7.5)


def _recoveries(axes: Any, recording: Recording, y: int, end: float) -> None:
    for bar in recording.of("recovery"):
        _bars(axes, [(bar.begin, bar.end)], y, _COLOURS["recovery"])
        _says(axes, bar, y, [f"{bar.name}  {bar.length:.0f} ms", bar.name], end, color="white")


def _copies(track: str, axes: Any, recording: Recording, y: int, end: float) -> None:
    drains = [bar for bar in recording.of("drain") if bar.track == track]
    _bars(axes, _joined(drains), y + 0.06, _COLOURS["drain"], height=_COPY_LANE)
    copies = [bar for bar in recording.of("copy") if bar.track == track]
    parts = _parts(recording)
    for snapshot in sorted({bar.args["snapshot"] or 0 for bar in copies}):
        own = [bar for bar in copies if (bar.args["snapshot"] or 0) == snapshot]
        if parts:
            _coloured(axes, own, y + 0.06, parts, end, _COPY_LANE)
        else:
            colour = _SNAPSHOTS[snapshot % len(_SNAPSHOTS)]
            _bars(axes, _joined(own), y + 0.06, colour, height=_COPY_LANE)
        moved, busy = sum(b.args["bytes"] for b in own), sum(b.length for b in own)
        title = f"snapshot {snapshot}:  " if parts else f"{snapshot}:  "
        rate = f"{title}{size(moved)} at {moved / max(busy, 1e-9) / 1e6:.1f} GB/s"
        axes.text(max(own[0].begin, 0.0), y - 0.44, rate, va="center", fontsize=8.5, color=_FAINT)


def _joined(bars: Sequence[Bar]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for bar in sorted(bars, key=lambda b: b.begin):
        if spans and bar.begin - spans[-1][1] < _GAP_MS:
            spans[-1] = (spans[-1][0], max(spans[-1][1], bar.end))
        else:
            spans.append((bar.begin, bar.end))
    return spans


def _commits(axes: Any, recording: Recording, y: int, end: float) -> None:
    wide = len(recording.steps) > 1
    invalid = [(b.begin, b.end) for b in recording.of("commit") if b.name == "invalidate"]
    _bars(axes, invalid, y, _COLOURS["invalidate"], height=_LANE / 2)
    for bar in recording.of("committed"):
        _bars(axes, [(bar.begin, bar.end)], y, _COLOURS["commit"])
        axes.plot([bar.end], [y], marker="D", markersize=6, color=_COLOURS["commit"], clip_on=False)
        right, text = bar.end < 0.8 * end, f"{bar.args['snapshot']} committed"
        axes.annotate(
            text if wide else f"snapshot {text} in {span(bar.length / 1e3)}",
            (bar.end, y),
            xytext=(8 if right else -8, 0),
            textcoords="offset points",
            va="center",
            ha="left" if right else "right",
            fontsize=9,
            color=_INK,
            bbox=_PAPER,
        )

    for mark in recording.marks:
        if mark.name.startswith(("slipped", "torn")):
            text = f" {mark.name}: {mark.args.get('why')}"
            axes.text(mark.begin, y, text, va="center", fontsize=9, color=_COLOURS["fence"])


# ---- frame, curves and legend --------------------------------------------------------------------


def _steps(top: Any, bottom: Any, recording: Recording, rows: int) -> None:
    for step in recording.steps:
        for axes in (top, bottom):
            axes.axvline(step.end, color=_FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
        text = f"step {step.args['step']}   {step.length:.0f} ms"
        top.text(
            (step.begin + step.end) / 2, rows - 0.42, text, ha="center", weight="bold", color=_INK
        )


def _curves(axes: Any, recording: Recording, end: float) -> None:
    mib = 1 << 20
    for name, style in (("released", {"color": _FAINT, "linestyle": (0, (3, 2))}),
                        ("captured", {"color": _SNAPSHOTS[0]})):  # fmt: skip
        points = sorted(recording.curves.get(name, []))
        if not points:
            continue
        at, values = [p[0] for p in points], [p[1] / mib for p in points]
        at, values = [0.0, *at, end], [0.0, *values, values[-1]]
        axes.plot(at, values, drawstyle="steps-post", linewidth=1.3, **style)
        if name == "captured":
            axes.fill_between(at, values, step="post", color=_SNAPSHOTS[0], alpha=0.13, linewidth=0)
    axes.set_ylim(0)
    axes.set_ylabel("MiB of the\nsnapshot", rotation=0, ha="right", va="center", color=_INK)
    axes.set_xlabel("ms", color=_FAINT)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)


def _words(figure: Figure, recording: Recording) -> None:
    about = recording.about
    rows = [row_of(recording, step) for step in recording.steps]
    spent, stalled = sum(r["ms"] for r in rows), sum(r["lightck_ms"] for r in rows)
    causes: dict[str, float] = {}
    for row in rows:
        for cause, ms in row["stalls_ms"].items():
            causes[cause] = causes.get(cause, 0.0) + ms / len(rows)
    parts = ", ".join(f"{_SHORT.get(cause, cause)} {ms:.1f}" for cause, ms in causes.items())
    made = len({snapshot for row in rows for snapshot in row["snapshots"]})
    title = (
        f"{_counted(len(rows), 'step')} of {spent / len(rows):.0f} ms,"
        f" {_counted(made, 'snapshot')} in the background"
    )
    inch = 1 / figure.get_figheight()
    figure.text(0.012, 1 - 0.42 * inch, title, fontsize=15, weight="bold", color=_INK)
    threads = _counted(about.get("threads"), "copying thread")
    text = (
        f"lightck held the training thread up for {stalled / len(rows):.1f} ms per step,"
        f" {100 * stalled / spent:.1f} %  ({parts} ms).",
        f"{about.get('medium')}, survives {about.get('survives')}; {threads},"
        f" schedule {about.get('schedule')}",
    )
    wide = len(rows) > 1
    told = ("   " if wide else "\n").join(text)
    figure.text(0.012, 1 - 0.54 * inch, told, fontsize=10, color=_FAINT, va="top", linespacing=1.4)
    stalls = [c for c in ("boundary", "fence", "step", "request") if c in causes]
    handles: list[Any] = [
        Patch(color=_COLOURS[name], label=name) for name in PHASES if recording.of(name)
    ]
    handles += [Patch(color=_COLOURS[name], label=_MEANING[name]) for name in stalls]
    if wide:
        handles.append(Patch(color=_SNAPSHOTS[1], label="copies, a colour per snapshot"))
    else:
        shown = list(_parts(recording).values()) or [_SNAPSHOTS[1]]
        label = "gradients, copies: a colour per layer"
        handles.append(Patch(color=shown[len(shown) // 2], label=label))
    if recording.of("drain"):
        handles.append(Patch(color=_COLOURS["drain"], label="DRAM to region"))
    handles.append(
        Line2D([], [], marker="D", linewidth=0, color=_COLOURS["commit"], label="committed")
    )
    handles.append(Line2D([], [], color=_FAINT, linestyle=(0, (3, 2)), label="released"))
    handles.append(Line2D([], [], color=_SNAPSHOTS[0], label="copied"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.008, 0.0),
        ncol=len(handles) if wide else -(-len(handles) // 2),
        frameon=False, fontsize=9, handlelength=1.1, columnspacing=1.3, handletextpad=0.5,
    )  # fmt: skip


def _counted(count: int | None, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


_PAPER = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
_SHORT = {"boundary": "forward start", "step": "step end"}
_MEANING = {
    "boundary": "forward start: small state",
    "fence": "fence: wait, help, audit",
    "step": "step end: data, RNG",
    "request": "asked for",
}
