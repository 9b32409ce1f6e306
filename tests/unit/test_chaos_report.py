"""Chaos without processes: where faults come, how they are written, what is made of events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightck.cli.chaos import command, plan
from lightck.cli.chaos.runner import Job, Run, TimeLimits
from lightck.cli.chaos.verdict import (
    _is_free,
    _leaves,
    _same,
    differing_losses,
    missing_losses,
    rows,
    unseeded,
)
from lightck.cli.output import Refusal
from lightck.failure.fault_plan import KINDS, PHASES, Fault


def test_a_plan_is_a_pure_function_of_its_seed() -> None:
    kinds = list(KINDS)
    first = plan.draw(7, kinds, 40, 2)
    assert plan.draw(7, kinds, 40, 2) == first
    assert plan.draw(8, kinds, 40, 2) != first


def test_each_kind_comes_once_with_a_step_between_two_faults() -> None:
    for seed in range(200):
        faults = plan.draw(seed, list(KINDS), 22, 3)
        assert sorted(each.kind for each in faults) == sorted(KINDS)
        steps = [each.step for each in faults]
        assert steps[0] > 1 and steps[-1] < 22
        assert all(b - a > 1 for a, b in zip(steps, steps[1:], strict=False)), steps
        plan.check(faults, 22, 3)
    drawn = [plan.draw(seed, ["kill"], 9, 3)[0] for seed in range(200)]
    assert {each.phase for each in drawn} == set(PHASES) - {"evaluation", "restore", "save"}
    assert {each.rank for each in drawn} == {0, 1, 2}


def test_too_few_steps_are_refused_with_how_many_are_needed() -> None:
    with pytest.raises(Refusal, match="3 faults in a run of 7 steps: at least 8 are needed"):
        plan.draw(1, ["kill", "stop", "term"], 7, 1)
    assert len(plan.draw(1, ["kill", "stop", "term"], 8, 1)) == 3


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:7", Fault("kill", 7, "forward", 0)),
        ("hang:12:backward", Fault("hang", 12, "backward", 0)),
        ("term:20:fence:1", Fault("term", 20, "fence", 1)),
        ("kill:9:update:*", Fault("kill", 9, "update", None)),
    ],
)
def test_faults_are_read_as_they_are_spelled(text: str, fault: Fault) -> None:
    assert plan.parse(text) == fault
    assert plan.parse(plan.spelled(fault)) == fault


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kill", "--fault kill: must be KIND:STEP"),
        ("melt:3", "no fault 'melt'; must be one of kill, stop"),
        ("kill:0", "step '0' is no number of 1 or more"),
        ("kill:soon", "step 'soon'"),
        ("kill:3:lunch", "no phase 'lunch'; must be one of forward"),
        ("kill:3:forward:-1", "rank '-1' is no number and not *"),
        ("kill:3:forward:0:1", "must be KIND:STEP"),
        ("corrupt:3:restore", "corrupt is no fault of a restore"),
        ("exception:3:save", "exception is no fault of a save"),
    ],
)
def test_bad_faults_are_refused_with_what_is_allowed(text: str, named: str) -> None:
    with pytest.raises(Refusal) as caught:
        plan.parse(text)
    assert named in str(caught.value)


def test_faults_beyond_the_training_are_refused() -> None:
    with pytest.raises(Refusal, match="kill:9:forward:0: the training has only 8 steps"):
        plan.check([Fault("kill", 9)], 8, 1)
    with pytest.raises(Refusal, match="kill:3:forward:2: the training has only ranks 0 to 1"):
        plan.check([Fault("kill", 3, rank=2)], 8, 2)
    plan.check([Fault("kill", 8, rank=None)], 8, 1)


# ---- the report ----------------------------------------------------------------------------------


class Told(Run):
    """A run made of events, a second apart unless a time is given."""

    def tell(self, event: str, **fields: Any) -> None:
        last = self.events[-1]["t"] if self.events else 99.0
        self.events.append({"event": event, "t": last + 1.0, "rank": 0, **fields})

    def life(self, begin: int, end: int) -> None:
        self.tell("started")
        self.tell("log", name="attached", fields={"step": str(begin)})
        for step in range(begin + 1, end + 1):
            self.tell("step", step=step)

    def fault(self, number: int, complete: int, phase: str = "forward") -> None:
        self.tell("fault", number=number, complete=complete, phase=phase, losses=0)


def _run(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_fault_that_ends_a_life_loses_what_is_done_again(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 5)  # steps end at 102 to 106
    run.fault(0, 5)  # 107, inside step 6
    run.tell("ended", code=-9)  # 108
    run.life(3, 8)  # attached at 110
    (row,) = rows(run, Run(tmp_path), [Fault("kill", 6)])
    assert (row["ended"], row["resumed"], row["lost_steps"]) == (True, 3, 3)
    assert row["lost_s"] == 3.0  # since the end of step 3
    assert (row["detected_s"], row["detected_by"]) == (1.0, "its end")
    assert row["recovered_s"] == 4.0
    assert row["saved"] is None


def test_a_just_in_time_snapshot_is_told_and_loses_one_minibatch(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 5)
    run.fault(0, 5)
    fields = {"reason": "RuntimeError", "step": 5, "seconds": 0.25, "why": ""}
    run.tell("gone", rank=0)
    run.tell("log", name="saved", rank=1, fields=fields)
    run.tell("gone", rank=1)
    run.tell("ended", code=1)
    run.life(5, 8)
    (row,) = rows(run, Run(tmp_path), [Fault("kill", 6)])
    assert (row["saved"], row["resumed"], row["lost_steps"]) == (5, 5, 1)
    assert (row["detected_s"], row["detected_by"]) == (1.75, "RuntimeError, rank 1")


def test_a_peer_that_ends_has_noticed(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 5)
    run.fault(0, 5)
    run.tell("gone", rank=0)
    run.tell("gone", rank=1)
    run.tell("ended", code=1)
    run.life(3, 8)
    (row,) = rows(run, Run(tmp_path), [Fault("kill", 6)])
    assert (row["detected_s"], row["detected_by"]) == (2.0, "end of rank 1")


def test_steps_after_a_fault_are_lost_with_the_life_they_belong_to(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 5)  # step 5 ends at 106
    run.fault(0, 5)  # 107: SIGTERM, and the loop goes on for two steps
    run.tell("step", step=6)
    run.tell("step", step=7)  # 109
    run.tell("ended", code=-15)
    run.life(6, 8)
    (row,) = rows(run, Run(tmp_path), [Fault("term", 6)])
    assert (row["resumed"], row["lost_steps"], row["lost_s"]) == (6, 2, 1.0)


@pytest.mark.parametrize("how", ["ended", "gone"])
def test_a_fault_between_sigterm_and_the_end_leaves_it_its_restart(
    tmp_path: Path, how: str
) -> None:
    """The loop goes on while the step is saved; torchrun starts its workers again by itself."""
    run = _run(tmp_path)
    run.life(0, 5)
    run.fault(0, 5)
    run.tell("step", step=6)
    run.fault(1, 6)  # something that passes
    run.tell(how, code=-15)
    run.life(6, 8)
    term, other = rows(run, Run(tmp_path), [Fault("term", 6), Fault("slow", 7)])
    assert (term["ended"], term["resumed"], term["lost_steps"]) == (True, 6, 1)
    assert other["resumed"] == 6


def test_between_steps_no_minibatch_is_under_way(tmp_path: Path) -> None:
    run = _run(tmp_path)
    for phase in ("between", "evaluation"):
        run.events.clear()
        run.life(0, 5)
        run.fault(0, 5, phase)
        run.tell("ended", code=1)
        run.life(5, 8)
        (row,) = rows(run, Run(tmp_path), [Fault("kill", 5, phase)])
        assert row["lost_steps"] == 0


def test_a_fault_that_passes_loses_nothing(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 5)
    run.fault(0, 5)
    run.tell("step", step=6)
    run.tell("ended", code=0)
    (row,) = rows(run, Run(tmp_path), [Fault("stop", 6)])
    assert (row["ended"], row["lost_steps"], row["detected_s"]) == (False, 0, None)
    assert row["recovered_s"] == 1.0


def test_faults_that_came_and_did_nothing_are_told_from_those_that_did(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 2)
    run.fault(0, 2)
    run.tell("flipped", why="no file with two snapshots")
    run.fault(1, 2)
    run.tell("acted", what="lo down", why="nsenter: no such process")
    run.fault(2, 2)
    run.tell("acted", what="lo down", why=None)
    faults = [Fault("corrupt", 3), Fault("network", 3), Fault("network", 3), Fault("kill", 9)]
    found = rows(run, Run(tmp_path), faults)
    assert [command._missed(row) for row in found] == [True, True, False, True]
    assert found[1]["failed"] == ["not done: lo down: nsenter: no such process"]
    assert found[2]["acted"] == ["lo down"]


def test_a_rank_that_still_attaches_when_the_fault_comes_is_no_restart(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.tell("attaching", rank=1, pid=7)
    run.fault(0, 0)
    run.tell("log", name="attached", fields={"step": "0"}, rank=1, pid=7)
    run.tell("step", step=1)
    run.tell("ended", code=0)
    (row,) = rows(run, Run(tmp_path), [Fault("stop", 1)])
    assert (row["ended"], row["lost_steps"]) == (False, 0)


def test_what_follows_the_next_fault_is_the_next_fault_s(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 2)
    run.fault(0, 2)
    run.tell("step", step=3)
    run.fault(1, 3)
    run.tell("ended", code=-9)
    run.life(1, 5)
    first, second, third = rows(
        run, Run(tmp_path), [Fault("stop", 3), Fault("kill", 4), Fault("kill", 9)]
    )
    assert (first["ended"], first["resumed"]) == (False, None)
    assert (second["ended"], second["resumed"], second["lost_steps"]) == (True, 1, 3)
    assert not third["fired"]


def test_a_fault_in_the_restore_loses_nothing_more(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 5)
    run.fault(0, 5)
    run.tell("ended", code=-9)
    run.tell("started")
    run.fault(1, 3, "restore")
    run.tell("ended", code=-9)
    run.life(3, 6)
    run.tell("log", name="saved", fields={"reason": "of this life", "step": 6})
    first, second = rows(run, Run(tmp_path), [Fault("kill", 6), Fault("kill", 3, "restore")])
    assert (first["resumed"], first["lost_steps"], first["lost_s"]) == (3, 3, 3.0)
    assert (second["resumed"], second["lost_steps"], second["lost_s"]) == (3, 0, 0.0)
    assert first["saved"] is None and second["saved"] is None
    assert first["recovered_s"] == 7.0 and second["recovered_s"] == 4.0


def test_every_line_of_losses_counts_the_repeated_ones_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    reference, run = Run(tmp_path / "a"), Told(tmp_path / "b")
    reference.losses.write_text("0 1 0x1p0\n0 2 0x1p1\n0 3 0x1p2\n")
    run.losses.write_text("0 1 0x1p0\n0 2 0x1p1\n0 2 0x1p1\n0 3 0x1p2\n")
    assert differing_losses(reference, run) == [] == missing_losses(reference, run)
    run.losses.write_text("0 1 0x1p0\n0 2 0x1p9\n0 2 0x1p1\n")
    assert differing_losses(reference, run) == ["loss of '0 2': 0x1p9, undisturbed 0x1p1"]
    assert missing_losses(reference, run) == ["0 3"]
    run.life(0, 1)
    run.tell("fault", number=0, complete=1, phase="forward", losses=len("0 1 0x1p0\n"))
    run.tell("fault", number=1, complete=2, phase="forward", losses=len("0 1 0x1p0\n0 2 0x1p9\n"))
    found = rows(run, reference, [Fault("stop", 2), Fault("stop", 3)])
    assert [row["identical"] for row in found] == [False, True]


def test_without_losses_nothing_is_said_of_them(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.life(0, 5)
    run.fault(0, 5)
    (row,) = rows(run, Run(tmp_path), [Fault("stop", 6)])
    assert row["identical"] is None


def test_generators_that_a_run_does_not_seed_are_found(tmp_path: Path) -> None:
    reference, run = _run(tmp_path), _run(tmp_path)
    reference.tell("attaching", generators={"torch": "a", "numpy": "b"})
    run.tell("attaching", generators={"torch": "a", "numpy": "c"})
    run.tell("attaching", generators={"torch": "z", "numpy": "c"})  # of a later life, restored
    assert unseeded(reference, run) == ["numpy"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_hang_that_is_saved_is_ended_soon_unless_the_job_does_that(
    tmp_path: Path, ends: bool
) -> None:
    """If a job ends hangs, the hanging rank ends before those that wait, which write its share."""
    job = Job(["true"], tmp_path / "job", [Fault("hang", 3)], TimeLimits(patience_s=1000.0), print)
    job._act({"event": "attaching", "pid": 7, "rank": 0, "ends_hangs": ends})
    job._act({"event": "fault", "number": 0, "pid": 7})
    began = job._hang
    job._act({"event": "log", "name": "saved"})
    assert (job._hang == began) == ends


def test_one_bit_and_one_type_is_a_difference() -> None:
    def differ(a: Any, b: Any) -> list[str]:
        left, right = dict(_leaves(a, "")), dict(_leaves(b, ""))
        both = sorted(left.keys() | right.keys())
        return [name for name in both if not _same(left.get(name), right.get(name))]

    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert differ({"a": nan, "b": [1.5]}, {"a": nan.clone(), "b": [1.5]}) == []
    assert differ({"a": zero}, {"a": -zero}) == ["/a"]
    assert differ({"a": zero}, {"a": zero.double()}) == ["/a"]
    assert differ({"a": [1.5, 0.0]}, {"a": [1.5, -0.0]}) == ["/a/1"]
    assert differ({"a": 1}, {"a": True}) == ["/a"]
    assert differ({"a": 1}, {"a": 1, "b": 2}) == ["", "/b"]
    numbers = torch.arange(3000).numpy()
    other = numbers.copy()
    other[1500] = 7
    assert differ({"a": numbers}, {"a": numbers.copy()}) == []
    assert differ({"a": numbers}, {"a": other}) == ["/a"]


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("/rng/numpy/state/key", True),
        ("/extras/data/before/rng/numpy/state/key", True),
        ("/extras/transformers/rank/clock/3", True),
        ("/rng/torch", False),
        ("/extras/rng/numpy_like", False),
        ("/extras/clockwork/0", False),
    ],
)
def test_only_unseeded_generators_and_what_a_clock_said_may_differ(name: str, free: bool) -> None:
    assert _is_free(name, ["numpy"]) is free
