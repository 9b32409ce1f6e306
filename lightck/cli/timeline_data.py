"""Read a trace file back: bars, marks and curves by track, cut to the steps that are wanted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightck.cli.output import BAD_DATA, Refusal

TRAINING = "training thread"
REDUCTION = "gradients reduced"
RECOVERY = "recovery in place"
PHASES = ("forward", "backward", "wait", "update")
STALLS = ("boundary", "fence", "step", "request")


@dataclass(frozen=True)
class Bar:
    """One thing that a thread did; times in ms since the first step began."""

    track: str
    name: str
    kind: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Return the length in ms."""
        return self.end - self.begin


@dataclass(frozen=True)
class Recording:
    """One rank's trace, or the part of it that belongs to some steps."""

    about: dict[str, Any]
    tracks: tuple[str, ...]
    """The tracks in the order to show them."""
    bars: tuple[Bar, ...]
    marks: tuple[Bar, ...]
    curves: dict[str, list[tuple[float, int]]]
    """The points (ms, bytes) of each curve by name."""

    @property
    def steps(self) -> list[Bar]:
        """Return the whole steps in the recording, oldest first."""
        return [bar for bar in self.bars if bar.kind == "step"]

    def of(self, *kinds: str) -> list[Bar]:
        """Return the bars of these kinds."""
        return [bar for bar in self.bars if bar.kind in kinds]

    def during(self, step: Bar, *kinds: str) -> list[Bar]:
        """Return the bars of these kinds that began in a step."""
        return [bar for bar in self.of(*kinds) if step.begin <= bar.begin < step.end]

    def cut(self, first: int, last: int) -> Recording:
        """Return what overlaps steps `first` to `last`, with times since the first one began."""
        chosen = [bar for bar in self.steps if first <= bar.args["step"] <= last]
        if not chosen:
            there = f"{self.steps[0].args['step']} to {self.steps[-1].args['step']}"
            raise Refusal(f"no step from {first} to {last} in it; whole steps there: {there}")
        begin, end = chosen[0].begin, chosen[-1].end
        inside = {bar.name for bar in chosen}

        def shifted(bars: Iterable[Bar]) -> tuple[Bar, ...]:
            return tuple(
                Bar(b.track, b.name, b.kind, b.begin - begin, b.end - begin, b.args)
                for b in bars
                if b.begin <= end and b.end >= begin and (b.kind != "step" or b.name in inside)
            )

        curves = {
            name: [(at - begin, value) for at, value in points if begin <= at <= end]
            for name, points in self.curves.items()
        }
        return Recording(self.about, self.tracks, shifted(self.bars), shifted(self.marks), curves)


def read(path: Path) -> Recording:
    """Read a file that `handle.trace` or `close` wrote.

    Raises:
        Refusal: the file is not a trace, or holds no whole step.
    """
    try:
        document = json.loads(path.read_bytes())
        recording = _parsed(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"{path} is no trace of lightck ({type(error).__name__}: {error})"
        raise Refusal(text, BAD_DATA) from error
    if not recording.steps:
        raise Refusal(f"{path} holds no whole step: train a few before the trace is written")
    first = recording.steps[0].args["step"]
    return recording.cut(first, recording.steps[-1].args["step"])


def _parsed(document: dict[str, Any]) -> Recording:
    about = document["otherData"]
    about["clock"], about["lost"]  # noqa: B018
    names: dict[int, str] = {}
    bars: list[Bar] = []
    marks: list[Bar] = []
    curves: dict[str, list[tuple[float, int]]] = {}
    for event in document["traceEvents"]:
        kind = event["ph"]
        if kind == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif kind == "C":
            point = (event["ts"] / 1e3, int(event["args"]["bytes"]))
            curves.setdefault(event["name"], []).append(point)
        elif kind in "Xi":
            begin = event["ts"] / 1e3
            bar = Bar(
                names.get(event["tid"], "?"),
                event["name"],
                event["cat"],
                begin,
                begin + event.get("dur", 0.0) / 1e3,
                event["args"],
            )
            (bars if kind == "X" else marks).append(bar)
    tracks = tuple(names[number] for number in sorted(names))
    return Recording(about, tracks, tuple(bars), tuple(marks), curves)


def row_of(recording: Recording, step: Bar) -> dict[str, Any]:
    """Return the figures of a step: ms, bytes and GB/s."""
    copies = recording.during(step, "copy")
    moved = sum(bar.args["bytes"] for bar in copies)
    busy = sum(bar.length for bar in copies)
    stalls = recording.during(step, "lightck")
    commits = recording.during(step, "committed")
    marks = [mark for mark in recording.marks if step.begin <= mark.begin < step.end]
    return {
        "step": step.args["step"],
        "ms": step.length,
        **{phase: sum(bar.length for bar in recording.during(step, phase)) for phase in PHASES},
        "lightck_ms": sum(bar.length for bar in stalls),
        "stalls_ms": {
            cause: sum(bar.length for bar in stalls if bar.name == cause)
            for cause in sorted({bar.name for bar in stalls})
        },
        "snapshots": sorted({bar.args["snapshot"] for bar in copies} - {None}),
        "copied_bytes": moved,
        "helped_bytes": sum(b.args["bytes"] for b in copies if b.args.get("helping")),
        "copy_gb_per_s": moved / busy / 1e6 if busy else None,
        "committed": [bar.args["snapshot"] for bar in commits],
        "commit_ms": [bar.length for bar in commits],
        "lost": [m.name for m in marks if m.name.startswith(("slipped", "torn"))],
    }
