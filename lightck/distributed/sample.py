"""The bytes of replicated state compared at each snapshot: a pure function of the tensors' lengths.

The tensors are laid end to end and cut into windows, and each turn takes the next one. If the state
is so small that even a small window would cost too much every time, only every so many turns take
one. Every byte has its turn within `ROTATION` turns, up to 8 GiB; beyond, a window is `MOST_BYTES`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ROTATION = 1024
"""Turns within which every byte is compared. A digest costs about 1/1024 of a plain copy."""
LEAST_BYTES = 256 << 10
"""The least size of a window, if there is so much state.

In a smaller window the work around the digest would cost more than the digest.
"""
MOST_BYTES = 8 << 20
"""The greatest size of a window, however large the state: the training thread digests it."""
PIECE_BYTES = 16 << 10
"""The bytes that a tensor in a window counts for, in addition to its own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of a tensor, given by its index."""

    tensor: int
    begin: int
    end: int


class Rotation:
    """The windows over tensors of given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Divide the tensors into windows."""
        self._lengths = lengths
        self._starts = [0, *accumulate(length + PIECE_BYTES for length in lengths)]
        size = self._starts[-1]
        self.windows = max(1, min(ROTATION, size // LEAST_BYTES), -(-size // MOST_BYTES))
        self.pause = max(1, ROTATION // self.windows)
        """Number of turns per window: a window is due when the turn is a multiple of it."""

    @property
    def turns(self) -> int:
        """Return in how many consecutive turns every byte is compared once."""
        return self.windows * self.pause

    def pieces(self, turn: int) -> list[Piece]:
        """Return the bytes to compare at this turn; most often none where `pause` is above 1."""
        if turn % self.pause or not self._lengths:
            return []
        window, size = turn // self.pause % self.windows, self._starts[-1]
        begin, end = (size * w // self.windows for w in (window, window + 1))
        found, i = [], bisect_right(self._starts, begin) - 1
        while i < len(self._lengths) and self._starts[i] < end:
            start = self._starts[i]
            # The extra bytes that a piece counts for, after its own, are not compared.
            piece = Piece(i, max(begin - start, 0), min(end - start, self._lengths[i]))
            if piece.begin < piece.end:
                found.append(piece)
            i += 1
        return found
