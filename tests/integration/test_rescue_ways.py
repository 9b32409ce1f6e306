"""Just in time beside other ways of training: unseen forwards, other threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rescue import Broken, attach, check, counting_loop

import lightck
from lightck.types import Saved
from support import internals
from support.loops import Loop, mlp, of_live, steps_at

SOON_S = 100.0


def layered() -> Loop:
    model = mlp(16, 3)
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_no_hook_sees_a_forward_buffers_are_saved_as_the_step_had_ended(
    run_dir: Path, where: str
) -> None:
    loop = counting_loop()
    with (
        pytest.warns(UserWarning, match="saw no forward"),
        pytest.raises(Broken),
        attach(run_dir, loop) as handle,
    ):
        internals.hooks(handle).arm_forward = lambda: None  # type: ignore[method-assign]
        internals.hooks(handle).disarm_forward()
        loop.run(3)
        loss = loop.forward()
        if where == "backward":
            loss.backward()
        raise Broken
    check(run_dir, loop, 3)


def test_saves_from_another_thread_at_any_time_never_mix_steps(run_dir: Path) -> None:
    """Hundreds of saves beside a training with periodic snapshots: whole, or not there."""
    loop, saved, stop = counting_loop(), [], threading.Event()
    failures: list[BaseException] = []

    def save() -> None:
        try:
            while not stop.is_set():
                saved.append(handle.snapshot_now("any time"))
                stop.wait(0.003)  # whoever takes the lock again at once lets nobody else have it
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    with attach(run_dir, loop, policy=3, slots=4, schedule="backward", proof=True) as handle:
        loop.run(2)
        worker = threading.Thread(target=save)
        worker.start()
        steps = 0
        while worker.is_alive() and (steps < 150 or len(saved) <= 10):
            loop.run(1)
            steps += 1
        stop.set()
        worker.join(SOON_S)
        stats = handle.stats()
        loop.note()
    assert not failures
    assert len(saved) > 10
    assert all(each.fresh for each in saved if not each.why)
    assert (stats.torn, stats.failed) == (0, 0)
    exact = [each for each in saved if each.fresh and not each.early]
    assert exact
    for step in steps_at(run_dir):
        assert lightck.load(run_dir, step)["step"] == step
    loop.check(run_dir, steps_at(run_dir))


@pytest.mark.parametrize("begun", [False, True], ids=["before the forward", "in the forward"])
def test_what_the_loop_tears_just_in_time_is_tried_again_or_refused_and_no_fault_of_its(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    loop, found, faults = counting_loop(), list[Saved](), list[BaseException]()
    bias = loop.model.inner.bias
    with attach(run_dir, loop, on_error=faults.append) as handle:
        loop.run(3)
        pipeline, edits = internals.pipeline(handle), [1.0]
        fence = pipeline.fence

        def torn(optimizer: int | None = None) -> bool:
            if pipeline.window is not None and edits:
                with torch.no_grad():
                    bias.add_(edits[0])
                edits.clear()  # behind the edit: the loop goes on when it sees none
            return fence(optimizer)

        if begun:
            loop.forward()
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "fence", torn)
            worker = threading.Thread(target=lambda: found.append(handle.snapshot_now("now")))
            worker.start()
            until = time.monotonic() + SOON_S
            while not begun and edits and time.monotonic() < until:
                time.sleep(0.01)
            if not begun:
                loop.forward()  # what the loop does with its weights before is no early step
            worker.join(SOON_S)
        (saved,) = found
        assert not edits and (saved.fresh, saved.early) == (not begun, False)
        if begun:
            assert "model/inner.bias" in saved.why
        assert (
            faults,
            handle.stats().torn,
            internals.checkpointer(handle).outcomes.synchronous,
        ) == (
            [],
            0,
            False,
        )
        if not begun:
            check(run_dir, loop, 3)
        handle.detach()


def test_state_that_cannot_be_taken_twice_leaves_nothing_open(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, found = counting_loop(), list[Saved]()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        checkpointer = internals.checkpointer(handle)
        collect = checkpointer.boundary_state.collect

        def fails_later(**how: Any) -> Any:
            if checkpointer.pipeline.window is not None:
                raise KeyError("gone")
            return collect(**how)

        monkeypatch.setattr(checkpointer.boundary_state, "collect", fails_later)
        worker = threading.Thread(target=lambda: found.append(handle.snapshot_now("now")))
        worker.start()
        worker.join(SOON_S)
        assert not found[0].fresh and "gone" in found[0].why
        assert checkpointer.pipeline.window is None
        monkeypatch.undo()
        handle.detach()


_SCRIPT = """
import sys, torch, lightck
from lightck.types import Failure
class Never:
    def due(self, moment): return False
def hook(kind, error, trace):
    print("earlier hook:", kind.__name__, flush=True)
sys.excepthook = hook
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handle = lightck.attach(model, optimizer, sys.argv[1], policy=Never(), failure=Failure(
    signals=(), on_failure=lambda saved: print("saved", saved.reason, saved.step, flush=True)))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
model(torch.ones(2, 4))
{end}
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise KeyError('gone')", "saved KeyError 3\nearlier hook: KeyError\n"),
        ("sys.exit(3)", ""),
        ("", ""),
    ],
)
def test_an_end_without_close_saves_the_last_step_and_earlier_hooks_run(
    run_dir: Path, end: str, said: str
) -> None:
    script = [sys.executable, "-c", _SCRIPT.replace("{end}", end), str(run_dir)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=250)
    assert done.stdout == said, done.stderr
    assert steps_at(run_dir) == [3]


def test_an_exception_after_a_step_that_was_due_saves_what_is_open(run_dir: Path) -> None:
    loop = layered()
    with pytest.raises(Broken), attach(run_dir, loop, policy=1, slots=8) as handle:
        loop.run(3)
        loop.forward()
        assert internals.window(handle) is not None
        raise Broken
    check(run_dir, loop, 3)


def test_a_save_that_comes_during_another_one_gives_the_same_snapshot(run_dir: Path) -> None:
    loop, found = counting_loop(), list[Saved]()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.forward()
        workers = [
            threading.Thread(target=lambda i=i: found.append(handle.snapshot_now(str(i))))
            for i in range(4)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(SOON_S)
        assert [(s.step, s.fresh, s.early) for s in found] == [(3, True, False)] * 4
        assert handle.stats().captured == 1
        handle.detach()
    assert of_live(loop.model, loop.optimizers).keys() == loop.seen[3].keys()


def test_a_loop_that_is_over_is_saved_at_its_last_step_without_waiting(run_dir: Path) -> None:
    """A signal that comes shortly before close: the boundary that a save waits for never comes."""
    loop, found = counting_loop(), list[Saved]()
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.note()
        handle._rescue.begin_close()
        worker = threading.Thread(target=lambda: found.append(handle.snapshot_now("SIGTERM")))
        worker.start()
        worker.join(SOON_S)
        handle.detach()
    assert [(s.step, s.fresh, s.early, s.why) for s in found] == [(3, True, True, "")]
    check(run_dir, loop, 3)
