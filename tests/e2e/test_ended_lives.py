"""However a life of a run ends, the next one knows whether that was a failure, and what it cost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from lightck.examine import contents
from lightck.loop.policy_state import parsed
from support import back_ends
from support.e2e.script_server import Scripts

LIFE = """
import os, signal, sys, time
import torch
import lightck
from lightck.region import stats_page

way, path, failure = sys.argv[1:4]
backend = sys.argv[4]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
info = lightck.restore(model, optimizer, path)
handle = lightck.attach(
    model, optimizer, path, policy="auto", failure=failure, backend=backend, on_error="raise"
)
begun = handle.step

def train(steps):
    for _ in range(steps):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle.step == begun + 1:
            handle.wait(begun + 1)

def fail(how):
    if how == "error":
        raise RuntimeError("the training's own")
    if how == "exit":
        sys.exit(3)
    if how == "SIGKILL":  # on a disk the commit thread stores the page, when it gets to it
        while stats_page.read(handle.region.native).numbers.get("step", 0) < begun + 4:
            time.sleep(0.001)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)

if way.startswith("with "):
    with handle:
        train(4)
        fail(way[5:])
train(1 if way == "short error" else 4)
if way in ("close", "detach"):
    getattr(handle, way)()
elif way != "nothing":
    fail(way.split()[-1])
"""


def _live(
    scripts: Scripts, path: Path, way: str, failure: str = "jit", backend: str = "auto"
) -> int:
    done = scripts.run(LIFE, way, str(path), failure, backend)
    assert done.returncode == 0 or way not in ("close", "detach", "nothing"), done.stderr
    assert (
        "Traceback" not in done.stderr
        or "the training's own" in done.stderr
        or ("KeyboardInterrupt" in done.stderr)
    ), done.stderr
    return done.returncode


def _next_life(path: Path, backend: str = "auto") -> None:
    """Go on with the run in this process, and close it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    assert lightck.restore(model, optimizer, path) is not None
    with lightck.attach(model, optimizer, path, policy="auto", backend=backend):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()


def _learned(path: Path) -> dict[str, Any]:
    values = parsed(contents(path).learned)
    assert values is not None
    return values


def _recovered(path: Path) -> list[bool]:
    return [each[2] for each in _learned(path)["failures"]["failures"]]


WAYS = [
    ("close", "jit", []),
    ("detach", "jit", []),
    ("nothing", "jit", []),
    ("with error", "jit", [True]),
    ("error", "jit", [True]),
    ("with error", "off", [False]),
    ("error", "off", [False]),
    ("with exit", "jit", [True]),
    ("with SIGTERM", "jit", [True]),
    ("SIGTERM", "jit", [True]),
    ("SIGTERM", "off", [False]),
    ("SIGKILL", "jit", [False]),
    ("with SIGINT", "jit", []),
    ("SIGINT", "jit", []),
    ("with SIGINT", "off", []),
    ("short error", "jit", []),
]


@pytest.mark.parametrize(("way", "failure", "expected"), WAYS)
def test_the_end_of_a_life_is_known_to_the_next(
    scripts: Scripts, region_dir: Path, way: str, failure: str, expected: list[bool]
) -> None:
    path = region_dir / "run"
    _live(scripts, path, way, failure)
    assert _recovered(path) == []
    _next_life(path)
    assert _recovered(path) == expected
    assert 0 < _learned(path)["failures"]["exposure"] < 600 or expected


@pytest.mark.parametrize(
    "kind",
    [
        each
        for each in back_ends.KINDS
        if each.name in ("native-disk", "pmemobj-tmpfs", "native-dax")
    ],
    ids=lambda kind: kind.name,
)
def test_on_every_medium_a_kill_is_counted(scripts: Scripts, kind: back_ends.Kind) -> None:
    with back_ends.prepared(kind) as ground:
        _live(scripts, ground.path, "SIGKILL", backend=kind.backend)
        _next_life(ground.path, kind.backend)
        assert _recovered(ground.path) == [False]


def test_four_lives_in_a_row_are_all_counted(scripts: Scripts, region_dir: Path) -> None:
    path = region_dir / "run"
    for way in ("SIGKILL", "with SIGTERM", "with SIGINT"):
        _live(scripts, path, way)
    _next_life(path)
    assert _recovered(path) == [False, True]


def test_a_run_whose_snapshots_have_no_state_of_policies_begins_to_learn(
    scripts: Scripts, region_dir: Path
) -> None:
    """An older build's are such, and those of a policy by steps."""
    path = region_dir / "run"
    old = LIFE.replace('policy="auto"', "policy=1")
    done = scripts.run(old, "SIGKILL", str(path), "off", "auto")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert contents(path).learned is None
    _next_life(path)
    assert _recovered(path) == [False]
