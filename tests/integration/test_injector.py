"""Faults come where the plan says, do what they say, and what passes is undone."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # by the parent, once: hooks of the forked ones need it
from torch import nn

import lightck
from lightck.examine import check
from lightck.failure import fault_plan
from lightck.failure.fault_injector import flip_bit
from lightck.failure.fault_plan import ANY_NEWER, PHASES, Fault, FaultPlan, InjectedError
from lightck.handle import Handle
from lightck.region.native_pool import NativePool
from support import internals, processes

_PARTS = 4


class Loop:
    """A small training, and what can be seen of it from outside."""

    def __init__(self, region: Path, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(_PARTS)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        settings = {"failure": "off", **settings}
        self.handle: Handle = lightck.attach(self.model, self.optimizer, region, **settings)
        self.calls = 0
        self.last = self.weights()
        for part in self.model:
            part.register_forward_hook(self._called)

    def _called(self, *_: Any) -> None:
        self.calls += 1

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.calls = 0
            self.last = self.weights()
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
            self.handle.wait()  # so that no snapshot slips
            with torch.no_grad():
                self.model(torch.ones(2, 4))

    def seen(self) -> dict[str, Any]:
        now = self.weights()
        return {
            "step": self.handle.step,
            "calls": self.calls,
            "gradients": sum(p.grad is not None for p in self.model.parameters()),
            "updating": internals.checkpointer(self.handle).steps.updating,
            "copying": internals.window(self.handle) is not None,
            "changed": not all(map(torch.equal, now, self.last)),
        }


def _under(folder: Path, faults: list[Fault], code: Callable[[], Any], hold_s: float = 60.0) -> Any:
    """Run `code` in a process under a plan."""
    (folder / "chaos").mkdir()
    fault_plan.write_plan(folder / "chaos", faults, hold_s)

    def inside() -> Any:
        os.environ[fault_plan.VARIABLE] = str(folder / "chaos")
        return code()

    return processes.run(inside)


def _events(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "chaos" / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("phase", [each for each in PHASES if each not in ANY_NEWER])
def test_a_phase_is_where_it_says(region_dir: Path, phase: str) -> None:
    def code() -> tuple[str, dict[str, Any]]:
        loop = Loop(region_dir / "region")
        with pytest.raises(InjectedError):
            loop.train(9)
        return phase, loop.seen()

    _, seen = _under(region_dir, [Fault("exception", 4, phase)], code)
    everything = 2 * _PARTS
    expected: dict[str, dict[str, Any]] = {
        "forward": {"calls": 1, "gradients": 0, "copying": True},
        "backward": {"calls": _PARTS, "copying": True},
        "allreduce": {"gradients": everything, "updating": False, "copying": True},
        "fence": {"gradients": everything, "updating": False, "copying": True, "changed": False},
        "commit": {"updating": True, "copying": False, "changed": False},
        "update": {"updating": True, "copying": False, "changed": True},
        "between": {"updating": False, "copying": False, "changed": True},
        "evaluation": {"updating": False, "changed": True},
    }
    wanted = {"step": 4 if phase in ("between", "evaluation") else 3, **expected[phase]}
    assert {name: seen[name] for name in wanted} == wanted
    if phase == "backward":
        assert 0 < seen["gradients"] < everything
    fault = next(each for each in _events(region_dir) if each["event"] == "fault")
    assert (fault["phase"], fault["step"], fault["complete"]) == (phase, 4, wanted["step"])


def test_a_just_in_time_save_is_met_when_its_slot_is_taken_and_nothing_is_committed(
    region_dir: Path,
) -> None:
    """The first one of the fault's step or newer; a save that copies nothing is none."""

    def code() -> tuple[int | None, list[bool]]:
        loop = Loop(region_dir / "region", failure="jit", policy=2)
        whole = []
        FaultPlan.gil = lambda self: whole.append(loop.handle.last_committed_step)  # type: ignore[method-assign]
        for steps in (1, 2, 1):
            loop.train(steps)
            loop.handle.snapshot_now("asked")
            loop.handle.snapshot_now("again")
        loop.handle.detach()
        return loop.handle.last_committed_step, whole

    assert _under(region_dir, [Fault("gil", 2, "save")], code) == (4, [2])
    (fault,) = [each for each in _events(region_dir) if each["event"] == "fault"]
    assert (fault["phase"], fault["step"], fault["complete"]) == ("save", 3, 3)


def test_a_fault_of_another_rank_does_not_come(region_dir: Path) -> None:
    def code() -> int:
        loop = Loop(region_dir / "region")
        loop.train(4)
        return loop.handle.step

    assert _under(region_dir, [Fault("exception", 2, rank=1)], code) == 4
    assert "fault" not in {each["event"] for each in _events(region_dir)}


def test_each_fault_comes_once_over_all_lives(region_dir: Path) -> None:
    def code() -> None:
        loop = Loop(region_dir / "region")
        with pytest.raises(InjectedError):
            loop.train(9)
        loop.optimizer.zero_grad()
        loop.train(5)

    _under(region_dir, [Fault("exception", 2, "fence"), Fault("stop", 99)], code)
    assert [each["event"] for each in _events(region_dir)].count("fault") == 1
    again = FaultPlan(region_dir / "chaos", 0)
    again.reach("fence", 2, 1, {"exception": lambda: pytest.fail("it came again")})
    other = FaultPlan(region_dir / "chaos", 1)
    other.reach("fence", 2, 1, {"exception": lambda: pytest.fail("of rank 0 only")})


def test_every_rank_has_its_own_of_a_fault_for_all(tmp_path: Path) -> None:
    fault_plan.write_plan(tmp_path, [Fault("gil", 2, "fence", rank=None)], 0.0)
    came = []
    for rank in (0, 1, 0):
        each = FaultPlan(tmp_path, rank)
        each.reach("fence", 2, 1, {"gil": lambda rank=rank: came.append(rank)})
    assert came == [0, 1]


def ends_its_faults() -> None:
    """Wait until the threads that end what lasts have done so."""
    for thread in threading.enumerate():
        if thread.name == "lightck-fault":
            thread.join(100)


def test_a_slow_medium_is_slow_for_a_while(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code() -> list[int]:
        limits: list[int] = []
        limit = NativePool.limit
        monkeypatch.setattr(
            NativePool, "limit", lambda pool, rate: (limits.append(rate), limit(pool, rate))
        )
        loop = Loop(region_dir / "region")
        loop.train(6)
        ends_its_faults()  # also where training stands, and comes to no hook
        loop.handle.close()
        return limits

    before, slow, after = _under(region_dir, [Fault("slow", 4, "between")], code, hold_s=0.001)
    assert (before, after) == (0, 0) and slow > 0


def test_on_a_full_medium_files_do_not_grow_for_a_while(region_dir: Path) -> None:
    def code() -> tuple[int, int, int, int]:
        loop = Loop(region_dir / "region")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        loop.train(3)
        inside = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        size = loop.handle.region.info.size
        with (region_dir / "other").open("wb", buffering=0) as file:
            with pytest.raises(OSError):
                os.pwrite(file.fileno(), b"x", size)
        injector: Any = internals.hooks(loop.handle).listener
        injector._over.set()
        ends_its_faults()
        return before, inside, size, resource.getrlimit(resource.RLIMIT_FSIZE)[0]

    before, inside, size, after = _under(region_dir, [Fault("full", 2, "fence")], code)
    assert before == after and inside == size


def test_a_corrupt_snapshot_is_the_newest_of_two(region_dir: Path) -> None:
    def code() -> dict[str, Any]:
        loop = Loop(region_dir / "region")
        loop.train(5)
        loop.handle.close()
        return flip_bit(internals.checkpointer(loop.handle))

    (region_dir / "chaos").mkdir()
    flipped = processes.run(code)
    assert flipped["step"] == 5
    states = {
        each["step"]: (each["state"], each["damaged"]) for each in check(region_dir / "region")
    }
    assert states[5] == ("damaged", [flipped["tensor"]]) and states[4] == ("good", [])
