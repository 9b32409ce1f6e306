"""The policies' state travels in every snapshot, in nobody's sight, and never costs a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.errors import StateError
from lightck.examine import contents
from lightck.loop import due
from lightck.loop.policy_state import SavedPolicyState, parsed
from lightck.policy import Auto
from support import processes
from support.loops import Loop, adam_loop, mlp, of_live

POLICY = Auto(watch=False)


def _train(path: Path, steps: int, **more: Any) -> Loop:
    loop = adam_loop()
    with lightck.attach(loop.model, loop.optimizers, path, policy=POLICY, **more):
        loop.run(steps)
    return loop


def _restored(path: Path, **more: Any) -> tuple[Loop, Any]:
    loop = adam_loop()
    return loop, lightck.restore(loop.model, loop.optimizers, path, **more)


def test_it_is_in_nobodys_sight(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightck")
    first = _train(run_dir, 3, extras={"mine": {"a": 1}})
    extras: dict[str, Any] = {"mine": {}}
    loop, info = _restored(run_dir, extras=extras, strict=True)
    assert of_live(loop.model, loop.optimizers) == of_live(first.model, first.optimizers)
    assert (info.leftover, dict(info.skipped), extras) == ((), {}, {"mine": {"a": 1}})
    assert lightck.load(run_dir)["extras"] == {"mine": {"a": 1}}
    assert contents(run_dir).extras == ("mine",)
    learned = contents(run_dir).learned
    assert learned is not None and parsed(learned) is not None and len(learned) <= 4096
    # A policy that learns nothing leaves it behind: that is no extra that is left out.
    with lightck.attach(loop.model, loop.optimizers, run_dir, policy=1, extras=extras):
        loop.run(1)
    assert "extras_left_out" not in caplog.text
    assert contents(run_dir).learned is None


def test_a_name_of_lightcks_own_is_refused(run_dir: Path) -> None:
    model = mlp()
    with pytest.raises(StateError, match="'@policy' begins with '@'"):
        lightck.attach(model, path=run_dir, extras={"@policy": {}})
    with pytest.raises(StateError, match="'@policy' begins with '@'"):
        lightck.restore(model, path=run_dir, extras={"@policy": {}})


@pytest.mark.parametrize(
    "text", ["", " ", "nonsense", "[]", '{"version":99,"failures":{}}', '{"version":1}']
)
def test_a_damaged_or_newer_one_costs_nothing_but_what_was_learned(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, text: object
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SavedPolicyState, "renew", lambda self, values: self.state.update(json=text))
        first = _train(run_dir, 3)
    loop, info = _restored(run_dir)
    assert info.step == 3
    assert of_live(loop.model, loop.optimizers) == of_live(first.model, first.optimizers)
    with lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY):
        loop.run(2)
    learned = parsed(contents(run_dir).learned)
    assert learned is not None and learned["failures"]["exposure"] >= 0


@pytest.mark.parametrize(
    "tree", [5, "text", [], {}, {"json": {"deep": [1]}}, {"json": None}, {"a": 1}]
)
def test_a_state_of_another_form_costs_nothing_either(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, tree: Any
) -> None:
    from lightck.journal.boundary_state import BoundaryState

    real = BoundaryState.step_ended

    def step_ended(self: BoundaryState, step: int) -> None:
        real(self, step)
        assert self._extras is not None
        self._extras["@policy"] = tree

    with monkeypatch.context() as patch:
        patch.setattr(BoundaryState, "step_ended", step_ended)
        _train(run_dir, 3)
    assert contents(run_dir).extras == ()
    loop, info = _restored(run_dir)
    assert info.step == 3
    with lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY):
        loop.run(1)
    assert parsed(contents(run_dir).learned) is not None


def test_a_fork_of_a_run_has_lost_no_host(run_dir: Path, region_dir: Path) -> None:
    processes.run(lambda: _train(run_dir, 3) and None)
    loop, _ = _restored(run_dir)
    with lightck.attach(loop.model, loop.optimizers, region_dir / "fork", policy=POLICY):
        loop.run(2)
    # Further, in the same process, somewhere else: neither is that a failure.
    with lightck.attach(loop.model, loop.optimizers, region_dir / "more", policy=POLICY):
        loop.run(2)
    for path in ("fork", "more"):
        learned = parsed(contents(region_dir / path).learned)
        assert learned is not None and learned["failures"]["failures"] == []


def test_a_failure_in_this_process_counts_once_it_was_restored_from(run_dir: Path) -> None:
    loop = adam_loop()
    with (
        pytest.raises(RuntimeError, match="own"),
        lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY),
    ):
        loop.run(3)
        raise RuntimeError("the training's own")
    for failures in (1, 1):  # the second time it was closed
        loop, _ = _restored(run_dir)
        with lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY):
            loop.run(3)
        learned = parsed(contents(run_dir).learned)
        assert learned is not None and len(learned["failures"]["failures"]) == failures


def test_an_attach_that_failed_leaves_the_last_word_of_the_life_before(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        loop = adam_loop()
        lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY)
        loop.run(3)

    processes.run(killed)  # ends without a word
    loop, info = _restored(run_dir)
    assert info is not None
    from lightck.loop.checkpointer import Checkpointer

    def fails(*_: object) -> None:
        raise StateError("this attach fails")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "check_state", fails)
        with pytest.raises(StateError, match="fails"):
            lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY)
    with lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY):
        loop.run(1)
    learned = parsed(contents(run_dir).learned)
    assert learned is not None and len(learned["failures"]["failures"]) == 1


def test_training_with_auto_is_the_same_bit_for_bit(run_dir: Path) -> None:
    torch.manual_seed(7)
    plain = adam_loop()
    plain.run(12)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    watched = adam_loop()
    with lightck.attach(watched.model, watched.optimizers, run_dir, policy="auto"):
        watched.run(12)
    assert torch.equal(after, torch.get_rng_state())
    assert of_live(plain.model, plain.optimizers) == of_live(watched.model, watched.optimizers)


def test_stats_and_an_event_say_how_often_and_why(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lightck")
    monkeypatch.setattr(due, "_TOLD_S", 0.0)
    loop = adam_loop()
    with lightck.attach(loop.model, loop.optimizers, run_dir, policy=POLICY) as handle:
        assert handle.stats().policy == "auto"
        loop.run(2)
        handle.wait()
        loop.run(20)
        stats = handle.stats()
    assert stats.policy.startswith("every ")
    assert stats.overhead > 0
    assert stats.risk == ""
    assert caplog.text.count("lightck: policy step=") >= 1
