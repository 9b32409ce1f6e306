"""No verification, no number: what counts as equal, and what is done about the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from bench import engines
from bench.engines.base import Counts
from bench.engines.blocking import Blocking
from bench.errors import BenchError, NoNumber
from bench.measures.loop import Loop, require_all
from bench.work import Training, Work, copied, difference, tensors

_TINY = Work("tiny", sequence=8)


def _trained() -> Training:
    training = Training(_TINY)
    training.compute()
    training.update()
    return training


def test_a_state_equals_its_copy() -> None:
    state = _trained().state()
    assert difference(state, copied(state)) is None


def test_one_flipped_bit_is_a_difference() -> None:
    state = _trained().state()
    other = copied(state)
    weight = other["model"]["layers.0.weight"]
    weight.view(torch.int32)[3, 5] ^= 1
    assert difference(state, other) == "model.layers.0.weight: 1 of 8192 bytes differ"


def test_nan_equals_the_same_nan_and_zero_is_not_minus_zero() -> None:
    def state(value: float) -> dict[str, object]:
        return {"x": torch.tensor(value)}

    assert difference(state(math.nan), state(math.nan)) is None
    assert difference(state(0.0), state(-0.0)) is not None


def test_numbers_shapes_and_names_count_too() -> None:
    state = _trained().state()
    other = copied(state)
    other["optimizer"]["param_groups"][0]["lr"] = 1.0
    assert "param_groups.0.lr: expected 0.0001, found 1.0" in str(difference(state, other))
    other = copied(state)
    del other["optimizer"]["state"][0]
    assert "names are only on one side" in str(difference(state, other))


def test_tied_weights_are_copied_once() -> None:
    model = [t for t in tensors(_trained().state()) if t.shape == (64, 32)]
    # The embedding, which is also the head; one linear layer; and AdamW's two moments of each.
    assert len(model) == 6


class _Wrong(Blocking):
    """Brings back one wrong bit."""

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        step = super().restore(training)
        next(training.model.parameters()).detach().view(torch.int32)[0, 0] ^= 1
        return step


class _Stale(Blocking):
    """Brings back another step than it says it saved."""

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        return super().restore(training) - 1


class _Loses(Blocking):
    """Leaves a due snapshot out, and says so."""

    def finish(self) -> Counts:
        """See `Engine`."""
        counts = super().finish()
        return Counts(counts.complete - 1, {"slipped": 1})


class _Torn(Blocking):
    """Copies once training has moved on."""

    def begin(self, step: int) -> None:
        """See `Engine`."""
        self._late = step

    def drain(self) -> None:
        """See `Engine`."""

    def finish(self) -> Counts:
        """See `Engine`."""
        super().begin(self._late)
        return super().finish()


def _finished(engine: engines.base.Engine, folder: Path) -> str:
    loop = Loop(_trained(), engine)
    loop.attach(folder)
    loop.run(then=True)
    return loop.finish(Training(_TINY, seed=1))


def test_a_restored_snapshot_that_is_equal_counts(region_dir: Path) -> None:
    told = _finished(Blocking(), region_dir)
    assert told == "1 snapshots complete, step 1 restored and equal bit for bit"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (_Wrong, r"embedding.weight: 1 of 8192 bytes differ"),
        (_Stale, r"restored step 0, the last snapshot is of step 1"),
        (_Loses, r"1 snapshots were due, 0 are complete \(1 slipped\)"),
        (_Torn, r"is not what was saved"),
    ],
)
def test_an_engine_that_does_not_do_its_work_gets_no_number(
    kind: type[Blocking], told: str, region_dir: Path
) -> None:
    with pytest.raises(BenchError, match=told):
        _finished(kind(), region_dir)


def test_who_only_slips_is_told_from_who_does_wrong() -> None:
    counts = Counts(complete=3, lost={"slipped": 1, "torn": 0})
    with pytest.raises(NoNumber, match="4 snapshots were due, 3 are complete"):
        require_all(counts, 4)
    for lost in ({"slipped": 1, "torn": 1}, {}):
        with pytest.raises(BenchError) as raised:
            require_all(Counts(complete=2, lost=lost), 4)
        assert type(raised.value) is BenchError


def test_the_plan_is_settled_before_a_step_ends() -> None:
    seen: list[int] = []

    class Watching(Blocking):
        def attach(self, training: Training, folder: Path, plan: object) -> None:
            """See `Engine`."""

        def begin(self, step: int) -> None:
            """See `Engine`."""
            seen.append(step)

        def stalls(self) -> Mapping[str, float]:
            """See `Engine`."""
            return {}

    loop = Loop(_trained(), Watching())
    loop.attach(Path())
    for then in (False, True, True, False, True):
        loop.run(then=then)
    assert seen == [2, 3], "a step carries the snapshot of the one before it"
    assert loop.plan.due == {2, 3, 5}
