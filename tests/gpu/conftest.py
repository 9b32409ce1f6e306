"""The tests on a GPU share these fixtures.

Each test has a twin on the CPU, so that its own code has been run. A GPU test that hangs cannot be
interrupted: `make gpu-check` runs each file in a process of its own and ends it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from gpu_jobs import Mode, moded

# Before the first matrix product on the GPU: without it they are not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_MODES = [
    *(moded("cpu", placement) for placement in ("auto", "staged")),
    *(moded("cuda", placement) for placement in ("direct", "host", "device", "auto")),
]


@pytest.fixture(params=_MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """A device, and how its tensors reach the region."""
    found: Mode = request.param
    return found


@pytest.fixture(params=[moded("cpu", "auto"), moded("cuda", "auto")])
def auto(request: pytest.FixtureRequest) -> Mode:
    """A device, and lightck's own choice."""
    found: Mode = request.param
    return found


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Every operation gives the same bits again; the generators are left as they were."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    # Else each new tensor is filled with NaN, which hides what tests of reused memory look for.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with torch.random.fork_rng():
        yield
    torch.use_deterministic_algorithms(before)
