"""Beginnings, ends and company: attach late, exit without close, forks, branches, many deaths."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lightck
from support.e2e.jobs import Plain, batch, small_model
from support.e2e.resume import JOBS, KILLS, Bed, request, same_end, same_steps
from support.e2e.trainer import Run


class Late(Plain):
    """Training has gone on for three steps when lightck is attached."""

    begun = 3

    def setup(self) -> None:
        super().setup()
        self.counter = {"t": 0}
        self.extras = {"counter": self.counter}

    def train(self, run: Run) -> None:
        self.setup()
        run.arm_kill()
        if run.mode == "resume":
            run.begin()
        while self.counter["t"] < run.last:
            t = run.now = self.counter["t"] + 1
            loss = self.step(t, run)
            self.counter["t"] = t
            run.done(t, loss)
            if t == self.begun and run.mode == "attach":
                run.begin()
        run.finish()


def test_attach_after_training_began_captures_what_there_is(bed: Bed) -> None:
    plain = bed.plain(Late)
    for where in KILLS:
        death = {"kill_step": 6, "kill_where": where}
        same_steps(bed.run(Late, "attach", where, **death).check_killed(), plain)
        again = bed.run(Late, "resume", where).check_ended()
        assert again.value("restored") in {1, 2}  # steps are counted from attach
        assert min(again.steps) == again.value("restored") + Late.begun + 1
        same_steps(again, plain)
        assert again.value("final") == plain.value("final")


class TwoEngines(Plain):
    """Two models, each with its own engine, region and optimizer, in one loop."""

    def setup(self) -> None:
        self.models = [small_model(), small_model()]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in self.models]

    def restore(self, run: Run) -> Any:
        infos = [
            lightck.restore(m, o, f"{run.path}-{i}")
            for i, (m, o) in enumerate(zip(self.models, self.optimizers, strict=True))
        ]
        assert len({info and info.step for info in infos}) == 1
        return infos[0]

    def attach(self, run: Run) -> Any:
        pairs = zip(self.models, self.optimizers, strict=True)
        handles = [lightck.attach(m, o, f"{run.path}-{i}") for i, (m, o) in enumerate(pairs)]
        self.other = handles[1]
        return handles[0]

    def step(self, t: int, run: Run) -> Any:
        total = torch.zeros(())
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if run.handle is not None:
            self.other.wait()
            assert (run.handle.step, self.other.step) == (t, t)
        return total

    def finished(self, run: Run) -> None:
        if run.handle is not None:
            self.other.close()
            assert self.other.stats().torn == 0


def test_two_engines_on_two_models_do_not_disturb_each_other(bed: Bed) -> None:
    bed.check(TwoEngines, kills=("forward", "after"))


class Forking(Plain):
    """A child is forked in step 3 that trains, asks the engine for things, and exits."""

    def step(self, t: int, run: Run) -> Any:
        x, y = batch()
        loss = F.cross_entropy(self.model(x), y)
        if t == 3 and self.params["where"] == "inside":
            self._fork(run, loss)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if t == 3 and self.params["where"] == "after":
            self._fork(run, loss)
        return loss.detach()

    def _fork(self, run: Run, loss: torch.Tensor) -> None:
        if run.handle is None:
            return
        pid = os.fork()
        if pid == 0:
            self._child(run, loss)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"the child failed: {status}"

    def _child(self, run: Run, loss: torch.Tensor) -> None:
        """Run the child, with a snapshot's copies under way if it is forked inside the step."""
        code = 1
        try:
            assert run.handle is not None
            if self.params["where"] == "inside":
                loss.backward()
                self.optimizer.step()
            for t in range(3):
                super().step(100 + t, run)
            for call in (run.handle.snapshot, run.handle.fence):
                with pytest.raises(lightck.LightckError, match="child"):
                    call()
            run.handle.close()
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)


@pytest.mark.parametrize("where", ["inside", "after"])
def test_forked_child_writes_nothing_and_leaves_the_region_whole(bed: Bed, where: str) -> None:
    bed.check(Forking, params={"where": where}, kill_step=6)


class Twice(Plain):
    """Detached after step 2 and attached again after step 4, then closed and attached once more."""

    def step(self, t: int, run: Run) -> Any:
        loss = super().step(t, run)
        if run.mode == "attach" and run.handle is not None:
            if t == 2:
                run.handle.detach()
            elif t in (4, 5):
                run.handle.close()
                run.handle = self.attach(run)
            run.settle = t not in (2, 3)
        return loss


def test_engine_that_is_attached_again_goes_on_from_its_own_snapshots(bed: Bed) -> None:
    plain = bed.plain(Twice)
    bed.run(Twice, "attach", kill_step=8, kill_where="update").check_killed()
    again = bed.run(Twice, "resume")
    # Steps 3 and 4 were nobody's: the engine counts those that it saw.
    assert again.value("restored") in {4, 5}
    shift = 2
    for t, seen in again.check_ended().steps.items():
        if t + shift in plain.steps:
            assert seen == plain.steps[t + shift]


class Handless(Plain):
    """The job ends without `close()`."""

    def train(self, run: Run) -> None:
        self.setup()
        begin = run.begin()
        for t in range(begin + 1, run.last + 1):
            run.now = t
            run.done(t, self.step(t, run))


def test_interpreter_that_exits_without_close_keeps_what_was_open(bed: Bed, tmp_path: Path) -> None:
    asked = request(Handless, bed.folder / "run", "attach", last=5, settle=False)
    asked |= {"out": str(tmp_path / "out"), "log": str(tmp_path / "log")}
    code = (
        "import json, sys; from support.e2e import trainer; trainer.main(json.loads(sys.argv[1]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(JOBS), os.environ["PYTHONPATH"]])
    # Nothing waits: the exit itself has to commit what is open.
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)], check=True, env=environment, timeout=250
    )
    again = bed.run(Plain, "resume").check_ended()
    # Step 5 has no forward after it: it is early, and yields to step 4, unless that found no slot.
    assert again.value("restored") in {4, 5}
    assert again.value("early") is (again.value("restored") == 5)
    same_end(again, bed.plain(Plain))


class Branching(Plain):
    """Can go back to an older step, and goes another way from there."""

    settings = {"slots": 4}

    def restore(self, run: Run) -> Any:
        wanted = self.params.get("step", "latest")
        return lightck.restore(self.model, self.optimizer, run.path, step=wanted)

    def resumed(self, t: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.params.get("lr", group["lr"])


def test_older_timeline_is_not_resurrected_after_a_branch(bed: Bed) -> None:
    bed.run(Branching, "attach", last=8).check_ended()
    branch = {"step": 6, "lr": 0.5}
    # Another way from step 6: killed before it has committed anything, the branch still counts.
    dying = {"kill_step": 7, "kill_where": "backward"}
    first = bed.run(Branching, "resume", params=branch, last=9, **dying).check_killed()
    assert first.value("restored") == 6
    kept = bed.run(Branching, "resume", params={"lr": 0.5}, last=6).check_ended()
    assert kept.value("restored") == 6
    # It goes on to step 7 only; the older 7 and 8 stay behind.
    second = bed.run(Branching, "resume", params=branch, last=7).check_ended()
    third = bed.run(Branching, "resume", last=9).check_ended()
    assert third.value("restored") == 7
    assert third.steps[8] != bed.plain(Branching, last=9).steps[8]
    states = lightck.snapshots(bed.folder / "run")
    whole = [row["step"] for row in states.to_pylist() if row["state"] == "whole"]
    assert max(whole) == 9
    assert second.steps[7] != bed.plain(Branching, last=9).steps[7]


def test_branch_equals_the_run_that_never_left(bed: Bed) -> None:
    bed.run(Branching, "attach", last=8).check_ended()
    again = bed.run(Branching, "resume", params={"step": 6}, last=9).check_ended()
    assert again.value("restored") == 6
    same_end(again, bed.plain(Branching, last=9))


def test_job_that_dies_again_and_again_ends_as_if_it_had_never_died(bed: Bed) -> None:
    plain = bed.plain(Plain, last=24)
    bed.run(Plain, "attach", kill_step=3, kill_where="after", last=24).check_killed()
    for n, k in enumerate(range(5, 22)):
        death = {"kill_step": k, "kill_where": KILLS[n % len(KILLS)]}
        same_steps(bed.run(Plain, "resume", last=24, **death).check_killed(), plain)
    same_end(bed.run(Plain, "resume", last=24).check_ended(), plain)


SETTINGS: list[dict[str, Any]] = [
    {"schedule": "eager"},
    {"threads": 3, "chunk_bytes": 4096},
    {"proof": True},
    {"slots": 3},
    {"policy": 3},
    {"priority": "normal", "threads": 1, "slots": 5, "policy": 2},
]


class Configured(Plain):
    """Other settings than the usual ones."""

    def setup(self) -> None:
        super().setup()
        self.settings = self.params["settings"]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_setting_resumes_bit_for_bit(bed: Bed, settings: dict[str, Any]) -> None:
    restored = None
    if "policy" in settings:
        every = settings["policy"]
        due = [t for t in range(9) if t % every == 0]
        restored = {w: {max(t for t in due if t <= 6)} for w in ("after", "closed", "update")}
        restored["closed"] = {7}  # close() commits the last step, due or not
        restored["update"] = {t for t in due if t <= 6}
        restored["forward"] = restored["backward"] = {max(t for t in due if t <= 5)}
    bed.check(Configured, params={"settings": settings}, kill_step=7, restored=restored)


@pytest.mark.parametrize("durability", ["medium", "process"])
def test_region_on_an_ordinary_file_resumes(bed: Bed, tmp_path: Path, durability: str) -> None:
    disk = Bed(bed.server, tmp_path)
    disk.check(Configured, params={"settings": {"durability": durability}})


class Large(Plain):
    """Large enough that death finds copies half done."""

    steps = 60

    def setup(self) -> None:
        self.models = [
            nn.Sequential(
                nn.Linear(6, 700), nn.ReLU(), nn.Dropout(0.2), nn.Linear(700, 700), nn.ReLU(),
                nn.BatchNorm1d(700), nn.Linear(700, 5),
            )
        ]  # fmt: skip
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01)]

    def train(self, run: Run) -> None:
        delay = self.params.get("delay")
        if delay is not None and os.fork() == 0:
            time.sleep(delay)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        super().train(run)


def test_death_at_any_moment_resumes_bit_for_bit(bed: Bed, rng: np.random.Generator) -> None:
    # The moment is random; that the ends are equal does not depend on it.
    plain = bed.plain(Large)
    for n in range(8):
        folder = f"n{n}"
        mode = "attach"
        for delay in rng.uniform(0.02, 0.7, 3):
            params = {"delay": float(delay)}
            died = bed.run(Large, mode, folder, params=params, settle=False)
            if not died.killed:
                died.check_ended()  # it was faster
            same_steps(died, plain)
            mode = "resume" if lightck.snapshots(bed.folder / folder).num_rows else "attach"
            if not any((bed.folder / folder).glob("region-*.lck")):
                mode = "attach"
        last = bed.run(Large, mode, folder, settle=False).check_ended()
        same_end(last, plain)
