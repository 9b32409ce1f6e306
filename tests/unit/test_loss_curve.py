from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.policy.loss_curve import LossCurve

_SEEDS = range(5)


def _exponential(step: float) -> float:
    return math.exp(-step / 4000)


def _power(step: float) -> float:
    return (1 + step / 10) ** -0.3


def _progress(
    loss: Callable[[float], float],
    marks: tuple[int, ...],
    seed: int,
    noise: float = 0.1,
    spoil: Callable[[int, float], float] = lambda _, value: value,
    scale: float = 1.0,
    shift: float = 0.0,
) -> list[float | None]:
    """Return the progress at some steps, of a loss with noise that is a share of it."""
    rng, curve, found = random.Random(seed), LossCurve(), []
    for step in range(1, marks[-1] + 1):
        value = spoil(step, loss(step) * (1 + noise * rng.gauss(0, 1)))
        curve = curve.observed(0.2 * step, scale * value + shift)
        if step in marks:
            found.append(curve.progress)
    return found


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize(
    ("loss", "bands"),
    [
        # True are .880, .671, .224; and .099, .066, .043.
        # Of the first, 60 seeds gave .80 +- .23, .65 +- .04, .303 +- .008.
        (_exponential, [(0.15, 1.3), (0.57, 0.77), (0.27, 0.34)]),
        (_power, [(0.06, 0.18), (0.06, 0.11), (0.045, 0.065)]),
    ],
)
def test_progress_of_a_loss_that_falls(
    loss: Callable[[float], float], bands: list[tuple[float, float]], seed: int
) -> None:
    found = _progress(loss, (1_000, 3_000, 10_000), seed)
    for value, (least, most) in zip(found, bands, strict=True):
        assert value is not None
        assert least <= value <= most


@pytest.mark.parametrize("seed", _SEEDS)
def test_spikes_and_nan_change_little(seed: int) -> None:
    def spoil(step: int, value: float) -> float:
        return math.nan if step % 97 == 0 else 20 * value if step % 131 == 0 else value

    first, second, third = _progress(_exponential, (1_000, 3_000, 10_000), seed, spoil=spoil)
    assert first is not None and 0.3 <= first <= 1.45
    assert second is not None and 0.57 <= second <= 0.78
    assert third is not None and 0.27 <= third <= 0.34


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("loss", [lambda _: 2.0, lambda step: 1 + step / 4000])
def test_a_loss_that_does_not_fall_has_no_progress(
    loss: Callable[[float], float], seed: int
) -> None:
    assert _progress(loss, (100, 1_000, 3_000), seed) == [None] * 3


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_smaller_learning_rate_shows_for_an_octave(seed: int) -> None:
    def dropped(step: float) -> float:
        base = 0.3 + 0.7 * math.exp(-step / 500)
        return base - (0.15 * (1 - math.exp(-(step - 6_000) / 500)) if step > 6_000 else 0)

    before, beside, later = _progress(dropped, (5_900, 9_000, 20_000), seed)
    assert before is not None and before < 0.03
    assert beside is not None and beside > 0.25
    assert later is not None and later < 0.03


@pytest.mark.parametrize(("scale", "shift"), [(1e-6, 0.0), (1e6, 0.0), (1.0, -100.0)])
def test_scale_and_shift_do_not_matter(scale: float, shift: float) -> None:
    marks = (1_000, 3_000)
    expected = _progress(_exponential, marks, 0)
    found = _progress(_exponential, marks, 0, scale=scale, shift=shift)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_loss_without_noise_is_followed() -> None:
    assert _progress(_exponential, (3_000,), 0, noise=0.0) == [pytest.approx(0.62, abs=0.06)]
    # Flat as long as nothing is usual yet, and then falling.
    found = _progress(lambda s: 1.0 if s < 50 else math.exp((50 - s) / 500), (500,), 0, noise=0.0)
    assert found[0] is not None and found[0] > 0.5


def test_nothing_is_said_of_few_losses() -> None:
    curve = LossCurve()
    for step in range(1, 64):
        curve = curve.observed(step, 100.0 - step)
        assert curve.progress is None
    assert curve.observed(64.0, 36.0).progress is not None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e200])
def test_what_is_no_loss_changes_nothing(loss: float) -> None:
    curve = LossCurve().observed(1, 1.0)
    assert curve.observed(2, loss) is curve
    assert curve.observed(0, 1.0) is curve
    assert curve.observed(math.nan, 1.0) is curve


@pytest.mark.parametrize("losses", [7, 16, 1_000])
def test_a_curve_survives_json_and_stays_small(losses: int) -> None:
    rng, curve = random.Random(losses), LossCurve()
    for step in range(1, losses + 1):
        curve = curve.observed(0.1 * step, rng.random())
    text = json.dumps(curve.to_plain())
    again = LossCurve.from_plain(json.loads(text))
    assert again == curve
    assert again.observed(200, 0.5) == curve.observed(200, 0.5)
    assert len(text) <= 1_024
    assert hash(curve)


def _some_curve(losses: int) -> Any:
    curve = LossCurve()
    for step in range(1, losses + 1):
        curve = curve.observed(step, 100.0 - step / 2)
    return curve.to_plain()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@given(_JSON)
def test_what_is_no_curve_is_a_fresh_one(value: object) -> None:
    assert LossCurve.from_plain(value) == LossCurve()
    assert LossCurve.from_plain(_some_curve(100) | {"version": 2}) == LossCurve()


@given(st.sampled_from([10, 15, 100]), st.data())
@settings(max_examples=300)
def test_a_damaged_curve_never_raises(losses: int, data: st.DataObject) -> None:
    plain = _some_curve(losses)
    where = plain[data.draw(st.sampled_from(["first", "levels", "bins"]))]
    if where and isinstance(where[0], list) and data.draw(st.booleans()):
        where = where[data.draw(st.integers(0, len(where) - 1))]
    if where:
        where[data.draw(st.integers(0, len(where) - 1))] = data.draw(_JSON)
    else:
        plain["count"] = data.draw(_JSON)
    curve = LossCurve.from_plain(plain)
    for step in range(101, 200):
        curve = curve.observed(step, 1.0)
    assert curve.progress is None or curve.progress >= 0
