"""Provide memory and folders that micro-benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.place import scratch


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield an empty folder on tmpfs."""
    with scratch("tmpfs") as path:
        yield path


@pytest.fixture(scope="session")
def memory() -> torch.Tensor:
    """Return source memory that no cache holds."""
    return torch.ones(64 << 20, dtype=torch.float32).view(torch.uint8)
