"""Not every end of a program is a failure of the training; some work is done at its exit."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rescue import Broken, attach, counting_loop

import lightck
from lightck import handle as handle_module
from lightck.loop.checkpointer import Checkpointer
from lightck.loop.requests import Requests
from support import internals
from support.loops import Loop, adam_loop, mlp, of_live, steps_at


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the reasons of the saves just in time."""
    texts = [record.getMessage() for record in caplog.records]
    return [text.split()[2] for text in texts if text.startswith("lightck: saved reason=")]


@pytest.mark.parametrize("code", [None, 0, False])
def test_an_exit_that_says_all_is_well_closes_the_handle(
    run_dir: Path, caplog: pytest.LogCaptureFixture, code: Any
) -> None:
    loop = counting_loop()
    with pytest.raises(SystemExit), attach(run_dir, loop) as handle:
        loop.run(3)
        loop.note()
        sys.exit(code)
    assert handle.last_committed_step == 3
    assert reasons(caplog) == []
    loop.check(run_dir, [3])


@pytest.mark.parametrize("code", [1, "it is broken"])
def test_any_other_exit_is_a_failure(
    run_dir: Path, caplog: pytest.LogCaptureFixture, code: Any
) -> None:
    loop = counting_loop()
    with pytest.raises(SystemExit), attach(run_dir, loop):
        loop.run(3)
        loop.note()
        sys.exit(code)
    assert reasons(caplog) == ["reason=SystemExit"]
    loop.check(run_dir, [3])


def test_the_exit_that_a_signal_s_handler_asks_for_is_none_of_the_loop_s(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other ranks may know nothing of it: they are not waited for as at a common end."""
    loop = counting_loop()
    with pytest.raises(SystemExit), attach(run_dir, loop) as handle:
        loop.run(3)
        loop.forward()
        assert internals.guard(handle) is not None
        internals.guard(handle)._signalled_at = 3  # as when SIGTERM was answered
        sys.exit(0)
    assert reasons(caplog) == ["reason=SystemExit"]


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_was_saved_at_an_exception_is_not_waited_for_at_the_exit(
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    goes_on: bool,
) -> None:
    """The test calls the interpreter's hook by hand; training may go on after that."""
    left: list[float] = []
    original = Requests.settle_for_close

    def settle(requests: Requests, deadline: float, *, last_step: bool) -> None:
        left.append(deadline - time.monotonic())
        original(requests, deadline, last_step=last_step)

    monkeypatch.setattr(Requests, "settle_for_close", settle)
    monkeypatch.setattr(sys, "__excepthook__", lambda *about: None)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    loop = counting_loop()
    handle = attach(run_dir, loop, close_timeout_s=1000.0)
    loop.run(3)
    loop.forward().backward()
    sys.excepthook(Broken, Broken(), None)
    if goes_on:
        loop.update()
        loop.note()
    handle._at_exit()
    assert reasons(caplog) == ["reason=Broken", *(["reason=exit"] if goes_on else [])]
    assert (left[0] > handle_module.FAILED_S) is goes_on
    assert steps_at(run_dir)[-1] == 3 + goes_on


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("failure", ["jit", "off"])
def test_a_step_whose_end_an_interrupt_cut_off_is_no_last_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, failure: str, fused: bool
) -> None:
    """Its parameters would be saved with the data position of the step before."""
    model = mlp(16, 2)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), width=16)

    def interrupted(checkpointer: Checkpointer) -> None:
        raise KeyboardInterrupt

    handle = attach(run_dir, loop, failure=failure)
    loop.run(3)
    monkeypatch.setattr(Checkpointer, "_step_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(1)
    monkeypatch.undo()
    assert handle.step == 4
    handle.close()
    assert steps_at(run_dir) == []


def test_an_exit_without_close_saves_the_last_step_at_once(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    loop = adam_loop()
    handle = attach(run_dir, loop)
    loop.run(2)
    loop.note()
    handle._at_exit()
    assert reasons(caplog) == ["reason=exit"]
    loop.check(run_dir, [2])


def test_a_close_right_after_an_early_restore_commits_what_the_loop_has_made_up_for(
    run_dir: Path,
) -> None:
    """The failure came behind the last step of all: there is no other to commit it with."""
    loop = counting_loop()
    with pytest.raises(Broken), attach(run_dir, loop):
        loop.run(3)
        raise Broken
    again = counting_loop()
    info = lightck.restore(again.model, list(again.optimizers), run_dir)
    assert info is not None and (info.step, info.early) == (3, True)
    with attach(run_dir, again) as handle:
        with torch.no_grad():
            for parameter in again.model.parameters():
                parameter.clamp_(-0.01, 0.01)
    assert handle.last_committed_step == 3
    last = counting_loop()
    info = lightck.restore(last.model, list(last.optimizers), run_dir)
    assert info is not None and (info.step, info.early) == (3, False)
    assert of_live(last.model, last.optimizers) == of_live(again.model, again.optimizers)
    with attach(run_dir, last) as handle:
        pass
    assert handle.stats().captured == 0, "it is there"
