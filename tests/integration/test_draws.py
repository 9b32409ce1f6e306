"""A batch that is taken ahead of its step is told of, where it can be told from dropout and all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import lightck

STEPS = 7


def by_torch() -> torch.Tensor:
    return torch.randn(2, 4)


def by_numpy() -> torch.Tensor:
    return torch.from_numpy(np.random.rand(2, 4).astype(np.float32))


def fixed() -> torch.Tensor:
    return torch.ones(2, 4)


def by_hand(model: Any, optimizer: Any, fetch: Callable[[], Any]) -> None:
    """Train by nanoGPT's loop."""
    x = fetch()
    for _ in range(STEPS):
        loss = model(x).sum()
        x = fetch()
        loss.backward()
        optimizer.step()


def at_the_top(model: Any, optimizer: Any, fetch: Callable[[], Any]) -> None:
    for _ in range(STEPS):
        model(fetch()).sum().backward()
        optimizer.step()


def told(
    path: Path, caplog: Any, loop: Any, fetch: Any, *, drop: float = 0.0, **extras: Any
) -> str:
    """Return what the log says of a loop's batches."""
    caplog.clear()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(drop))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "lightck"):
        with lightck.attach(model, optimizer, path, extras=extras, overwrite=True):
            loop(model, optimizer, fetch)
    found = [r.lightck["why"] for r in caplog.records if r.lightck_event == "batch_ahead"]
    assert len(found) < 2
    return "".join(found)


@pytest.mark.parametrize(
    ("loop", "fetch", "drop", "expected"),
    [
        (by_hand, by_torch, 0.0, "of torch move"),
        (by_hand, by_numpy, 0.5, "of numpy, torch move"),
        (by_hand, by_torch, 0.5, ""),  # it may be dropout alone
        (by_hand, fixed, 0.5, ""),
        (at_the_top, by_torch, 0.0, ""),
        (at_the_top, by_numpy, 0.5, ""),
        (at_the_top, fixed, 0.5, ""),
    ],
)
def test_batch_that_a_function_makes_during_a_step_is_told_of(
    run_dir: Path, caplog: Any, loop: Any, fetch: Any, drop: float, expected: str
) -> None:
    why = told(run_dir, caplog, loop, fetch, drop=drop)
    assert expected in why and bool(expected) == bool(why)
    assert not why or "lightck.Prefetched(fn)" in why


def test_loop_with_prefetched_is_told_nothing(run_dir: Path, caplog: Any) -> None:
    batches = lightck.Prefetched(by_numpy)
    assert told(run_dir, caplog, by_hand, lambda: next(batches), data=batches) == ""


def ahead(batches: Any) -> Iterator[Any]:
    """Draw batches as wrappers that bring them to a device do: one ahead."""
    held = None
    for batch in batches:
        if held is not None:
            yield held
        held = batch
    yield held


@pytest.mark.parametrize(
    ("loop", "around", "expected"),
    [
        (at_the_top, iter, ""),
        (at_the_top, lambda loader: (x for x in loader), ""),
        (at_the_top, ahead, "gave 1 batches more"),
        (by_hand, iter, "when the forward of a step has begun"),
    ],
)
def test_loader_that_is_drawn_from_ahead_of_the_loop_is_told_of(
    run_dir: Path, caplog: Any, loop: Any, around: Any, expected: str
) -> None:
    data = torch.randn(40, 4)
    sampler = lightck.ResumableSampler(data)
    batches = around(DataLoader(data, batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    why = told(run_dir, caplog, loop, lambda: next(batches), data=sampler)
    assert expected in why and bool(expected) == bool(why)


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_epoch_that_ends_soon_after_a_resume_is_no_batch_ahead(
    run_dir: Path, caplog: Any, left: int
) -> None:
    """A request at the end of the data brings no batch."""
    data = torch.randn(40, 4)
    sampler = lightck.ResumableSampler(data)
    sampler.load_state_dict(sampler.state_dict() | {"consumed": 40 - 2 * left})
    loader = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    def two_epochs(model: Any, optimizer: Any, fetch: Any) -> None:
        for _ in range(2):
            for x in loader:
                model(x).sum().backward()
                optimizer.step()

    assert told(run_dir, caplog, two_epochs, None, data=sampler) == ""
