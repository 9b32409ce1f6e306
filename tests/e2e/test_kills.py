"""SIGKILL at any instant of real training, and inside every phase: what was acknowledged comes
back, what was not begun does not, and training goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import proof
from support.e2e.kill_jobs import CALLS, DELAYS, Racing, Trained
from support.e2e.resume import Outcome, Server, request, same_end, same_steps

MEDIA = ("tmpfs", "ext4 sync", "ext4 process", "hugetlbfs")
LONGEST_S = 0.9
"""A life that is cut at random lasts this long: start, restore, attach and some steps."""
HUGE_PAGES = 48
PAGES = Path("/proc/sys/vm/nr_hugepages")
counts: dict[str, Any] = {"cycles": {}, "phases": 0, "races": 0, "losses": 0}


@pytest.fixture(scope="module", autouse=True)
def numbers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    proof.record_whole(request, "kill", counts)


@contextmanager
def folder_on(medium: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder on a medium of its own, and the settings that go with it."""
    if medium == "hugetlbfs":
        with _hugetlbfs() as folder:
            yield folder, {}
        return
    parent = "/dev/shm" if medium == "tmpfs" else "/var/tmp"
    folder = Path(tempfile.mkdtemp(prefix="lightck-kill-", dir=parent))
    try:
        yield folder, {"durability": "process"} if medium == "ext4 process" else {}
    finally:
        shutil.rmtree(folder)


@contextmanager
def _hugetlbfs() -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("SKIPPED: hugetlbfs: only root can mount it and reserve huge pages")
    before = int(PAGES.read_text())
    folder = Path(tempfile.mkdtemp(prefix="lightck-kill-"))
    command = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        folder.rmdir()
        pytest.skip(f"SKIPPED: hugetlbfs: {done.stderr.strip()}")
    try:
        PAGES.write_text(str(before + HUGE_PAGES))
        if int(PAGES.read_text()) < before + HUGE_PAGES:
            pytest.skip(f"SKIPPED: hugetlbfs: {HUGE_PAGES} huge pages could not be reserved")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
        PAGES.write_text(str(before))


class Life:
    """One region through many deaths, and what has been promised of it."""

    def __init__(self, server: Server, path: Path, golden: Outcome, **params: Any) -> None:
        self.server, self.path, self.golden, self.params = server, path, golden, params
        self.acknowledged = 0
        self.done = 0
        self.ended = False

    def live(self, **fields: Any) -> Outcome:
        """One process, until it is killed or has trained to the end."""
        params = {**self.params, **fields.pop("params", {})}
        fields = {"settle": False, "params": params, **fields}
        outcome = self.server.run(request(Trained, self.path, self.mode, **fields))[0]
        self.judge(outcome)
        return outcome

    @property
    def mode(self) -> str:
        """Until something must come back, the run begins with the golden run's seeds."""
        return "resume" if self.acknowledged else "attach"

    def judge(self, outcome: Outcome) -> None:
        """Check that a life did what the uninterrupted run did."""
        restored = [line["restored"] for line in outcome.lines if "restored" in line]
        if restored:
            step = restored[0] or 0
            assert self.acknowledged <= step <= self.done, (
                f"restored {step}, acknowledged {self.acknowledged}, done {self.done}:"
                f" {outcome.log}"
            )
        same_steps(outcome, self.golden)
        acknowledged = [line["acked"] for line in outcome.lines if line.get("acked")]
        self.acknowledged = max([self.acknowledged, *acknowledged])
        self.done = max([self.done, *outcome.steps])
        if outcome.killed:
            return
        same_end(outcome.check_ended(), self.golden)
        self.ended = True

    def check_folder(self) -> None:
        """Nothing is left behind but the region, and the draft of a creation that was cut short."""
        names = sorted(os.listdir(self.path)) if self.path.exists() else []
        assert set(names) <= {"region-00000.lck", "region-00000.new"}, names
        if "region-00000.lck" in names:
            size = (self.path / "region-00000.lck").stat().st_size
            assert size <= 64 << 20, f"the region has grown to {size} bytes"


def lives(server: Server, medium: str, kills: int, rng: np.random.Generator) -> None:
    """Random kills on one medium; a region that has been trained to the end is followed by another.

    Two regions at a time, one per optimizer.
    """
    with folder_on(medium) as (folder, settings):
        kinds = ("adamw", "sgd", "streamed")
        asked = [
            request(Trained, folder, "plain", params={"optimizer": kind, "settings": settings})
            for kind in kinds
        ]
        golden = [run.check_ended() for run in server.run(*asked)]
        killed = trained = 0
        pair = [
            Life(server, folder / f"{kind}-0", run, optimizer=kind, settings=settings)
            for kind, run in zip(kinds, golden, strict=True)
        ]
        while killed < kills:
            asked = [
                request(
                    Trained, life.path, life.mode, settle=False, params=life.params,
                    kill_after_s=float(rng.uniform(0, LONGEST_S)),
                )
                for life in pair
            ]  # fmt: skip
            for i, outcome in enumerate(server.run(*asked)):
                pair[i].judge(outcome)
                killed += outcome.killed
                pair[i].check_folder()
                if pair[i].ended:
                    trained += 1
                    shutil.rmtree(pair[i].path)
                    old = pair[i]
                    path = folder / f"{kinds[i]}-{trained}"
                    pair[i] = Life(server, path, old.golden, **old.params)
        for life in pair:
            life.live()
            life.check_folder()
            assert life.ended and not (life.path / "region-00000.new").exists()
        counts["cycles"][medium] = counts["cycles"].get(medium, 0) + killed


@pytest.mark.parametrize("medium", MEDIA)
def test_training_that_is_killed_at_any_instant_goes_on_as_if_it_were_not(
    server: Server, rng: np.random.Generator, medium: str
) -> None:
    lives(server, medium, 8, rng)


@pytest.mark.soak
@pytest.mark.parametrize("medium", MEDIA)
def test_hundreds_of_kills_lose_nothing(
    server: Server, rng: np.random.Generator, medium: str
) -> None:
    lives(server, medium, 300, rng)


def test_death_inside_every_phase_of_recovery_and_commit_loses_nothing(
    server: Server, region_dir: Path
) -> None:
    asked = request(Trained, region_dir, "plain", params={})
    golden = server.run(asked)[0].check_ended()
    life = Life(server, region_dir / "run", golden)
    life.live(params={"phase": "creation"}).check_killed()
    assert life.done == 0
    life.check_folder()
    for k, phase in enumerate(("copying", "invalidation", "payload committed"), 1):
        life.live(params={"phase": phase, "at": 3 * k}).check_killed()
    for phase in CALLS:
        for _ in range(2):  # twice in a row, without a step in between
            life.live(params={"phase": phase, "at": 0}).check_killed()
            counts["phases"] += 1
    life.live(params={"phase": "manifest committed", "at": life.done + 2}).check_killed()
    life.live(params={"phase": "growth", "at": life.done + 1}).check_killed()
    life.live(params={"phase": "closing", "at": 0}, last=Trained.steps).check_killed()
    life.live().check_ended()
    counts["phases"] += len(DELAYS)
    life.check_folder()
    assert os.listdir(life.path) == ["region-00000.lck"]


def test_a_snapshot_that_is_captured_but_not_durable_is_not_acknowledged(
    server: Server, region_dir: Path, disk_dir: Path
) -> None:
    golden = server.run(request(Trained, region_dir, "plain"))[0].check_ended()
    life = Life(server, disk_dir, golden)  # on memory the two are one instant of one thread
    held_at = 7
    death = {"kill_step": held_at, "kill_where": "after"}
    died = life.live(params={"held_at": held_at}, **death).check_killed()
    assert died.value("captured") == held_at - 1
    assert life.acknowledged < held_at - 1  # on a slow disk earlier steps may have slipped
    life.live().check_ended()


# ---- Two trainers, one region -------------------------------------------------------------------


def race(server: Server, folder: Path, rounds: int, rng: np.random.Generator) -> None:
    """Every round: one owner, one that is told and takes over when the owner has been killed."""
    golden = server.run(request(Racing, folder, "plain"))[0].check_ended()
    pipes = [str(folder / name) for name in ("pipe-0", "pipe-1")]
    for pipe in pipes:
        os.mkfifo(pipe)
    life, n = Life(server, folder / "run-0", golden), 0
    for _ in range(rounds):
        lead = int(rng.integers(0, 12))
        asked = [
            request(
                Racing, life.path, life.mode, settle=False,
                params={"hears": pipes[i], "says": pipes[1 - i], "lead": lead},
            )
            for i in range(2)
        ]  # fmt: skip
        judge_race(life, server.run(*asked, parallel=2))
        life.check_folder()
        counts["races"] += 1
        if life.ended:
            n += 1
            life = Life(server, folder / f"run-{n}", golden)


def judge_race(life: Life, both: list[Outcome]) -> None:
    """One owned the region while the other was told so; then the other one did."""
    logs = "\n".join(outcome.log for outcome in both)
    owners = [o for o in both if any("owner" in line for line in o.lines)]
    losers = [o for o in both if any("lost" in line for line in o.lines)]
    assert len(owners) == len(losers) == 1 and owners != losers, logs
    owner, loser = owners[0].check_killed(), losers[0]
    told = next(i for i, line in enumerate(loser.lines) if "lost" in line)
    why = loser.value("lost")
    assert str(life.path) in why
    # Not known while the region is being made, nor before the owner's first word on its page.
    named = re.findall(r"its owner is process (\d+)", why)
    assert named in ([], [str(owner.value("owner"))]), why
    promised = life.acknowledged
    life.judge(owner)
    [seen] = [line["restored"] for line in loser.lines[:told] if "restored" in line]
    assert promised <= (seen or 0) <= life.done, f"restored {seen} beside the owner: {loser.log}"
    life.judge(replace(loser, lines=loser.lines[told + 1 :]))


def test_of_two_trainers_one_owns_the_region_and_the_other_is_told(
    server: Server, region_dir: Path, rng: np.random.Generator
) -> None:
    race(server, region_dir, 8, rng)


@pytest.mark.soak
def test_hundreds_of_races_have_one_winner_at_a_time(
    server: Server, region_dir: Path, rng: np.random.Generator
) -> None:
    race(server, region_dir, 300, rng)
