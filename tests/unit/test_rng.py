"""Generators' states, taken twice per step: quick answers are never stale ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightck.capture import boundary, rng

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()).item(),
    "numpy": np.random.random,
    "numpy, normal": np.random.randn,  # every second one is kept from the draw before
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("before", range(3))
def test_every_draw_shows_in_the_next_answer(name: str, before: int) -> None:
    draw = DRAWS[name]
    for _ in range(before):
        draw()
    states = [boundary.rebuild(rng.capture())]
    drawn = []
    for _ in range(4):
        drawn.append(draw())
        states.append(boundary.rebuild(rng.capture()))
    for i in range(4):
        rng.restore(states[i])
        assert [draw() for _ in range(4 - i)] == drawn[i:]


def test_another_kind_of_generator_is_taken_too() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    rng.capture()
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        states = boundary.rebuild(rng.capture())
        assert states["numpy"]["bit_generator"] == "PCG64"
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
    assert boundary.rebuild(rng.capture())["numpy"]["bit_generator"] == "MT19937"
