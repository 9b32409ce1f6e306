"""Draw a plan with matplotlib: waste over the interval, or over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from lightck.cli.plan_data import PlannedJob
from lightck.cli.plan_rows import Row, formula, waste_of
from lightck.policy.quantities import in_units

SUFFIXES = (".png", ".svg", ".pdf")
_INK, _FAINT, _GRID = "#1f2430", "#6b7280", "#d5d9e0"
_LINES = ("#4895c4", "#d62828", "#2a9d8f")
_POINTS = 120


def draw(rows: Sequence[Row], job: PlannedJob, out: Path, suffix: str) -> None:
    """Draw waste over the interval; of several numbers of ranks, over these."""
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        if len({row.ranks for row in rows}) > 1:
            _over_ranks(axes, rows, job)
        else:
            _over_intervals(axes, rows, job)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel("time that is no training which is there at the end, %", color=_FAINT)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_FAINT)
        axes.grid(color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(out, format=suffix[1:], dpi=150, facecolor="white")


def _spaced(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]


def _over_intervals(axes: Any, rows: Sequence[Row], job: PlannedJob) -> None:
    shown = [(row.interval_s, row) for row in rows if row.interval_s]
    mtbf_s = rows[0].mtbf_s
    least = min([every for every, _ in shown] + [job.costs.step_s]) / 2
    most = 4 * max(
        [every for every, _ in shown] + [waste_of(job.costs, mtbf_s, job.unsaved).interval_s]
    )
    wastes = ((x, formula(job.costs, mtbf_s, x, job.unsaved)) for x in _spaced(least, most))
    line = [(x, y) for x, y in wastes if y]
    axes.plot([x for x, _ in line], [100 * y for _, y in line], color=_LINES[0], label="formula")
    for i, (every_s, row) in enumerate(shown):
        at = every_s, 100 * (1 - row.outcome.goodput)
        axes.plot(*at, "o", color=_INK, markersize=6)
        axes.annotate(
            row.policy, at, xytext=(6, (6, -14)[i % 2]), textcoords="offset points", color=_INK
        )
    axes.set_xlabel("seconds from one snapshot to the next", color=_FAINT)
    axes.set_title(f"A failure every {in_units(mtbf_s)}", loc="left", weight="bold", color=_INK)


def _over_ranks(axes: Any, rows: Sequence[Row], job: PlannedJob) -> None:
    ranks = sorted({row.ranks for row in rows})
    rank_s = rows[0].mtbf_s * rows[0].ranks
    counts = _spaced(ranks[0], ranks[-1])
    costs = job.costs
    wastes = [waste_of(costs, rank_s / count, job.unsaved) for count in counts]
    lines: dict[str, list[float]] = {}
    if costs.cost_s:  # else there is no best interval
        lines["periodic, at its best interval"] = [w.periodic() for w in wastes]
    if costs.jit and costs.cost_s:
        lines["just in time, were all saved"] = [w.jit() for w in wastes]
        lines["both, at their best interval"] = [w.hybrid() for w in wastes]
    for (label, ys), colour in zip(lines.items(), _LINES, strict=False):
        line = [(x, 100 * y) for x, y in zip(counts, ys, strict=True) if y < 1]
        axes.plot([x for x, _ in line], [y for _, y in line], color=colour, label=label)
    for policy in dict.fromkeys(row.policy for row in rows):
        of_it = [row for row in rows if row.policy == policy]
        ys = [100 * (1 - row.outcome.goodput) for row in of_it]
        axes.plot([row.ranks for row in of_it], ys, "o--", linewidth=0.8, label=f"{policy}, played")
    axes.set_xlabel("ranks", color=_FAINT)
