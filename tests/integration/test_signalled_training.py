"""A training that gets a signal, or a notice, and goes on after a restart as if nothing had come.

No step is ever due: whatever a restart finds was saved just in time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer would load on first use, in every child by itself
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightck
from lightck.types import Failure
from support.processes import Child, Parent, run
from support.proof import record
from support.watched import process, stuck

AT, LAST = 4, 7
NEVER = 10**6
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
PHASES = ["forward", "backward", "step end", "loop"]
Losses = dict[int, str]
Phase = Callable[[str], object]


class Training:
    """Trains with dropout and BatchNorm; between step end and forward start weights are clipped."""

    def __init__(self, at: Phase = lambda phase: None) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.step, self.at, self.losses = 0, at, Losses()
        self.model[0].register_forward_hook(lambda *_: self._reached("forward"))
        self.model[3].weight.register_hook(lambda gradient: self._reached("backward"))
        self.optimizer.register_step_pre_hook(lambda *_: self._reached("update"))

    def _reached(self, phase: str) -> None:
        if self.step == AT - 1:
            self.at(phase)

    def restore(self, path: Path) -> lightck.RestoreInfo | None:
        torch.manual_seed(6)
        info = lightck.restore(self.model, self.optimizer, path, extras={"lr": self.schedule})
        if info is None:
            torch.manual_seed(7)
            return None
        self.step = info.step
        if info.early:
            self._pending()
        return info

    def attach(self, path: Path, **failure: Any) -> lightck.Handle:
        failure = {"grace_s": 20.0, **failure}
        return lightck.attach(
            self.model,
            self.optimizer,
            path,
            policy=NEVER,
            extras={"lr": self.schedule},
            failure=Failure(**failure),
            threads=1,
            proof=True,
        )

    def run(self, last: int) -> None:
        while self.step < last:
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(6, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.losses[self.step] = loss.item().hex()
            if self.step == AT:
                self.at("step end")
            self._pending()
            if self.step == AT:
                self.at("loop")

    def _pending(self) -> None:
        if self.schedule.last_epoch < self.step:  # an early snapshot may be of before or after
            self.schedule.step()

    def state(self) -> dict[str, bytes]:
        return {k: v.numpy().tobytes() for k, v in self.model.state_dict().items()}


@cache
def golden() -> tuple[Losses, dict[str, bytes]]:
    def plain() -> Any:
        training = Training()
        torch.manual_seed(7)
        training.run(LAST)
        return training.losses, training.state()

    return run(plain)


def second_life(path: Path, kind: type[Training] = Training) -> tuple[int | None, bool]:
    """The step that was restored, and whether early; everything from there on is golden."""

    def code() -> Any:
        training = kind()
        info = training.restore(path)
        with training.attach(path):
            training.run(LAST)
        return info and info.step, bool(info and info.early), training.losses, training.state()

    step, early, losses, state = run(code)
    wanted, last = golden()
    assert losses == {t: wanted[t] for t in range((step or 0) + 1, LAST + 1)}
    assert state == last
    return step, early


def first_life(
    path: Path,
    number: int,
    phase: str,
    then: Callable[[], object],
    kind: type[Training] = Training,
    **failure: Any,
) -> Callable[[Parent], Any]:
    """Trains, sends itself a signal in one phase, and goes on with `then` there."""

    def code(parent: Parent) -> Any:
        def reached(now: str) -> None:
            if now == phase:
                os.kill(os.getpid(), number)
                then()

        training = kind(reached)
        training.restore(path)
        try:
            with training.attach(path, **failure):
                training.run(10**9)
        except KeyboardInterrupt:
            return "interrupted"

    return code


def ended(child: Child) -> int:
    return child.join()


def step_of(phase: str) -> int:
    return AT - 1 if phase in ("forward", "backward") else AT


@pytest.mark.parametrize("then", [stuck, lambda: time.sleep(600)], ids=["stuck", "sleep"])
@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_loses_no_more_than_the_minibatch_that_was_running(
    region_dir: Path, phase: str, then: Callable[[], object]
) -> None:
    with process(first_life(region_dir, TERM, phase, then)) as child:
        assert ended(child) == -TERM
    assert second_life(region_dir) == (step_of(phase), phase in ("step end", "loop"))


def test_from_sigterm_to_the_end_of_a_stuck_process_is_no_time_at_all(region_dir: Path) -> None:
    def code(parent: Parent) -> Any:
        def reached(phase: str) -> None:
            if phase == "backward":
                parent.send("there")
                stuck()

        training = Training(reached)
        training.attach(region_dir)
        training.run(10**9)

    with process(code) as child:
        assert child.receive() == "there"
        began = time.monotonic()
        os.kill(child.pid, TERM)
        assert ended(child) == -TERM
        record("sigterm", {"ended_after_s": round(time.monotonic() - began, 3)})


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_while_training_goes_on_saves_a_step_that_is_golden(
    region_dir: Path, phase: str
) -> None:
    with process(first_life(region_dir, TERM, phase, lambda: None)) as child:
        assert ended(child) == -TERM
    step, _ = second_life_beyond(region_dir)
    assert step is not None and step >= step_of(phase)


def second_life_beyond(path: Path) -> tuple[int | None, bool]:
    """Restore as `second_life` does, a training that may be beyond the golden run's end."""
    found = lightck.snapshots(path)["step"].to_pylist()
    newest = max((step for step in found if step is not None), default=None)
    if newest is not None and newest >= LAST:
        stored = lightck.load(path, newest)

        def plain() -> Any:
            training = Training()
            torch.manual_seed(7)
            training.run(newest)
            return training.state()

        state = run(plain)
        early = lightck.snapshots(path)["early"].to_pylist()[found.index(newest)]
        if not early:
            assert {k: v.numpy().tobytes() for k, v in stored["model"].items()} == state
        return newest, bool(early)
    return second_life(path)


def test_sigterm_inside_an_update_that_never_ends_saves_no_mixture(region_dir: Path) -> None:
    with process(first_life(region_dir, TERM, "update", stuck, grace_s=0.3)) as child:
        assert ended(child) == -TERM
    assert second_life(region_dir) == (None, False)


def test_sigterm_inside_an_update_that_ends_waits_for_its_end(region_dir: Path) -> None:
    with process(first_life(region_dir, TERM, "update", lambda: None)) as child:
        assert ended(child) == -TERM
    step, _ = second_life_beyond(region_dir)
    assert step is not None and step >= AT


@pytest.mark.parametrize("phase", PHASES)
def test_sigint_interrupts_the_main_thread_when_the_step_is_saved(
    region_dir: Path, phase: str
) -> None:
    code = first_life(region_dir, INT, phase, lambda: time.sleep(600))
    with process(code) as child:
        assert child.receive() == "interrupted"
        assert ended(child) == 0
    assert second_life(region_dir) == (step_of(phase), phase in ("step end", "loop"))


@pytest.mark.parametrize("phase", ["backward", "step end"])
@pytest.mark.parametrize(("first", "second"), [(TERM, INT), (INT, TERM)])
def test_both_signals_at_once_save_the_step_and_the_more_final_one_ends_the_process(
    region_dir: Path, first: int, second: int, phase: str
) -> None:
    def then() -> None:
        os.kill(os.getpid(), second)
        stuck()

    with process(first_life(region_dir, first, phase, then)) as child:
        assert ended(child) == -TERM
    assert second_life(region_dir) == (step_of(phase), phase == "step end")


@pytest.mark.parametrize("phase", PHASES)
def test_sigusr1_saves_and_training_goes_on(region_dir: Path, phase: str) -> None:
    def code(parent: Parent) -> Any:
        def reached(now: str) -> None:
            if now == phase:
                os.kill(os.getpid(), USR1)
                parent.pause()  # a signal that comes while this waits does not end it

        def decide(saved: Any) -> None:
            parent.send((saved.reason, saved.step, saved.fresh, saved.early))

        training = Training(reached)
        training.restore(region_dir)
        training.attach(region_dir, on_failure=decide)
        training.run(LAST)
        parent.send(training.state())
        os.kill(os.getpid(), signal.SIGKILL)

    with process(code) as child:
        early = phase in ("step end", "loop")
        assert child.receive() == ("SIGUSR1", step_of(phase), True, early)
        child.let_go()
        assert child.receive() == golden()[1]
        assert ended(child) == -signal.SIGKILL
    assert second_life(region_dir) == (step_of(phase), early)


def test_a_notice_saves_and_training_goes_on(region_dir: Path, tmp_path: Path) -> None:
    def code(parent: Parent) -> Any:
        def reached(now: str) -> None:
            if now == "backward":
                (tmp_path / "preempted").touch()
                parent.pause()

        def decide(saved: Any) -> None:
            parent.send((saved.reason, saved.step, saved.fresh))

        training = Training(reached)
        training.restore(region_dir)
        training.attach(region_dir, on_failure=decide, notice=tmp_path / "preempted")
        training.run(10**9)

    with process(code) as child:
        assert child.receive() == ("notice", AT - 1, True)
        child.kill()
        assert ended(child) == -signal.SIGKILL
    assert second_life(region_dir) == (AT - 1, False)


def test_a_hang_outside_of_collectives_is_saved_at_the_generous_deadline(region_dir: Path) -> None:
    code = first_life(region_dir, 0, "backward", stuck, hang_s=2.0, hang_exit_s=0.0)
    with process(code) as child:
        assert ended(child) == 75
    assert second_life(region_dir) == (AT - 1, False)


def _leaves(number: int, frame: object) -> None:
    sys.exit(0)


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("since", [False, True], ids=["before attach", "after attach"])
def test_the_user_is_asked_once_about_a_signal_and_the_exception_that_it_raises(
    region_dir: Path, number: int, since: bool
) -> None:
    def code(parent: Parent) -> Any:
        asked: list[str] = []
        handler = signal.default_int_handler if number == INT else _leaves
        training = Training(lambda phase: os.kill(os.getpid(), number) if phase == "loop" else None)
        if not since:
            signal.signal(number, handler)
        with (
            pytest.raises((KeyboardInterrupt, SystemExit)),
            training.attach(region_dir, on_failure=lambda s: asked.append(s.reason)),
        ):
            if since:
                signal.signal(number, handler)
            training.run(10**9)
        first = [*asked]
        try:
            with training.attach(region_dir, on_failure=lambda s: asked.append(s.reason)):
                sys.exit(3)
        except SystemExit:
            return first, asked

    with process(code) as child:
        name = signal.Signals(number).name
        assert child.receive() == ([name], [name, "SystemExit"])


def test_the_same_signal_twice_in_a_row_of_lives_loses_a_minibatch_each(region_dir: Path) -> None:
    """Each life gets no further than the first forward."""
    with process(first_life(region_dir, TERM, "forward", stuck)) as child:
        assert ended(child) == -TERM
    for _ in range(2):
        with process(first_life(region_dir, TERM, "forward", stuck)) as child:
            assert ended(child) == -TERM
    assert second_life(region_dir) == (AT - 1, False)


def test_closing_gives_every_signal_back(region_dir: Path) -> None:
    def code() -> Any:
        before = [signal.getsignal(number) for number in (TERM, INT, USR1)]
        training = Training()
        with training.attach(region_dir):
            assert [signal.getsignal(number) for number in (TERM, INT, USR1)] != before
            training.run(2)
        return [signal.getsignal(number) for number in (TERM, INT, USR1)] == before

    assert run(code)


def test_workers_of_a_loader_have_the_signals_of_before(region_dir: Path) -> None:
    """A worker that gets SIGTERM dies of it, and its parent does not take it for its own."""

    class Telling(TensorDataset):
        def __getitem__(self, i: int) -> Any:
            default = signal.getsignal(TERM) == signal.SIG_DFL
            return torch.tensor([float(default), float(signal.set_wakeup_fd(-1))])

    def code() -> Any:
        training = Training()
        with training.attach(region_dir):
            loader = DataLoader(Telling(torch.zeros(4)), num_workers=2)
            return torch.cat([*loader]).tolist()

    assert run(code) == [[1.0, -1.0]] * 4
