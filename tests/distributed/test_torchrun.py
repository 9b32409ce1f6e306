"""Under torchrun itself: its restarts inside a job, and its own death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support.distributed import ranks, torchrun_training
from support.distributed.resumed import same
from support.proof import record

LAST = 12
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # pytorch issue 135712


def torchrun(folder: Path, region: Path, world: int, *deaths: str) -> subprocess.Popen[bytes]:
    """A job in a session of its own; its output lies in `folder`."""
    options = ["--standalone", f"--nproc-per-node={world}", f"--max-restarts={len(deaths)}"]
    script = [
        "-m",
        "support.distributed.torchrun_training",
        str(folder),
        str(region),
        str(LAST),
        *deaths,
    ]
    folder.mkdir(exist_ok=True)
    region.mkdir(exist_ok=True)
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *script],
            env={**os.environ, **OWN_STORE, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ended_well(job: subprocess.Popen[bytes], folder: Path) -> None:
    assert job.wait(250) == 0, (folder / "output").read_text()


def said(folder: Path, rank: int) -> list[list[str]]:
    file = folder / f"{rank}.said"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [line.split() for line in whole.splitlines()]


def losses(folder: Path, rank: int) -> dict[int, set[str]]:
    """All that was ever said of each step."""
    found: dict[int, set[str]] = {}
    for _, step, loss in said(folder, rank):
        if step != "pid":
            found.setdefault(int(step), set()).add(loss)
    return found


def same_end(one: Path, other: Path, world: int) -> None:
    """Every loss and every tensor of two jobs is the same."""
    for rank in range(world):
        assert losses(one, rank) == losses(other, rank), rank
        assert [*losses(one, rank)] == [*range(1, LAST + 1)], rank
        states = [torch.load(folder / f"{rank}.state") for folder in (one, other)]
        assert same(*states), rank


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job that nothing disturbs: of forked ranks, without torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "regions").mkdir()
    goes_on(folder, folder / "regions")
    return folder


def goes_on(folder: Path, regions: Path) -> None:
    """Train to the end in forked ranks, which need not import torch again."""
    with ranks.started(2, lambda _: torchrun_training.main(folder, regions, LAST, [])) as job:
        job.results()


def test_a_job_that_torchrun_restarts_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: Path
) -> None:
    """One rank dies in its first life, the other in the second."""
    folder = tmp_path / "said"
    ended_well(torchrun(folder, tmp_path / "regions", 2, "1:4", "0:8"), folder)
    lives = {int(line[0]) for line in said(folder, 0)}
    assert lives == {0, 1, 2}, (folder / "output").read_text()
    first = [int(step) for life, step, _ in said(folder, 0) if step != "pid" and life == "1"][0]
    assert first > 1, "the second life began anew"
    same_end(folder, undisturbed, 2)


def test_a_job_whose_torchrun_is_killed_goes_on_under_another(
    tmp_path: Path, undisturbed: Path
) -> None:
    """Its workers are left behind, as orphans without a store: they end, or are ended."""
    folder, regions = tmp_path / "said", tmp_path / "regions"
    killed = torchrun(folder, regions, 2, "0:5:agent")
    assert killed.wait(250) == -signal.SIGKILL, (folder / "output").read_text()
    for rank in range(2):
        gone(int(said(folder, rank)[0][2]))
    again = torchrun(folder, regions, 2)
    ended_well(again, folder)
    same_end(folder, undisturbed, 2)


def test_sigterm_to_torchrun_loses_no_step_though_its_workers_hang(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent once, with its own time-out; one worker sleeps, the other waits for it in gloo."""
    monkeypatch.setenv("LIGHTCK_FAILURE", "jit")
    monkeypatch.setenv("LIGHTCK_POLICY", "1000000")  # no step is ever due
    folder, regions = tmp_path / "said", tmp_path / "regions"
    ended = torchrun(folder, regions, 2, "1:5:stands")
    while not any(step == "5" for _, step, _ in said(folder, 1)):
        time.sleep(0.02)  # a test's time-out ends it
    began = time.monotonic()
    ended.terminate()
    assert ended.wait(250) != 0
    record("torchrun_sigterm", {"ended_after_s": round(time.monotonic() - began, 2)})
    for rank in range(2):
        gone(int(said(folder, rank)[0][2]))
    goes_on(folder, regions)
    for rank in range(2):
        steps = [step for _, step, _ in said(folder, rank)]
        lives = " ".join(steps).split("pid")
        assert [int(life.split()[0]) for life in lives[1:]] == [1, 6], lives
    same_end(folder, undisturbed, 2)


def gone(pid: int) -> None:
    """Wait for the end of a process that is not a child."""
    while Path(f"/proc/{pid}").exists():  # a test's time-out ends it
        time.sleep(0.05)
