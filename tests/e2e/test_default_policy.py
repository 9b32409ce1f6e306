"""Without a policy the first step is saved, then what costs and failures ask for, and the last."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch

import lightck
from support.e2e.script_server import Scripts

TRAIN = """
import os, signal, sys
import torch
from torch import nn
import lightck

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
path, steps, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
info = lightck.restore(model, optimizer, path)
print("restored", info and info.step, flush=True)
handle = lightck.attach(model, optimizer, path)
while handle.step < steps:
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if handle.step == 1:
        handle.wait(1)
    if handle.step == kill:
        os.kill(os.getpid(), signal.SIGKILL)
stats = handle.stats()
handle.close()
print("policy", stats.policy)
print("sum", sum(p.double().sum() for p in model.parameters()).item(), torch.rand(1).item())
"""


def _train(
    scripts: Scripts, path: Path, steps: int, kill: int = 0
) -> subprocess.CompletedProcess[str]:
    return scripts.run(TRAIN, str(path), str(steps), str(kill), without="LIGHTCK_POLICY")


def test_the_first_step_and_the_last_are_saved(scripts: Scripts, region_dir: Path) -> None:
    done = _train(scripts, region_dir / "run", 30)
    assert done.returncode == 0, done.stderr
    assert "policy every" in done.stdout
    assert "LIGHTCK" not in done.stderr
    assert {row["step"] for row in lightck.snapshots(region_dir / "run").to_pylist()} >= {30}


def test_a_run_that_was_killed_three_times_ends_like_one_that_was_not(
    scripts: Scripts, region_dir: Path
) -> None:
    whole = _train(scripts, region_dir / "whole", 60)
    assert whole.returncode == 0, whole.stderr
    for kill in (5, 30, 59):
        killed = _train(scripts, region_dir / "run", 60, kill)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = _train(scripts, region_dir / "run", 60)
    assert done.returncode == 0, done.stderr
    assert "restored None" not in done.stdout
    assert done.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    from lightck.examine import contents
    from lightck.loop.policy_state import parsed

    learned = parsed(contents(region_dir / "run").learned)
    assert learned is not None
    assert len(learned["failures"]["failures"]) >= 3, learned


def test_attach_without_a_policy_has_auto(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTCK_POLICY", raising=False)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, optimizer, region_dir / "run") as handle:
        assert str(handle.config.policy) == "auto"
        assert handle.stats().policy == "auto"
