"""All that recovery in place does not cover passes through its process group unharmed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[1] / "support/inplace/others.py"
TORCHRUN = ["torch.distributed.run"]
LIGHTCK = ["lightck.cli", "run"]
STEPS = 6


def trained(command: list[str], folder: Path, kind: str, *death: str) -> str:
    """Run two ranks to their end; return the log."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", *command, "--standalone", "--nproc-per-node=2", "--max-restarts=3",
         str(TRAINER), kind, str(folder), str(STEPS), *death],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def said(folder: Path, rank: int, what: str) -> list[str]:
    """Return what a rank has said of something, in order; a repeated line counts once."""
    lines = (folder / f"{rank}.said").read_text().splitlines()
    return list(dict.fromkeys(line for line in lines if line.startswith(f"{what} ")))


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["fsdp", "objects", "compiled"])
def test_a_training_gives_the_bits_that_it_gives_under_torchrun(tmp_path: Path, kind: str) -> None:
    trained(TORCHRUN, tmp_path / "torchrun", kind)
    trained(LIGHTCK, tmp_path / "lightck", kind)
    for rank in range(2):
        steps = said(tmp_path / "lightck", rank, "step")
        assert len(steps) == STEPS
        assert steps == said(tmp_path / "torchrun", rank, "step")


@pytest.mark.timeout(500)
def test_sharded_state_restarts_all_ranks_and_says_so(tmp_path: Path) -> None:
    trained(LIGHTCK, tmp_path / "plain", "fsdp")
    log = trained(LIGHTCK, tmp_path / "killed", "fsdp", "4")
    assert "in_place_off" in log and "alike on all ranks" in log, log[-4000:]
    for rank in range(2):
        assert said(tmp_path / "killed", rank, "step") == said(tmp_path / "plain", rank, "step")
        assert len(said(tmp_path / "killed", rank, "pid")) == 2
