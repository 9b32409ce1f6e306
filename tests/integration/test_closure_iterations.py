"""Forward and backward inside of `optimizer.step(closure)`: an ordinary iteration, or a mixed one.

Lightning's order is the one in mind: forward, zero_grad, backward, all inside of the closure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rescue import Broken, Counting, Never, attach, check
from torch import nn
from torch.optim import Optimizer

import lightck
from lightck.loop import hooks
from lightck.loop.hooks import CALL_FIRST
from lightck.policy import AtSteps
from lightck.region.native_region import FORWARD
from support import internals
from support.loops import Loop, Overwriter, mlp, steps_at, with_peers

SOON_S = 100.0
INSIDE = ["forward", "backward"]
Saved = lightck.types.Saved


class Closed(Loop):
    """Gives its closure to `step`; `at` is called inside, behind the forward and the backward."""

    def __init__(self, model: nn.Module, *optimizers: Optimizer, width: int = 16) -> None:
        super().__init__(model, *optimizers, width=width)
        self.at: Callable[[str], object] = lambda place: None

    def closure(self) -> torch.Tensor:
        loss = self.forward()
        self.at("forward")
        self.model.zero_grad()
        loss.backward()
        self.at("backward")
        return loss

    def run(self, steps: int, between: Callable[[int], None] = lambda step: None) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.step(self.closure)
            self.step += 1


def closed(kind: Any = torch.optim.AdamW, **options: Any) -> Closed:
    model = Counting()
    return Closed(model, kind(model.parameters(), lr=0.1, **options))


def fails(at: str) -> Callable[[str], object]:
    def fail(place: str) -> None:
        if place == at:
            raise Broken

    return fail


class ClosedOverwriter(Overwriter):
    """Overwrites everything the instant its closure returns, or before it is called."""

    def __init__(self, params: Any, *, calls_first: bool = True) -> None:
        super().__init__(params)
        self.calls_first = calls_first

    def step(self, closure: Any = None) -> None:
        if self.calls_first:
            closure()
        self.overwrite()  # torch's hooks are around `Overwriter.step` once there has been one
        if not self.calls_first:
            closure()


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for one of torch's own."""
    monkeypatch.setattr(hooks, "CALL_FIRST", frozenset({*CALL_FIRST, ClosedOverwriter}))


# ---- an ordinary iteration -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("place", INSIDE)
def test_an_exception_that_leaves_the_closure_saves_the_step_before_it(
    run_dir: Path, place: str, options: dict[str, Any]
) -> None:
    loop = closed(**options)
    with pytest.raises(Broken), attach(run_dir, loop) as handle:
        loop.run(3)
        loop.at = fails(place)
        loop.run(1)
    assert handle.stats().captured == 1
    check(run_dir, loop, 3)
    assert not lightck.snapshots(run_dir)["early"].to_pylist()[-1]


@pytest.mark.parametrize("place", INSIDE)
def test_a_training_that_catches_it_goes_on_and_its_snapshots_are_of_their_steps(
    run_dir: Path, place: str
) -> None:
    loop = closed()
    with attach(run_dir, loop, policy=1, proof=True) as handle:
        loop.run(2)
        handle.wait()
        loop.at = fails(place)
        with pytest.raises(Broken):
            loop.run(1)
        assert handle.snapshot_now("between").step == 2
        check(run_dir, loop, 2)
        loop.at = lambda place: None
        loop.run(2)
        handle.wait()
        loop.check(run_dir, [2, 3])
        assert handle.step == 4
        loop.note()
    loop.check(run_dir, [3, 4])


@pytest.mark.parametrize("place", INSIDE)
def test_who_asks_inside_of_the_closure_gets_the_step_before_it(run_dir: Path, place: str) -> None:
    """The training thread, and another one while it waits there."""
    loop, found = closed(), list[Saved]()

    def ask(now: str) -> None:
        if now == place and loop.step == 3:
            worker = threading.Thread(target=lambda: found.append(handle.snapshot_now("other")))
            worker.start()
            worker.join(SOON_S)
            found.append(handle.snapshot_now("this"))

    loop.at = ask
    with attach(run_dir, loop) as handle:
        loop.run(3)
        loop.run(1)
        handle.detach()
    assert [(s.reason, s.step, s.fresh, s.early) for s in found] == [
        ("other", 3, True, False),
        ("this", 3, True, False),
    ]
    check(run_dir, loop, 3)


def test_the_forward_inside_of_the_closure_is_an_instant_of_the_journal(run_dir: Path) -> None:
    loop, found = closed(), list[Any]()
    loop.at = lambda place: found.append(handle.region.native.read_journal())
    with with_peers(attach(run_dir, loop)) as handle:
        loop.run(3)
        handle.detach()
    kinds = [(entry.kind, entry.step, entry.early) for entry in found]
    assert kinds == [(FORWARD, step, False) for step in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize("schedule", ["eager", "backward"])
def test_copies_are_under_way_while_the_closure_runs_and_have_left_when_it_returns(
    run_dir: Path, schedule: str
) -> None:
    loop, open_at = closed(), list[tuple[str, bool]]()

    def look(place: str) -> None:
        open_at.append((place, internals.window(handle) is not None))

    def updated(*_: Any) -> None:
        open_at.append(("updated", internals.window(handle) is not None))

    loop.optimizers[0].register_step_post_hook(updated)
    with attach(run_dir, loop, policy=2, schedule=schedule) as handle:
        loop.run(2)
        loop.at = look
        open_at.clear()
        loop.run(1)
        handle.wait()
        assert open_at == [("forward", True), ("backward", True), ("updated", False)]
        assert handle.stats().captured == 1
        handle.detach()
    loop.check(run_dir, [2])


@pytest.mark.usefixtures("believed")
@pytest.mark.parametrize("placement", ["direct", "staged"])
def test_nothing_is_overwritten_before_its_copy_has_left(run_dir: Path, placement: str) -> None:
    model = mlp(64, 4)
    loop = Closed(model, ClosedOverwriter(model.parameters()), width=64)
    with attach(run_dir, loop, policy=1, placement=placement, threads=1) as handle:
        for _ in range(6):
            loop.run(1)
            handle.wait()
        assert handle.stats().torn == 0
        loop.check(run_dir, [4, 5])
        handle.detach()


def test_another_thread_waits_for_the_end_of_the_update_behind_the_closure(run_dir: Path) -> None:
    loop, found, began = closed(), list[Saved](), threading.Event()

    def save() -> None:
        began.set()
        found.append(handle.snapshot_now("other"))

    def updated(*_: Any) -> None:  # everything has changed, and lightck is not told yet
        found.append(handle.snapshot_now("this"))
        worker.start()
        began.wait(SOON_S)

    worker = threading.Thread(target=save)
    with attach(run_dir, loop) as handle:
        loop.run(2)
        hook = loop.optimizers[0].register_step_post_hook(updated)
        loop.run(1)
        hook.remove()
        loop.forward()
        worker.join(SOON_S)
        handle.detach()
    assert [(s.reason, s.step, s.fresh) for s in found] == [
        ("this", None, False),
        ("other", 3, True),
    ]
    assert "half done" in found[0].why
    check(run_dir, loop, 3)


def test_micro_batches_that_no_step_takes_belong_to_the_iteration_of_the_one_that_does(
    run_dir: Path,
) -> None:
    """Lightning accumulates like this: the closure is called by itself, then by the optimizer."""
    loop = closed()

    def iterate() -> None:
        loop.closure()
        loop.closure()
        loop.run(1)

    with pytest.raises(Broken), attach(run_dir, loop, policy=2) as handle:
        for _ in range(3):
            iterate()
        assert handle.step == 3
        loop.closure()
        loop.at = fails("backward")
        iterate()
    check(run_dir, loop, 3)
    loop.check(run_dir, [2, 3])


@pytest.mark.parametrize("asked", [0, 1], ids=["first", "second"])
def test_several_optimizers_with_a_closure_each_make_one_step(run_dir: Path, asked: int) -> None:
    """All is of the last step in the first optimizer's closure, between two in the second one's."""
    model = mlp(16, 2)
    halves = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in model]
    loop, found, places = Closed(model, *halves), list[Saved](), list[str]()

    def ask(place: str) -> None:
        places.append(place)
        if len(places) == 2 * asked + 1:
            found.append(handle.snapshot_now(place))

    with attach(run_dir, loop) as handle:
        loop.run(3)
        assert handle.step == 3
        loop.at = ask
        loop.run(1)
        handle.detach()
    (saved,) = found
    if asked == 0:
        check(run_dir, loop, 3)
    else:
        assert not saved.fresh and "half done" in saved.why


def test_an_optimizer_that_was_not_given_to_attach_is_found_at_its_closure(run_dir: Path) -> None:
    loop = closed()
    with pytest.raises(Broken), lightck.attach(loop.model, None, run_dir, policy=Never()):
        loop.run(3)
        loop.at = fails("backward")
        loop.run(1)
    check(run_dir, loop, 3)


def test_a_scaler_passes_a_closure_on_and_what_it_leaves_out_is_a_step(run_dir: Path) -> None:
    """Enabled, it leaves out what is not finite, and calls no closure then."""
    loop, (optimizer,) = (made := closed()), made.optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attach(run_dir, loop) as handle:
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer, loop.closure)
        loop.step += 1
        for scale in (1.0, float("inf")):
            scaler.scale(loop.forward() * scale).backward()
            scaler.step(optimizer, loop.closure)
            scaler.update()
            optimizer.zero_grad()
            loop.step += 1
        assert handle.step == loop.step == 3
        loop.at = lambda place: handle.snapshot_now(place)
        loop.run(1)
        handle.detach()
    check(run_dir, loop, 3)


def test_a_weight_that_is_moved_inside_of_the_closure_tears_the_snapshot(run_dir: Path) -> None:
    loop = closed()

    def move(place: str) -> None:
        if place == "backward" and loop.step == 2:
            with torch.no_grad():
                loop.model.inner.weight.add_(1)

    loop.at = move
    torn = pytest.raises(lightck.TornSnapshotError, match="inner.weight changed")
    with torn, attach(run_dir, loop, policy=1, on_error=lambda error: None) as handle:
        loop.run(2)
        handle.wait()
        loop.run(2)
        handle.wait()
        assert handle.stats().torn == 1
        loop.check(run_dir, [1, 3])


# ---- a mixed one ---------------------------------------------------------------------------------


class Derived(torch.optim.AdamW):
    """May do anything before it calls its closure."""


def hooked(params: Any, lr: float) -> Optimizer:
    """Somebody's hook may do anything, too."""
    optimizer = torch.optim.AdamW(params, lr=lr)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.filterwarnings("ignore:lightck saw no forward")
@pytest.mark.parametrize(
    "kind", [torch.optim.LBFGS, Derived, hooked], ids=lambda kind: kind.__name__
)
def test_inside_of_a_closure_that_may_be_called_in_an_update_nothing_is_saved(
    run_dir: Path, kind: Any
) -> None:
    loop, found = closed(kind), list[Saved]()
    with attach(run_dir, loop, policy=AtSteps([2])) as handle:
        loop.run(2)
        loop.note()
        loop.run(1)
        loop.at = lambda place: found.append(handle.snapshot_now(place))
        loop.run(1)
        loop.at = fails("backward")
        with pytest.raises(Broken):
            loop.run(1)
        found.append(handle.snapshot_now("behind"))
        handle.detach()
    assert len(found) >= 3 and not any(saved.fresh for saved in found)
    loop.check(run_dir, [2])  # captured where `step` was called


@pytest.mark.usefixtures("believed")
@pytest.mark.filterwarnings("ignore:lightck saw no forward")
def test_what_an_optimizer_has_changed_before_its_closure_is_in_no_snapshot(run_dir: Path) -> None:
    """It was believed, and is found out: from then on its snapshots are taken before its steps."""
    model = mlp(16, 2)
    optimizer = ClosedOverwriter(model.parameters(), calls_first=True)
    loop, found = Closed(model, optimizer), list[Saved]()
    with attach(run_dir, loop, policy=1) as handle:
        loop.run(2)
        handle.wait()
        loop.note()
        optimizer.calls_first = False
        loop.at = lambda place: found.append(handle.snapshot_now(place))
        loop.run(1)
        assert [s.fresh for s in found] == [False, False]
        loop.at = lambda place: None
        assert (handle.stats().slipped, steps_at(run_dir)) == (1, [1])
        for _ in range(2):
            loop.note()
            loop.run(1)
            handle.wait()
        loop.check(run_dir, [3, 4])
        handle.detach()
