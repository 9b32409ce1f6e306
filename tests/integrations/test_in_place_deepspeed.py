"""DeepSpeed under `lightck run`: ZeRO-0 recovers in place, ZeRO-1 is restarted and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

LOOP = Path(__file__).with_name("loops") / "deepspeed_in_place.py"
STEPS = 12


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    """Skip, visibly, where the framework is not installed."""
    if find_spec("deepspeed") is None:
        pytest.skip("SKIPPED: deepspeed is not installed: make integrations")
    yield


def trained(folder: Path, world: int, stage: int, *deaths: str) -> str:
    """Train under `lightck run`; return what it has logged."""
    folder.mkdir()
    words = ["run", "--standalone", f"--nproc-per-node={world}", "--preload=deepspeed"]
    done = subprocess.run(
        [sys.executable, "-m", "lightck.cli", *words, str(LOOP), str(folder), str(stage),
         str(STEPS), *deaths],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def said(folder: Path, rank: int, what: str) -> list[str]:
    """Return what a rank has said of something, in order; a repeated line counts once."""
    lines = (folder / f"{rank}.said").read_text().splitlines()
    found = [line.partition(" ")[2] for line in lines if line.startswith(what + " ")]
    return list(dict.fromkeys(found))


def same(a: object, b: object) -> bool:
    """Compare two states bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def check_golden(folder: Path, golden: Path, world: int) -> None:
    for rank in range(world):
        assert said(folder, rank, "loss") == said(golden, rank, "loss")
        states = [
            torch.load(each / f"{rank}.state", weights_only=False) for each in (folder, golden)
        ]
        assert same(*states), f"rank {rank} ends with another state"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_of_zero_0_dies_in_its_forward_and_the_others_lose_nothing(
    tmp_path: Path, world: int
) -> None:
    trained(tmp_path / "golden", world, 0)
    log = trained(tmp_path / "killed", world, 0, "1@5")
    check_golden(tmp_path / "killed", tmp_path / "golden", world)
    lives = [len(said(tmp_path / "killed", rank, "pid")) for rank in range(world)]
    assert lives == [1, 2, *[1] * (world - 2)], log[-4000:]
    assert "in_place_refused" not in log


@pytest.mark.timeout(600)
def test_zero_1_says_that_it_cannot_and_all_ranks_restart(tmp_path: Path) -> None:
    trained(tmp_path / "golden", 2, 1)
    log = trained(tmp_path / "killed", 2, 1, "1@5")
    assert "in_place_off" in log and "are alike on all ranks" in log, log[-4000:]
    check_golden(tmp_path / "killed", tmp_path / "golden", 2)
    assert [len(said(tmp_path / "killed", rank, "pid")) for rank in range(2)] == [2, 2]
