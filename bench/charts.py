"""PNG charts of result files, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from bench.record import Result

_MEASURE = {
    "training": ("extra", "extra time per snapshot, ms", 1e-3),
    "restore": ("restore", "restore, ms", 1e-3),
    "native": ("write_ratio", "write rate / best non-temporal copy", 1.0),
    "commit": ("commit", "commit beyond the copies, ms", 1e-3),
    "ranks": ("extra", "extra time of the job per snapshot, ms", 1e-3),
    "commit_ranks": ("commit", "commit of all ranks beyond the copies, ms", 1e-3),
    "restore_ranks": ("restore", "restore of all ranks, ms", 1e-3),
    "memory": ("extra_dram", "extra DRAM, MB", 1e6),
}


def draw(result: Result, path: Path) -> bool:
    """Draw a result's main measure as bars with intervals; False if there is nothing to draw.

    Raises:
        ImportError: no matplotlib.
    """
    definition = result.about["definition"]
    if definition["kind"] not in _MEASURE:
        return False
    measure, title, scale = _MEASURE[definition["kind"]]
    records = [record for record in result.records if record.measure == measure]
    if not records:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records.sort(key=lambda record: record.value)
    values = [record.value / scale for record in records]
    below = [max(0.0, record.value - record.low) / scale for record in records]
    above = [max(0.0, record.high - record.value) / scale for record in records]
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.35 * len(records)), layout="constrained")
    axes.barh([r.engine for r in records], values, xerr=[below, above], color="#4477aa", height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel(title)
    if measure == "extra":  # from nothing to seconds; noise goes below zero
        axes.set_xscale("symlog", linthresh=10)
    axes.set_title(definition["name"], loc="left")
    figure.savefig(path, dpi=120, metadata={"Software": None})  # no version in the bytes
    pyplot.close(figure)
    return True
