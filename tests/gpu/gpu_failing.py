"""A training process that fails on a device; `python gpu_failing.py WHAT DEVICE PLACEMENT FOLDER`.

`sticky`: a kernel makes the device's context useless. `killed`: SIGKILL while copies are under way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_jobs import Mode
from test_gpu_ordering import Counting, Wave

import lightck

ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}


def prepared(mode: Mode) -> tuple[Wave, Counting, torch.Tensor]:
    """Return model, optimizer and input."""
    with torch.device(mode.device):
        model, x = Wave(ELEMENTS[mode.device]), torch.ones(8)
    return model, Counting(model.parameters()), x


def step(model: Wave, optimizer: Counting, x: torch.Tensor) -> None:
    """One step; nothing is waited for."""
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def sticky(mode: Mode, folder: Path) -> None:
    """Step 2 is due and committed, step 3 is not due; step 4's forward ends the device."""
    model, optimizer, x = prepared(mode)
    told = folder / "told.json"
    failure = lightck.Failure(on_failure=lambda saved: told.write_text(json.dumps(asdict(saved))))
    with mode.attach(model, optimizer, folder / "run", policy=2, failure=failure) as handle:
        for _ in range(3):
            step(model, optimizer, x)
        handle.wait()
        model(x)
        if not mode.gpu:
            raise RuntimeError("what stands for a lost device")
        nowhere = torch.tensor([1 << 30], device=mode.device)
        print(x[nowhere])
        torch.cuda.synchronize()
        raise AssertionError("an index out of bounds went unnoticed")


def killed(mode: Mode, folder: Path) -> None:
    """Ten steps, none waited for; death in the middle."""
    model, optimizer, x = prepared(mode)
    # Snapshots that find no free slot slip.
    handle = mode.attach(model, optimizer, folder / "run")
    for _ in range(3):
        step(model, optimizer, x)
    handle.wait()
    for _ in range(7):
        step(model, optimizer, x)
    os.kill(os.getpid(), signal.SIGKILL)


def main(what: str, device: str, placement: str, folder: str) -> None:
    """Let one failure happen."""
    ways: dict[str, Any] = {"sticky": sticky, "killed": killed}
    ways[what](Mode(device, placement), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
