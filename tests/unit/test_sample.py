"""The rotating sample of replicated state: everything has its turn, and ranks choose alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.distributed import divergence
from lightck.distributed.divergence import (
    LEAST_BYTES,
    MOST_BYTES,
    PIECE_BYTES,
    ROTATION,
    SampleRotation,
)

LENGTHS = st.lists(st.integers(1, 3 * LEAST_BYTES), min_size=1, max_size=40)


def covered(rotation: SampleRotation, lengths: list[int], first: int) -> list[int]:
    """Return how often each byte has its turn within one round; as counts of bytes."""
    seen = [np.zeros(length, np.uint8) for length in lengths]
    for turn in range(first, first + rotation.turns):
        for piece in rotation.pieces(turn):
            seen[piece.tensor][piece.begin : piece.end] += 1
    return [int(count) for each in seen for count in np.unique(each)]


@settings(max_examples=60)
@given(LENGTHS, st.integers(0, 10**6))
def test_every_byte_has_exactly_one_turn_in_any_round(lengths: list[int], first: int) -> None:
    rotation = SampleRotation(lengths)
    assert rotation.turns <= ROTATION
    assert set(covered(rotation, lengths, first)) == {1}


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 10**9))
def test_ranks_with_the_same_lengths_choose_the_same_pieces(lengths: list[int], turn: int) -> None:
    assert SampleRotation(lengths).pieces(turn) == SampleRotation(list(lengths)).pieces(turn)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 1 << 34), min_size=1, max_size=60), st.integers(0, 10**6))
def test_no_window_is_larger_than_what_is_said(lengths: list[int], turn: int) -> None:
    size = sum(lengths) + PIECE_BYTES * len(lengths)
    rotation = SampleRotation(lengths)
    taken = sum(p.end - p.begin for p in rotation.pieces(turn))
    assert taken <= max(LEAST_BYTES * 2, size // ROTATION + 1)
    assert taken <= MOST_BYTES
    # Spread over the turns it is the stated part of everything.
    assert size / rotation.turns <= 2 * max(size / ROTATION, 1)
    assert rotation.turns == rotation.windows * rotation.pause


def test_many_small_tensors_do_not_make_many_pieces() -> None:
    rotation = SampleRotation([8] * 100_000)
    most = max(len(rotation.pieces(turn)) for turn in range(rotation.turns))
    assert most <= 100_000 * (PIECE_BYTES + 8) // rotation.windows // PIECE_BYTES + 2


def test_a_rotation_that_leaves_a_byte_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SampleRotation.pieces

    def short(self: SampleRotation, turn: int) -> list[divergence.SamplePiece]:
        return [divergence.SamplePiece(p.tensor, p.begin, p.end - 1) for p in right(self, turn)]

    monkeypatch.setattr(SampleRotation, "pieces", short)
    assert 0 in covered(SampleRotation([1000, 5]), [1000, 5], 0)


def test_nothing_at_all_is_no_error() -> None:
    assert SampleRotation([]).pieces(0) == []
