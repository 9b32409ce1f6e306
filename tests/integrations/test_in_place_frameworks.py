"""Lightning, HF's Trainer and loops of Accelerate's under `lightck run` recover in place."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import torch
from test_in_place_deepspeed import said

LOOP = Path(__file__).with_name("loops") / "in_place_frameworks.py"
WORLD, EPOCHS = 2, 2


def trained(folder: Path, framework: str, *deaths: str) -> str:
    """Train under `lightck run`; return what it has logged."""
    folder.mkdir()
    words = ["run", "--standalone", f"--nproc-per-node={WORLD}", str(LOOP), framework]
    done = subprocess.run(
        [sys.executable, "-m", "lightck.cli", *words, str(folder), *deaths],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate"])
def test_both_ranks_die_in_turn_and_neither_death_restarts_the_other(
    tmp_path: Path, framework: str
) -> None:
    """Later deaths come where a replacement is the only witness, behind a log and behind an epoch.

    An epoch has 12 steps; the Trainer logs at each fifth, and evaluates behind each epoch.
    """
    if find_spec(framework) is None:
        pytest.skip(f"SKIPPED: {framework} is not installed: make integrations")
    golden, killed = tmp_path / "golden", tmp_path / "killed"
    trained(golden, framework)
    log = trained(killed, framework, "1@7", "0@9", "1@15")
    if framework != "transformers":  # whose rows carry no numbers; Accelerate's seeds differ
        rows = [
            map(int, each.split()[1:]) for rank in (0, 1) for each in said(golden, rank, "rows")
        ]
        assert sorted(chain(*rows)) == sorted([*range(96)] * EPOCHS)
    for rank, lives in ((0, 2), (1, 3)):
        for what in ("loss", "rows"):
            assert said(killed, rank, what) == said(golden, rank, what), log[-4000:]
        assert len(said(killed, rank, "pid")) == lives, log[-4000:]
        states = [torch.load(each / f"{rank}.state") for each in (killed, golden)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert "in_place_refused" not in log and "in_place_off" not in log, log[-4000:]
