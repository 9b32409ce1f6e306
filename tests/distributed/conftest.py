"""Ranks are forked from this process, also by later tests: libgomp must not have begun in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightck.pipeline import at_once


@pytest.fixture(autouse=True)
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states go through the window, as large ones do, but in tests marked `at_once`."""
    if request.node.get_closest_marker("at_once") is None:
        monkeypatch.setattr(at_once, "MOST_BYTES", -1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A child whose parent has run a parallel region hangs in its own first one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
