"""Generators' states, taken twice per step: quick answers are never stale ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightck
from lightck.errors import CorruptSnapshotError, StateError
from lightck.state import boundary_blob, boundary_codec, rng

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
    states = [boundary_codec.rebuild(rng.capture())]
    drawn = []
    for _ in range(4):
        drawn.append(draw())
        states.append(boundary_codec.rebuild(rng.capture()))
    for i in range(4):
        rng.restore(states[i])
        assert [draw() for _ in range(4 - i)] == drawn[i:]


def test_another_kind_of_generator_is_taken_too() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    rng.capture()
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        states = boundary_codec.rebuild(rng.capture())
        assert states["numpy"]["bit_generator"] == "PCG64"
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
    assert boundary_codec.rebuild(rng.capture())["numpy"]["bit_generator"] == "MT19937"


@pytest.fixture
def global_generator() -> Iterator[None]:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("global_generator")
@pytest.mark.parametrize("here", ["MT19937", "PCG64", "Philox"])
@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_a_generator_of_any_kind_comes_back_whatever_is_there_then(kind: str, here: str) -> None:
    np.random.set_bit_generator(getattr(np.random, kind)(3))  # type: ignore[attr-defined]
    np.random.randn(3)  # a normal number is kept
    blob = boundary_blob.closed(rng.capture())
    drawn = [np.random.randn(), np.random.random(), np.random.randn()]
    np.random.set_bit_generator(getattr(np.random, here)(4))  # type: ignore[attr-defined]
    states = boundary_codec.rebuild(boundary_blob.opened(blob, context="test"))
    rng.check(states)
    rng.restore(states)
    assert [np.random.randn(), np.random.random(), np.random.randn()] == drawn


class Mine(np.random.MT19937):
    """A generator that nobody else can make."""


@pytest.mark.usefixtures("global_generator")
def test_a_generator_that_could_not_come_back_is_refused_by_attach(region_dir: Path) -> None:
    np.random.set_bit_generator(Mine(3))  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="is a Mine, .* one of MT19937, PCG64") as caught:
        lightck.attach(torch.nn.Linear(2, 2), path=region_dir / "run")
    assert caught.value.path == "rng/numpy"
    with pytest.raises(CorruptSnapshotError):
        rng.check({**rng_states(), "numpy": np.random.get_state(legacy=False)})


def rng_states() -> Any:
    return {"torch": torch.get_rng_state(), "python": rng.packed(random.getstate())}


NUMPYS = [
    pytest.param(lambda: None, id="as it is"),
    pytest.param(lambda: np.random.seed(3), id="seeded"),
    pytest.param(lambda: (np.random.seed(3), np.random.randn()), id="a normal number is kept"),
    pytest.param(lambda: (np.random.seed(3), np.random.randn(2)), id="none is kept, same words"),
]


@pytest.mark.parametrize("one", NUMPYS)
@pytest.mark.parametrize("other", NUMPYS)
def test_a_state_that_is_set_shows_in_the_next_answer(
    one: Callable[[], Any], other: Callable[[], Any]
) -> None:
    one()
    first = np.random.get_state(legacy=False)
    other()
    second = np.random.get_state(legacy=False)
    for state in (first, second, first, second, second):
        np.random.set_state(state)
        rng.capture()
        taken = boundary_codec.rebuild(rng.capture())["numpy"]
        assert repr(taken) == repr(np.random.get_state(legacy=False))


def test_a_seed_and_a_kept_normal_number_of_python_show_in_the_next_answer() -> None:
    random.seed(4)
    states = [random.getstate()]
    random.gauss(0, 1)
    states.append(random.getstate())
    random.gauss(0, 1)  # the words are those of before
    states.append(random.getstate())
    states += [(*states[0][:2], zero) for zero in (0.0, -0.0)]
    for state in (*states, *reversed(states)):
        random.setstate(state)
        assert repr(rng.unpacked(rng.capture()["python"])) == repr(state)


def test_another_generator_of_the_same_kind_is_not_taken_for_the_last_one() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    rng.capture()
    np.random.set_bit_generator(np.random.MT19937(3))  # type: ignore[attr-defined]
    try:
        for _ in range(3):
            taken = boundary_codec.rebuild(rng.capture())["numpy"]
            assert repr(taken) == repr(np.random.get_state(legacy=False))
            np.random.random()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_undrawn_generators_give_the_same_objects() -> None:
    one, other = rng.capture(), rng.capture()
    assert one["python"] is other["python"] and one["numpy"] is other["numpy"]
