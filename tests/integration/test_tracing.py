"""Traces of real training: every step has its phases, every byte its copy; off, nothing is kept."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.loop import trace_listener
from lightck.loop.checkpointer import Checkpointer
from lightck.tracing import perfetto, trace
from support import internals, processes, proof
from support.loops import adam_loop, attach, mlp, train

Document = dict[str, Any]


def bars(document: Document, *kinds: str, **args: Any) -> list[dict[str, Any]]:
    return [
        e
        for e in document["traceEvents"]
        if e["ph"] == "X"
        and e["cat"] in kinds
        and all(e["args"].get(name) == value for name, value in args.items())
    ]


def traced(path: Path, steps: int, out: Path, **settings: Any) -> Document:
    train(path, adam_loop(), steps, trace=out, **settings)
    document: Document = json.loads(out.read_text())
    return document


@pytest.mark.parametrize("medium", ["memory", "file"])
def test_every_step_has_its_phases_and_every_byte_its_copy(
    run_dir: Path, disk_dir: Path, tmp_path: Path, medium: str
) -> None:
    where = run_dir if medium == "memory" else disk_dir
    # What an idle worker has in hand for long is taken over, and copied twice.
    settings = {"chunk_bytes": 4096, "slots": 3, "priority": "normal"}
    document = traced(where, 6, tmp_path / "run.json", **settings)
    payload = lightck.snapshots(where)["payload_bytes"].to_pylist()[0]
    assert document["otherData"]["lost"] == 0
    for step in range(1, 7):
        (whole,) = bars(document, "step", step=step)
        begin, end = whole["ts"], whole["ts"] + whole["dur"]
        for phase in ("forward", "backward", "update"):
            (bar,) = bars(document, phase, step=step)
            assert begin <= bar["ts"] <= bar["ts"] + bar["dur"] <= end + 1
        causes = [bar["name"] for bar in bars(document, "lightck", step=step)]
        assert causes.count("fence") == 1 and "step" in causes
        layers = [bar["name"] for bar in bars(document, "gradient", step=step)]
        assert sorted(layers) == ["0", "1"]
    kinds = ("copy",) if medium == "memory" else ("copy", "drain")
    for kind in kinds:
        for step in range(1, 7):  # the last one comes with close()
            copies = bars(document, kind, snapshot=step)
            assert sum(bar["args"]["bytes"] for bar in copies) == payload
            assert {bar["name"] for bar in copies} == {"0", "1"}
    committed = [bar["args"]["snapshot"] for bar in bars(document, "committed")]
    assert committed == [1, 2, 3, 4, 5, 6]
    assert (len(bars(document, "drain")) > 0) == (medium == "file")


def test_micro_batches_are_forwards_of_their_own(run_dir: Path, tmp_path: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, trace=True) as handle:
        for _ in range(3):
            for _ in range(2):
                loop.forward().backward()
            loop.update()
        document = json.loads(handle.trace(tmp_path / "run.json").read_text())
    for step in (1, 2, 3):
        assert len(bars(document, "forward", step=step)) == 2
        assert len(bars(document, "backward", step=step)) == 2


def test_steps_that_the_loop_marks_are_steps_too(run_dir: Path, tmp_path: Path) -> None:
    model = mlp(8, 2)
    with lightck.attach(model, None, run_dir, trace=tmp_path / "run.json") as handle:
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
            handle.before_update()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            handle.after_update()
    document = json.loads((tmp_path / "run.json").read_text())
    assert [bar["args"]["step"] for bar in bars(document, "step")] == [1, 2, 3]
    assert [bar["args"]["step"] for bar in bars(document, "update")] == [1, 2, 3]


def test_copies_are_released_in_a_few_parts_however_many_layers_there_are(run_dir: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(97)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = {"schedule": "backward", "trace": True, "failure": "off"}
    with lightck.attach(model, optimizer, run_dir, **settings) as handle:
        for _ in range(4):
            model(torch.ones(1, 9)).sum().backward()
            window = internals.window(handle)  # nothing is left to the fence
            assert window is None or window.released_bytes == window.held_bytes
            optimizer.step()
            handle.wait()  # else one may slip
        assert internals.pipeline(handle).trace is not None
        events = [
            e
            for e in internals.pipeline(handle).trace.events
            if e.kind == "released" and e.step == 3
        ]
    amounts = [e.amount for e in events]
    payload = lightck.snapshots(run_dir)["payload_bytes"].to_pylist()[-1]
    assert 4 < len(amounts) <= 1 + 16 and amounts == sorted(set(amounts))
    assert amounts[0] == payload // 3 and amounts[-1] == payload


def test_a_torn_and_a_slipped_snapshot_are_marked(run_dir: Path, tmp_path: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, trace=True, on_error=lambda error: None) as handle:
        loop.run(2)
        loop.forward().backward()
        with torch.no_grad():
            loop.model[0].bias.add_(1)
        loop.update()
        pipeline = internals.pipeline(handle)
        busy = pipeline.region.begin
        pipeline.region.begin = lambda *_, **__: None  # type: ignore[method-assign]
        loop.run(1)
        pipeline.region.begin = busy  # type: ignore[method-assign]
        document = json.loads(handle.trace(tmp_path / "run.json").read_text())
        handle._reporter.take()
    marks = {e["name"]: e["args"] for e in document["traceEvents"] if e["ph"] == "i"}
    assert marks["torn 2"]["why"] == "model/0.bias"
    assert marks["slipped 3"]["why"] == "every slot is busy"


def test_the_trace_may_be_written_at_any_time_and_after_the_close(
    run_dir: Path, tmp_path: Path
) -> None:
    loop = adam_loop()
    handle = attach(run_dir, loop, trace=True)
    loop.run(2)
    first = json.loads(handle.trace(tmp_path / "a.json").read_text())
    loop.run(2)
    handle.close()
    second = json.loads(handle.trace(str(tmp_path / "b.json")).read_text())
    assert len(bars(first, "step")) == 2 and len(bars(second, "step")) == 4
    assert len(bars(second, "committed")) == handle.stats().committed


def test_an_exception_in_training_leaves_the_trace_and_itself(
    run_dir: Path, tmp_path: Path
) -> None:
    loop = adam_loop()
    with pytest.raises(ZeroDivisionError):
        with attach(run_dir, loop, trace=tmp_path / "run.json"):
            loop.run(3)
            _ = 1 / 0
    document = json.loads((tmp_path / "run.json").read_text())
    assert len(bars(document, "step")) == 3


def test_a_trace_that_cannot_be_written_costs_no_snapshot_and_is_reported(
    run_dir: Path, tmp_path: Path
) -> None:
    loop, folder = adam_loop(), tmp_path / "gone"
    folder.mkdir()
    errors: list[BaseException] = []
    handle = attach(run_dir, loop, trace=folder / "run.json", on_error=errors.append)
    loop.run(2)
    folder.rmdir()
    with pytest.raises(lightck.LightckError, match=r"cannot write the trace to .*run\.json"):
        handle.close()
    assert len(errors) == 1
    assert handle.last_committed_step == 2


def test_a_trace_that_could_never_be_written_is_an_error_at_attach(run_dir: Path) -> None:
    with pytest.raises(lightck.ConfigError, match="there is no folder /no/where"):
        attach(run_dir, adam_loop(), trace="/no/where/run.json")
    with pytest.raises(lightck.ConfigError, match="trace = 7"):
        attach(run_dir, adam_loop(), trace=7)


def test_without_a_trace_there_is_nothing_to_write_and_nothing_is_kept(
    run_dir: Path, tmp_path: Path
) -> None:
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        tracemalloc.start()
        loop.run(3)
        taken = tracemalloc.take_snapshot()
        tracemalloc.stop()
        names = (trace.__file__, trace_listener.__file__, perfetto.__file__)
        allocated = taken.filter_traces([tracemalloc.Filter(True, name) for name in names])
        assert not allocated.statistics("lineno")
        assert isinstance(internals.hooks(handle).listener, Checkpointer), (
            "something stands in between"
        )
        assert (
            internals.checkpointer(handle).stall_timer.trace is None
            and internals.pipeline(handle).trace is None
        )
        assert len(internals.pipeline(handle).pool.trace()[0]) == 0
        with pytest.raises(lightck.LightckError, match="attach with trace=True"):
            handle.trace(tmp_path / "run.json")


def test_tracing_changes_nothing_in_what_is_stored(run_dir: Path, tmp_path: Path) -> None:
    plain, other = adam_loop(), adam_loop()
    other.model.load_state_dict(plain.model.state_dict())
    train(run_dir, plain, 4)
    train(run_dir.with_name("traced"), other, 4, trace=tmp_path / "run.json")
    assert plain.seen == other.seen
    other.check(run_dir.with_name("traced"), [3, 4])


def test_no_hook_is_left_behind(run_dir: Path) -> None:
    loop = adam_loop()
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    with attach(run_dir, loop, trace=True):
        loop.run(2)
        assert len(torch.nn.modules.module._global_forward_pre_hooks) > before
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before
    assert not any(module._forward_hooks for module in loop.model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in loop.model.parameters())


def test_a_forked_child_cannot_write_the_parents_trace(run_dir: Path, tmp_path: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop, trace=True) as handle:
        loop.run(2)

        def child() -> str:
            loop.run(1)
            with pytest.raises(lightck.LightckError, match="forked child") as told:
                handle.trace(tmp_path / "child.json")
            return str(told.value)

        assert str(os.getpid()) in processes.run(child)
    assert not (tmp_path / "child.json").exists()


def test_a_small_model_has_few_events_to_note_per_step(run_dir: Path) -> None:
    """Their cost is recorded, not judged: no test depends on timing."""
    loop = adam_loop(width=256)
    with attach(run_dir, loop, trace=True) as handle:
        kept = internals.pipeline(handle).trace
        assert kept is not None
        loop.run(20)
        events = [e for e in kept.events if e.step > 2]
        steps = [e for e in events if e.kind == "step"]
        spent = sum(e.end_ns - e.begin_ns for e in steps) / len(steps)
        other = trace.Trace({}, 1)
        begin = trace.now_ns()
        for _ in range(10_000):
            other.note("tick", "name", trace.now_ns())
        each = (trace.now_ns() - begin) / 10_000
        share = each * len(events) / len(steps) / spent
    proof.record(
        "tracing",
        {
            "events_per_step": len(events) / len(steps),
            "ns_per_event": each,
            "step_us": spent / 1e3,
            "share_of_step": share,
        },
    )
    assert len(events) / len(steps) < 100, "more than a small model has to tell"
