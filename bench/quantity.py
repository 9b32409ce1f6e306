"""Write numbers as text: three digits, a unit that suits, the interval in brackets."""

from __future__ import annotations

import math

from bench.document import Cell
from bench.record import Record

SHARES = (
    *("overhead", "idle_hooks", "fence_idle", "fence_bare", "trace_overhead", "written_share"),
    *("periodic", "just_in_time", "both", "waste", "best_waste", "overhead_value"),
)
_WORDS = {
    "extra": "extra per snapshot",
    "extra_run": "extra, run time",
    "cost_ratio": "of a plain copy",
    "cost_ratio_alone": "of a copy by one rank",
    "overhead": "of a step",
    "step": "step without",
    "sync_copy": "plain copy",
    "saved_ratio": "saved, of a plain copy",
    "interval": "interval",
    "interval_1pct_steps": "interval within 1 %",
    "interval_5pct_steps": "interval within 5 %",
    "spacing_steps": "measured at",
    "busy_steps": "busy for",
    "stall_s": "stall",
    "cpu_s": "CPU time",
    "restart_s": "start to first step",
    "start_s": "start",
    "restore_s": "restore",
    "first_step_s": "first step",
    "lost_work_s": "lost work",
    "pause_s": "survivors' pause",
    "kill_s": "kill to training",
    "again_s": "notice to training",
    "noticed_s": "kill to notice",
    "setup_s": "script's set-up",
    "beyond_s": "notice to training, beyond set-up",
    "step_s": "then a step",
    "kept_bytes": "inputs kept",
    "cost_s": "cost per step",
    "cost_cpu_s": "cost per step, CPU time",
    "moved": "processes started anew",
    "plain_s": "step over plain gloo",
    "interval_steps": "snapshot every",
    "time_ratio": "in time",
    "coci_ratio": "COCI's formula",
    "coci_time_ratio": "COCI's, in time",
    "known_end_ratio": "were the end known",
    "young_s": "Young",
    "quality_time_s": "Quality, in time",
    "quality_progress_s": "Quality",
    "coci_time_s": "COCI's, in time",
    "coci_progress_s": "COCI's",
    "stall_ratio": "stall, over without symptoms",
    "waste_ratio": "waste, over without symptoms",
    "announced_s": "lost, announced",
    "unannounced_s": "lost, not announced",
    "best_waste": "best fixed interval",
    "best_s": "which is",
    "both_ratio": "both / periodic",
    "overhead_value": "overhead, value",
    "late_s": "too late by",
    "over_mean_ratio": "over the mean number's",
    "workers_ratio": "by workers alone",
    "extra_dram": "extra DRAM",
    "extra_dram_bytes": "extra DRAM",
    "written_bytes": "written",
}


def heading(measure: str) -> str:
    """Return the heading of a measure's column."""
    return _WORDS.get(measure, measure.replace("_", " "))


def cell(record: Record | None) -> Cell | str:
    """Return a value with its interval; empty where nothing was measured."""
    if record is None:
        return ""
    text = quantity(record.value, record.unit, record.measure)
    if record.low == record.high:
        return Cell(text, record.value)
    return Cell(text, record.value, bounds(record.low, record.high, record.unit, record.measure))


def bounds(low: float, high: float, unit: str, measure: str) -> str:
    """Return an interval as text."""
    return f"[{quantity(low, unit, measure)}, {quantity(high, unit, measure)}]"


def quantity(value: float, unit: str, measure: str = "") -> str:
    """Return three significant digits with a unit that suits; shares in percent."""
    if math.isnan(value):
        return "unknown"
    if not math.isfinite(value):
        return "unbounded" if value > 0 else "-unbounded"
    if measure in SHARES:
        return f"{digits(100 * value)} %"
    if (measure.endswith("_steps") or measure == "interval") and value == round(value):
        return f"{value:,.0f} step{'s' * (value != 1)}"
    if unit == "s":
        for name, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
            if abs(value) >= size or name == "us":
                return f"{digits(value / size)} {name}"
    if unit in ("B", "B/s"):
        power = 0
        while abs(value) >= 1000 and power < 4:
            value, power = value / 1000, power + 1
        return f"{digits(value)} {['', 'k', 'M', 'G', 'T'][power]}{unit}"
    return digits(value)


def digits(value: float) -> str:
    """Return a number with three digits, or with all before the point."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
