"""Workers read memory that nobody has freed, whatever the loop does to its tensors meanwhile."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

import lightck
from lightck.policy import AtSteps
from support import faults, processes


@pytest.mark.parametrize("medium", ["tmpfs", "disk"])
def test_replacing_a_parameters_memory_under_slow_copies_harms_nothing(
    medium: str, run_dir: Path, disk_dir: Path
) -> None:
    path = run_dir if medium == "tmpfs" else disk_dir

    def job() -> int:
        warnings.simplefilter("ignore")
        model = torch.nn.Linear(3000, 3000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = lightck.attach(model, optimizer, path, schedule="eager")
        x = torch.ones(1, 3000)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with faults.delayed(faults.COPY, 0.001):
            model(x)
            # The only other reference to the 36 MB that are being copied goes: without a hold on
            # them they are unmapped at once.
            model.weight.data = torch.zeros(1).expand(3000, 3000).contiguous()
            model(x).sum().backward()
            optimizer.step()
        torn = handle.stats().torn
        handle.detach()
        return torn

    assert processes.run(job) == 1


def test_what_a_forward_changes_has_been_copied_when_the_forward_begins(run_dir: Path) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(300_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.layer(x)

    def job() -> tuple[int, int]:
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = lightck.attach(model, optimizer, run_dir, policy=AtSteps([3]), failure="off")
        with faults.delayed(faults.COPY, 0.01):
            for _ in range(4):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        handle.wait()
        torn = handle.stats().torn
        handle.detach()
        return torn, int(model.count[0])

    assert processes.run(job) == (0, 4)
    model = Counting()
    info = lightck.restore(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir)
    assert info is not None and info.step == 3
    assert torch.equal(model.count, torch.full((300_000,), 3.0))


def test_a_torn_snapshot_on_page_media_keeps_its_private_copies_until_it_is_freed(
    disk_dir: Path,
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            # It has gaps, so that a copy of it is made first.
            self.register_buffer("big", torch.zeros(8_000_000, 2)[:, 0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def job() -> int:
        warnings.simplefilter("ignore")
        # The thread that frees the snapshot gets its turn late, as beside a busy training thread.
        sys.setswitchinterval(2)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = lightck.attach(model, optimizer, disk_dir, schedule="eager")
        x = torch.ones(2, 8)
        for _ in range(4):
            loss = model(x).sum()
            with torch.no_grad():
                model.layer.weight.add_(1)
            model(x).sum().backward()
            optimizer.step()
            del loss
        torn = handle.stats().torn
        sys.setswitchinterval(0.005)
        handle.detach()
        return torn

    assert processes.run(job) >= 1
