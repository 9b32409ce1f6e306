"""A trace, and the document made of it, are bounded, in order, properly nested and complete."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from lightck.region.layout import Entry
from lightck.region.native_pool import (
    SPAN_COPY,
    SPAN_DRAIN,
    SPAN_DTYPE,
    SPAN_INVALIDATE,
    SPAN_RECORD,
    SPAN_SYNC,
    SPAN_TABLES,
    THREAD_CALLER,
    THREAD_COMMIT,
    NativePool,
)
from lightck.region.slot_writer import Batch
from lightck.tracing import perfetto, trace
from lightck.tracing.trace import Event, Opening, Recorded, Trace

ME = threading.get_ident()


def span(kind: int, begin: int, end: int, **fields: int) -> Any:
    row = np.zeros((), SPAN_DTYPE)
    row["kind"], row["begin_ns"], row["end_ns"] = kind, begin, end
    for name, value in fields.items():
        row[name] = value
    return row


def recorded(
    events: list[Event] = [],  # noqa: B006
    openings: list[Opening] = [],  # noqa: B006
    spans: list[Any] = [],  # noqa: B006
) -> Recorded:
    rows = np.array(spans, SPAN_DTYPE)
    return Recorded(events, openings, rows, 0, ME, {"rank": 3, "process": 77})


def slices(document: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    found = [e for e in document["traceEvents"] if e["ph"] == "X"]
    return [e for e in found if all(e[key] == value for key, value in wanted.items())]


def check_document(document: dict[str, Any]) -> None:
    """Check what viewers rely on, in ns again: they round, too."""
    assert json.loads(json.dumps(document)) == document
    last: dict[int, int] = defaultdict(int)
    ends: dict[int, list[int]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert event["pid"] == 3
        if event["ph"] == "M":
            continue
        tid = event["tid"]
        begin = round(1000 * event["ts"])
        assert begin >= last[tid], "not in order"
        last[tid] = begin
        if event["ph"] == "X":
            assert event["dur"] >= 0
            while ends[tid] and ends[tid][-1] <= begin:
                ends[tid].pop()
            end = begin + round(1000 * event["dur"])
            assert not ends[tid] or end <= ends[tid][-1], "sticks out of the slice around it"
            ends[tid].append(end)


def test_the_newest_events_stay_and_the_others_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(trace, "EVENTS", 10)
    kept = Trace({}, step=1)
    for i in range(25):
        kept.note("stall", f"cause {i}", i, i + 1)
    found = kept.recorded()
    assert [event.begin_ns for event in found.events] == list(range(15, 25))
    assert found.lost == 15


def test_both_clocks_are_one() -> None:
    before = trace.now_ns()
    pool = NativePool(1, 4096, idle=False, spans=4)
    try:
        rows, lost = pool.trace()
        assert len(rows) == 0 and lost == 0
    finally:
        pool.close()
    import time

    assert before <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) <= trace.now_ns()


def test_a_step_is_drawn_with_its_phases_and_layers() -> None:
    events = [
        Event("forward", "forward", 1_000, 5_000, ME, 4),
        Event("stall", "boundary", 1_500, 2_000, ME, 4),
        Event("tick", "head", 7_000, 7_000, ME, 4),
        Event("tick", "body", 9_000, 9_000, ME, 4),
        Event("part", "copies", 9_200, 9_300, ME, 4),
        Event("stall", "fence", 9_100, 9_400, ME, 4),
        Event("update", "update", 9_500, 9_900, ME, 4),
        Event("step", "step 4", 500, 10_000, ME, 4),
    ]
    document = perfetto.document(recorded(events))
    check_document(document)
    names = [(e["name"], e["ts"], e["dur"]) for e in slices(document, tid=perfetto.TRAINING)]
    assert names == [
        ("step 4", 0.5, 9.5),
        ("forward", 1.0, 4.0),
        ("boundary", 1.5, 0.5),
        ("backward", 5.0, 4.0),
        ("head", 5.0, 2.0),
        ("body", 7.0, 2.0),
        ("fence", 9.1, 0.3),
        ("copies", 9.2, 0.1),
        ("update", 9.5, 0.4),
    ]
    assert all(e["args"] == {"step": 4} for e in slices(document))


def test_micro_batches_and_the_autograd_thread_are_told_apart() -> None:
    events = []
    for start in (0, 10_000):
        events.append(Event("forward", "forward", start, start + 2_000, ME, 1))
        events.append(Event("tick", "layer", start + 5_000, start + 5_000, ME + 1, 1))
    document = perfetto.document(recorded(events))
    check_document(document)
    assert [(e["ts"], e["dur"]) for e in slices(document, name="backward")] == [(2, 3), (12, 3)]
    assert {e["tid"] for e in slices(document, name="layer")} == {perfetto.AUTOGRAD}
    threads = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["training thread", "autograd thread"]


def entries(*names: str) -> tuple[Entry, ...]:
    return tuple(Entry(n, "parameter", "uint8", (64,), (1,), 64, layer=n[0]) for n in names)


def test_a_copy_is_named_by_the_snapshot_that_was_in_its_slot_then() -> None:
    batches = [Batch(0, np.array([2, 0, 1]), 192)]
    openings = [
        Opening(100, 7, 0, entries("a.x", "b.y", "c.z"), batches, 192),
        Opening(200, 8, 1, entries("a.x", "b.y", "c.z"), batches, 192),
        Opening(300, 9, 0, entries("d.x", "e.y", "f.z"), batches, 192),
    ]
    spans = [
        span(SPAN_COPY, 110, 120, slot=0, copy=0, copies=1, bytes=64),
        span(SPAN_COPY, 310, 330, slot=0, copy=1, copies=2, bytes=128, thread=1),
        span(SPAN_COPY, 340, 350, slot=0, copy=1, copies=1, thread=THREAD_CALLER),
        span(SPAN_DRAIN, 210, 220, slot=1, copy=2, copies=1, bytes=64),
        span(SPAN_COPY, 10, 20, slot=0, copies=1),
        span(SPAN_COPY, 400, 410, slot=1, batch=5, copies=1),
    ]
    document = perfetto.document(recorded([], openings, spans))
    check_document(document)
    found = {e["ts"]: e for e in slices(document)}
    assert found[0.11]["name"] == "c" and found[0.11]["args"]["snapshot"] == 7
    assert found[0.31]["name"] == "d" and found[0.31]["args"]["tensors"] == "d.x, e.y"
    assert found[0.31]["args"]["GB/s"] == 6.4 and found[0.31]["tid"] == perfetto.WORKER + 1
    assert found[0.34]["tid"] == perfetto.TRAINING and found[0.34]["args"]["helping"]
    assert found[0.21]["cat"] == "drain" and found[0.21]["args"]["snapshot"] == 8
    assert found[0.01]["name"] == "?" and found[0.01]["args"]["snapshot"] is None
    assert found[0.4]["name"] == "?"


def test_a_commit_has_its_stages_a_flow_from_its_instant_and_a_mark() -> None:
    openings = [Opening(100, 7, 0, (), [], 1)]
    thread = THREAD_COMMIT
    stages = [
        span(SPAN_INVALIDATE, 100, 110, slot=0, thread=thread),
        span(SPAN_TABLES, 200, 210, slot=0, thread=thread),
        span(SPAN_SYNC, 210, 240, slot=0, thread=thread),
        span(SPAN_RECORD, 240, 250, slot=0, thread=thread),
        span(SPAN_SYNC, 250, 290, slot=0, thread=thread),
    ]
    document = perfetto.document(recorded([], openings, stages))
    check_document(document)
    names = [e["name"] for e in slices(document, tid=perfetto.COMMIT_THREAD)]
    assert names == ["invalidate", "commit 7", "manifest", "sync", "record", "sync"]
    marks = {e["name"]: e["ts"] for e in document["traceEvents"] if e["ph"] == "i"}
    assert marks == {"forward start 7": 0.1, "committed 7": 0.29}
    assert [e["ts"] for e in document["traceEvents"] if e["ph"] in "sf"] == [0.1, 0.2]
    unfinished = perfetto.document(recorded([], openings, stages[:-1]))
    assert not slices(unfinished, cat="committed")


def test_counters_rise_to_the_payload_and_begin_anew_with_every_snapshot() -> None:
    entry, batches = entries("a"), [Batch(0, np.array([0]), 64)]
    openings = [Opening(1000 * i, i, i % 2, entry, batches, 640) for i in range(1, 4)]
    spans = [
        span(SPAN_COPY, 1000 * i + j, 1000 * i + j + 1, slot=i % 2, copies=1, bytes=64)
        for i in range(1, 4)
        for j in range(1, 11)
    ]
    released = [Event("released", "released", 1001, 1001, ME, 1, 640)]
    document = perfetto.document(recorded(released, openings, spans))
    check_document(document)
    counts = [e for e in document["traceEvents"] if e["ph"] == "C"]
    captured = [e["args"]["bytes"] for e in counts if e["name"] == "captured"]
    assert captured == 3 * list(range(0, 641, 64))
    assert [e["args"]["bytes"] for e in counts if e["name"] == "released"] == [640]


_KINDS = ("step", "forward", "update", "stall", "part", "tick", "released", "slipped", "torn")


def test_whatever_is_recorded_makes_a_document_that_viewers_take(rng: np.random.Generator) -> None:
    def draw(high: int, low: int = 0) -> int:
        return int(rng.integers(low, high))

    entry, batches = entries("a"), [Batch(0, np.array([0]), 64)]
    for _ in range(300):
        events, spans = [], []
        for _ in range(draw(12)):
            kind, begin = _KINDS[draw(len(_KINDS))], draw(60)
            end = begin if kind == "tick" else begin + draw(60)
            events.append(Event(kind, "x", begin, end, ME + draw(2), 1))
        for _ in range(draw(12)):
            begin = draw(60)
            made = span(draw(7, 1), begin, begin + draw(60), thread=draw(66), copies=1)
            spans.append(made)
        spans.sort(key=lambda row: (int(row["thread"]), int(row["end_ns"])))  # as the pool has it
        opened = sorted(draw(60) for _ in range(draw(4)))
        openings = [Opening(at, i, 0, entry, batches, 64) for i, at in enumerate(opened)]
        check_document(perfetto.document(recorded(events, openings, spans)))


def test_a_failed_write_leaves_what_was_there(tmp_path: Any, monkeypatch: Any) -> None:
    out = tmp_path / "run.json"
    perfetto.write(recorded(), out)
    before = out.read_bytes()
    assert json.loads(before)["otherData"]["lost"] == 0

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", broken)
    with pytest.raises(OSError, match="No space"):
        perfetto.write(recorded(), out)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
