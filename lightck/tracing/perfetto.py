"""Writes a trace as a Chrome/Perfetto document, for https://ui.perfetto.dev or `lightck timeline`.

There is one process per rank and a track per thread: the training thread with step > forward,
backward, wait (for other ranks' gradients), fence, update, and inside them what lightck did there;
autograd's thread, if it is another one; the reduction of gradients; recoveries in place; workers;
the commit thread (the native thread that syncs). Commits that need no sync are on the training
thread. Times are microseconds of CLOCK_MONOTONIC: files of several ranks of a host fit together.
"""

from __future__ import annotations

import bisect
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightck.errors import LightckError
from lightck.region.native_pool import (
    SPAN_COPY,
    SPAN_DRAIN,
    SPAN_INVALIDATE,
    SPAN_RECORD,
    SPAN_SYNC,
    SPAN_TABLES,
    THREAD_CALLER,
    THREAD_COMMIT,
)
from lightck.tracing.trace import Event, Opening, Recorded, Trace

TRAINING, AUTOGRAD, REDUCTION, RECOVERY, WORKER, COMMIT_THREAD = 1, 2, 3, 4, 10, 90
"""Track numbers; that of worker k is WORKER + k."""
_NAMES = {
    TRAINING: "training thread",
    AUTOGRAD: "autograd thread",
    REDUCTION: "gradients reduced",
    RECOVERY: "recovery in place",
    COMMIT_THREAD: "commit thread",
}
_STAGES = {
    SPAN_INVALIDATE: "invalidate",
    SPAN_TABLES: "manifest",
    SPAN_SYNC: "sync",
    SPAN_RECORD: "record",
}
_COUNTED_PARTS = 200
"""The most values that a counter has per snapshot: there may be many more chunks."""


@dataclass(frozen=True)
class _Slice:
    track: int
    name: str
    category: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any]


def save(trace: Trace | None, path: Path) -> Path:
    """Write a trace as it is now, and return the path.

    Raises:
        LightckError: there is none, or it cannot be written there.
    """
    if trace is None:
        raise LightckError("there is no trace: attach with trace=True or trace=<file>")
    try:
        write(trace.recorded(), path)
    except OSError as error:
        raise LightckError(f"cannot write the trace to {path}: {error.strerror}") from error
    return path


def write(recorded: Recorded, path: Path) -> None:
    """Write the document to `path`, whole or not at all."""
    fd, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "w", encoding="ascii") as file:
            json.dump(document(recorded), file, separators=(",", ":"))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(draft, 0o666 & ~umask)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def document(recorded: Recorded) -> dict[str, Any]:
    """Return the trace-event document."""
    found = _Snapshots(recorded.openings)
    slices = _nested([*_training(recorded), *_reduced(recorded), *_native(recorded, found)])
    process = int(recorded.about.get("rank", 0))
    timed = [
        *(_complete(each) for each in slices),
        *_marks(recorded, found, slices),
        *_counters(recorded, found),
    ]
    timed.sort(key=lambda event: (event["tid"], event["ts"], -event.get("dur", 0.0)))
    for event in timed:
        event["pid"] = process
    return {
        "displayTimeUnit": "ms",
        "otherData": {**recorded.about, "clock": "CLOCK_MONOTONIC", "lost": recorded.lost},
        "traceEvents": [*_names(recorded, {s.track for s in slices}, process), *timed],
    }


# ---- slices --------------------------------------------------------------------------------------


def _training(recorded: Recorded) -> Iterator[_Slice]:
    for event in recorded.events:
        if event.kind == "recovery":
            args = {"step": event.step}
            yield _Slice(RECOVERY, event.name, "recovery", event.begin_ns, event.end_ns, args)
        if event.kind in ("step", "forward", "wait", "update", "stall", "part"):
            yield _Slice(
                TRAINING if event.thread == recorded.training_thread else AUTOGRAD,
                event.name,
                event.kind if event.kind != "stall" else "lightck",
                event.begin_ns,
                event.end_ns,
                {"step": event.step},
            )
    yield from _backward(recorded)


def _backward(recorded: Recorded) -> Iterator[_Slice]:
    """Yield each backward as a slice, and in it one slice per layer.

    A backward lasts from a forward's end to the last gradient before the next phase. The loss
    belongs to it: nothing tells where one ends and the other begins.
    """
    phases = sorted(
        (e for e in recorded.events if e.kind in ("forward", "tick", "step")),
        key=lambda e: e.end_ns,
    )
    begin: int | None = None
    ticks: list[Event] = []
    for event in [*phases, None]:
        if event is not None and event.kind == "tick":
            ticks.append(event)
            continue
        if begin is not None and ticks:
            yield from _layers(recorded, begin, ticks)
        begin = event.end_ns if event is not None and event.kind == "forward" else None
        ticks = []


def _layers(recorded: Recorded, begin: int, ticks: list[Event]) -> Iterator[_Slice]:
    step = {"step": ticks[-1].step}
    yield _Slice(TRAINING, "backward", "backward", begin, ticks[-1].end_ns, step)
    for tick in ticks:
        track = TRAINING if tick.thread == recorded.training_thread else AUTOGRAD
        yield _Slice(track, tick.name, "gradient", begin, tick.end_ns, step)
        begin = tick.end_ns


def _reduced(recorded: Recorded) -> Iterator[_Slice]:
    """Yield the reductions of gradient buckets, each from when the one before was reduced."""
    done = 0
    for event in sorted(_of(recorded, "allreduce"), key=lambda e: e.end_ns):
        begin, done = max(event.begin_ns, done), event.end_ns
        yield _reduction(event, begin, done, "seen: launch and end")
    launched = _of(recorded, "launched")
    for wait in _of(recorded, "wait"):
        mine = [e for e in launched if e.begin_ns <= wait.end_ns]
        launched = launched[len(mine) :]
        for event, begin, end in _evenly(mine, wait.end_ns):
            yield _reduction(event, begin, end, "seen: launch; estimated: end, at an even rate")


def _of(recorded: Recorded, kind: str) -> list[Event]:
    return sorted((e for e in recorded.events if e.kind == kind), key=lambda e: e.begin_ns)


def _reduction(event: Event, begin: int, end: int, known: str) -> _Slice:
    args = {"step": event.step, "bytes": event.amount, "known": known}
    args["queued_ms"] = (begin - event.begin_ns) / 1e6
    return _Slice(REDUCTION, event.name, "allreduce", begin, end, args)


def _evenly(launched: Sequence[Event], end_ns: int) -> list[tuple[Event, int, int]]:
    """Return begin and end of each reduction, at the rate that ends the last with the wait."""

    def at(ns_per_byte: float) -> list[tuple[Event, int, int]]:
        spans: list[tuple[Event, int, int]] = []
        for event in launched:
            begin = max(event.begin_ns, spans[-1][2] if spans else 0)
            spans.append((event, begin, begin + int(event.amount * ns_per_byte)))
        return spans

    total = sum(event.amount for event in launched)
    if not total:
        return at(0)
    low, high = 0.0, (end_ns - launched[0].begin_ns) / total
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle)[-1][2] > end_ns else (middle, high)
    return at(low)


def _native(recorded: Recorded, found: _Snapshots) -> Iterator[_Slice]:
    commits: dict[int, list[_Slice]] = defaultdict(list)  # by track: whoever sealed may commit
    for span in recorded.spans:
        kind, track = int(span["kind"]), _track(int(span["thread"]))
        begin, end = int(span["begin_ns"]), int(span["end_ns"])
        opening = found.of(int(span["slot"]), begin)
        args: dict[str, Any] = {"snapshot": opening.step if opening else None}
        if kind in _STAGES:
            stage = _Slice(track, _STAGES[kind], "commit", begin, end, args)
            yield stage
            commit = commits[track]
            if kind == SPAN_TABLES:
                commit.clear()
            commit.append(stage)
            if [s.name for s in commit] == ["manifest", "sync", "record", "sync"]:
                first = commit[0].begin_ns
                yield _Slice(track, f"commit {args['snapshot']}", "committed", first, end, args)
                commit.clear()
            continue
        name, tensors = _copied(opening, span)
        moved = int(span["bytes"])
        args |= {"bytes": moved, "tensors": tensors}
        if end > begin:
            args["GB/s"] = round(moved / (end - begin), 2)
        category = "drain" if kind == SPAN_DRAIN else "copy"
        if track == TRAINING:
            args["helping"] = True
        yield _Slice(track, name, category, begin, end, args)


def _track(thread: int) -> int:
    if thread == THREAD_CALLER:
        return TRAINING
    return COMMIT_THREAD if thread == THREAD_COMMIT else WORKER + thread


def _copied(opening: Opening | None, span: Any) -> tuple[str, str]:
    """Return the layer of a chunk, and its tensors' names; a chunk never crosses layers."""
    batch = int(span["batch"])
    if opening is None or batch >= len(opening.batches):
        return "?", "?"
    first, count = int(span["copy"]), int(span["copies"])
    positions = opening.batches[batch].positions
    entries = [opening.entries[int(i)] for i in positions[first : first + min(count, 3)]]
    more = f" and {count - 3} more" if count > 3 else ""
    return entries[0].layer or entries[0].name, ", ".join(e.name for e in entries) + more


class _Snapshots:
    """Knows which snapshot a slot held at a time: from its forward start to the next one's."""

    def __init__(self, openings: Sequence[Opening]) -> None:
        self._in_slot: dict[int, list[Opening]] = {}
        for opening in openings:
            self._in_slot.setdefault(opening.slot, []).append(opening)

    def of(self, slot: int, at_ns: int) -> Opening | None:
        """Return the snapshot that a slot held: the last one with forward start before `at_ns`."""
        there = self._in_slot.get(slot, [])
        index = bisect.bisect_right(there, at_ns, key=lambda opening: opening.begin_ns)
        return there[index - 1] if index else None


def _nested(slices: list[_Slice]) -> list[_Slice]:
    """Cut slices so that each lies within the one it began in: viewers cannot show overlaps."""
    kept: list[_Slice] = []
    open_until: dict[int, list[int]] = {}
    for each in sorted(slices, key=lambda s: (s.begin_ns, -s.end_ns)):
        ends = open_until.setdefault(each.track, [])
        while ends and ends[-1] <= each.begin_ns:
            ends.pop()
        end = min(each.end_ns, ends[-1]) if ends else each.end_ns
        ends.append(end)
        kept.append(
            _Slice(each.track, each.name, each.category, each.begin_ns, end, each.args)
            if end != each.end_ns
            else each
        )
    return kept


# ---- instants, flows, counters, names ------------------------------------------------------------


def _us(ns: int) -> float:
    return ns / 1000


def _complete(each: _Slice) -> dict[str, Any]:
    return {
        "ph": "X",
        "tid": each.track,
        "name": each.name,
        "cat": each.category,
        "ts": _us(each.begin_ns),
        "dur": _us(each.end_ns - each.begin_ns),
        "args": each.args,
    }


def _mark(track: int, name: str, at_ns: int, **args: Any) -> dict[str, Any]:
    event = {"ph": "i", "s": "t", "tid": track, "name": name, "cat": "mark", "ts": _us(at_ns)}
    return {**event, "args": args}


def _marks(recorded: Recorded, found: _Snapshots, slices: list[_Slice]) -> Iterator[dict[str, Any]]:
    for event in recorded.events:
        if event.kind == "step":
            yield _mark(TRAINING, f"step end {event.step}", event.end_ns, step=event.step)
        elif event.kind == "tick":
            track = TRAINING if event.thread == recorded.training_thread else AUTOGRAD
            yield _mark(track, f"gradient {event.name}", event.end_ns, step=event.step)
        elif event.kind in ("slipped", "torn"):
            text = f"{event.kind} {event.step}"
            yield _mark(TRAINING, text, event.end_ns, snapshot=event.step, why=event.name)
    committed = {s.args["snapshot"]: s for s in slices if s.category == "committed"}
    for opening in recorded.openings:
        step = opening.step
        yield _mark(TRAINING, f"forward start {step}", opening.begin_ns, snapshot=step)
        end = committed.get(step)
        if end is not None:
            yield _mark(end.track, f"committed {step}", end.end_ns, snapshot=step)
            flow = {"name": "snapshot", "cat": "snapshot", "id": step}
            yield {**flow, "ph": "s", "tid": TRAINING, "ts": _us(opening.begin_ns)}
            yield {**flow, "ph": "f", "bp": "e", "tid": end.track, "ts": _us(end.begin_ns)}


def _counters(recorded: Recorded, found: _Snapshots) -> Iterator[dict[str, Any]]:
    """Count the current snapshot's bytes that were released, and those that were copied."""
    for event in recorded.events:
        if event.kind == "released":
            yield _count("released", event.end_ns, event.amount)
    copies = recorded.spans[recorded.spans["kind"] == SPAN_COPY]
    copies = copies[copies["end_ns"].argsort(kind="stable")]
    seen: Opening | None = None
    total = shown = 0
    for span in copies:
        opening = found.of(int(span["slot"]), int(span["begin_ns"]))
        if opening is None:
            continue
        if opening is not seen:
            seen, total, shown = opening, 0, 0
            yield _count("captured", opening.begin_ns, 0)
        total += int(span["bytes"])
        if (total - shown) * _COUNTED_PARTS >= opening.payload_bytes:
            shown = total
            yield _count("captured", int(span["end_ns"]), total)


def _count(name: str, at_ns: int, value: int) -> dict[str, Any]:
    return {"ph": "C", "tid": 0, "name": name, "ts": _us(at_ns), "args": {"bytes": value}}


def _names(recorded: Recorded, tracks: set[int], process: int) -> Iterator[dict[str, Any]]:
    about = recorded.about
    title = f"rank {process} (process {about.get('process')})"
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}
    for track in sorted(tracks):
        name = _NAMES.get(track, f"worker {track - WORKER}")
        thread = {"ph": "M", "pid": process, "tid": track}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": track}}
