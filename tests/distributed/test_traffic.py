"""Copies are paced by communication, and the timeline shows it, rank by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightck
from lightck.cli import timeline_data
from lightck.distributed.ddp_communication import DdpCommunication
from lightck.region.native_pool import SPAN_DTYPE
from lightck.tracing.perfetto import document
from lightck.tracing.trace import Event, Recorded
from support import internals
from support.distributed import ranks
from support.distributed.ranks import Me
from support.distributed.replicas import STEPS, Case, made, micro_batch, train


def traced(me: Me, case: Case, folder: Path, **settings: Any) -> dict[str, Any]:
    """The document of a training."""
    train(me, case, folder, trace=folder / "trace.json", **settings)
    return json.loads((folder / f"trace.rank{me.rank}.json").read_text())


def slices(document: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] == category]


CASES = [
    (Case(), "estimated"),
    (Case({"static_graph": True}), "estimated"),
    (Case({"find_unused_parameters": True}, branches="same"), "estimated"),
    (Case(hook="fp16"), "seen: launch and end"),
    (Case(accumulation=2), "estimated"),
    (Case({"gradient_as_bucket_view": True}, accumulation=2, hook="allreduce"), "launch and end"),
]


@pytest.mark.parametrize("case, known", CASES, ids=str)
def test_the_timeline_shows_buckets_and_the_wait_for_them(
    case: Case, known: str, tmp_path: Path
) -> None:
    with ranks.started(2, lambda me: traced(me, case, tmp_path, schedule="comm")) as job:
        documents = job.results()
    for rank, each in enumerate(documents):
        assert each["otherData"]["rank"] == rank
        assert {e["pid"] for e in each["traceEvents"]} == {rank}
        buckets, waits = slices(each, "allreduce"), slices(each, "wait")
        steps = slices(each, "step")
        assert len(steps) == STEPS
        for step in steps[4:]:  # by then DDP has told how it has arranged its buckets
            begin, end = step["ts"], step["ts"] + step["dur"]
            mine = [b for b in buckets if begin <= b["ts"] < end]
            waited = [w for w in waits if begin <= w["ts"] < end]
            names = {b["name"] for b in mine}
            if case.branches == "all":  # else the gradient that completes one may never come
                assert names == {f"bucket {i}" for i in range(len(mine))}
            assert len(names) == len(mine) > 2
            assert all(known in b["args"]["known"] for b in mine)
            assert len(waited) == 1
            over = waited[0]["ts"] + waited[0]["dur"] + 1e-2
            assert all(b["ts"] <= over for b in mine)


def test_comm_releases_as_buckets_are_launched_and_all_when_nothing_is_left_to_compute(
    tmp_path: Path,
) -> None:
    def code(me: Me) -> tuple[list[list[Event]], int]:
        events: list[list[Event]] = []
        held: list[int] = []

        def step_ended(handle: lightck.Handle) -> None:
            assert internals.pipeline(handle).trace is not None
            events.append(list(internals.pipeline(handle).trace.events))
            handle.wait()
            newest = internals.pipeline(handle).newest
            held.append(0 if newest is None else newest.held_bytes)

        train(
            me,
            Case(),
            tmp_path,
            schedule="comm",
            trace=True,
            each_step=step_ended,
        )
        return events, held[-1]

    with ranks.started(2, code) as job:
        ((mine, held), _) = job.results()
    last = [e for e in mine[-1] if e not in mine[-2]]
    released = {e.begin_ns: e.amount for e in last if e.kind == "released"}
    (wait,) = [e for e in last if e.kind == "wait"]
    launches = [e.begin_ns for e in last if e.kind == "launched"]
    assert [amount for at, amount in released.items() if at < launches[0]][-1] == 0
    after = [amount for at, amount in released.items() if launches[0] <= at < wait.begin_ns]
    assert 0 < after[0] < after[-1]
    assert max(amount for at, amount in released.items() if at <= wait.end_ns) == held > after[0]


def test_the_wait_is_told_before_ddp_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction is over only when it was told: were that any later, DDP would wait for ever."""
    held: list[tuple[Any, torch.Tensor]] = []

    def hold(state, bucket):  # type: ignore[no-untyped-def]
        held.append((torch.futures.Future(), bucket.buffer()))
        return held[-1][0]

    def let_go(self: DdpCommunication) -> None:
        while held:
            future, value = held.pop()
            future.set_result(value)

    def code(me: Me) -> None:
        monkeypatch.setattr(DdpCommunication, "gradients_complete", let_go)
        module, optimizer = made(Case())
        with lightck.attach(module, optimizer, tmp_path / "run"):
            module.register_comm_hook(None, hold)
            for step in range(3):
                micro_batch(Case(), module, me.rank, step, 0)
                optimizer.step()
                optimizer.zero_grad()

    with ranks.started(1, code, timeout_s=20) as job:
        job.results()


def event(kind: str, name: str, begin: int, end: int | None = None, amount: int = 0) -> Event:
    return Event(kind, name, begin, begin if end is None else end, 1, 1, amount)


def drawn(events: list[Event]) -> list[tuple[str, float, float]]:
    found = Recorded(events, [], np.zeros(0, SPAN_DTYPE), 0, 1, {})
    return [(s["name"], s["ts"], s["ts"] + s["dur"]) for s in slices(document(found), "allreduce")]


def test_ends_that_were_not_seen_are_estimated_one_after_the_other() -> None:
    bars = drawn(
        [
            event("launched", "bucket 0", 1000, amount=100),
            event("launched", "bucket 1", 2000, amount=300),
            event("launched", "bucket 2", 9000, amount=100),
            event("wait", "wait", 9000, 11000),
        ]
    )
    # The link moves 500 bytes from 1000 to 11000, if it never idles: 20 ns a byte.
    assert [bar[0] for bar in bars] == ["bucket 0", "bucket 1", "bucket 2"]
    assert [end * 1000 for _, _, end in bars] == pytest.approx([3000, 9000, 11000], abs=3)
    assert [begin * 1000 for _, begin, _ in bars] == pytest.approx([1000, 3000, 9000], abs=3)


def test_a_bucket_is_drawn_from_when_the_one_before_has_landed() -> None:
    bars = drawn(
        [
            event("allreduce", "bucket 1", 1500, 9000, 10),
            event("allreduce", "bucket 0", 1000, 4000, 10),
        ]
    )
    assert bars == [("bucket 0", 1.0, 4.0), ("bucket 1", 4.0, 9.0)]


def test_a_picture_has_a_row_for_the_reduction(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from lightck.cli import timeline_plot

    with ranks.started(2, lambda me: traced(me, Case(), tmp_path, schedule="comm")) as job:
        job.results()
    shown = timeline_data.read(tmp_path / "trace.rank0.json")
    assert timeline_data.REDUCTION in shown.tracks
    timeline_plot.draw(shown, tmp_path / "picture.svg", ".svg")
    text = (tmp_path / "picture.svg").read_text()
    assert timeline_data.REDUCTION in text and ">wait<" in text


def test_a_wait_is_a_phase_of_its_own_in_the_table(tmp_path: Path) -> None:
    with ranks.started(2, lambda me: traced(me, Case(), tmp_path)) as job:
        job.results()
    shown = timeline_data.read(tmp_path / "trace.rank1.json")
    assert all(timeline_data.row_of(shown, step)["wait"] > 0 for step in shown.steps)


def test_without_data_parallel_nothing_is_listened_to(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, optimizer, tmp_path / "run", schedule="comm") as handle:
        hooks = getattr(model.weight, "_post_accumulate_grad_hooks")  # noqa: B009 - torch's own
        assert len(hooks) == 1, "that of the layer"
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.wait()
        assert handle.stats().captured >= 2
