"""Which bytes of replicated state are compared at which snapshot: a pure function of their lengths.

The tensors are laid end to end and cut into windows; each turn takes the next window, or, where the
state is so small that even a little would cost too much every time, only every so many turns do.
Every byte has its turn within `ROTATION` turns, up to 8 GiB; beyond, a window is `MOST_BYTES`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ROTATION = 1024
"""Turns within which every byte is compared: what a digest costs, spread over them, is about that
part of a plain copy."""
LEAST_BYTES = 256 << 10
"""Of a window, if there is so much: below, the work around it would cost more than the digest."""
MOST_BYTES = 8 << 20
"""Of a window, however large the state is: the training thread computes it."""
PIECE_BYTES = 16 << 10
"""What a tensor in a window counts for beside its own bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of a tensor, given by its index."""

    tensor: int
    begin: int
    end: int


class Rotation:
    """The windows over tensors of given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Divide them."""
        self._lengths = lengths
        self._starts = [0, *accumulate(length + PIECE_BYTES for length in lengths)]
        size = self._starts[-1]
        self.windows = max(1, min(ROTATION, size // LEAST_BYTES), -(-size // MOST_BYTES))
        self.pause = max(1, ROTATION // self.windows)
        """A window is due at every so many turns."""

    @property
    def turns(self) -> int:
        """Consecutive turns among which every byte has one."""
        return self.windows * self.pause

    def pieces(self, turn: int) -> list[Piece]:
        """What is compared at this turn; most often nothing where `pause` is above 1."""
        if turn % self.pause or not self._lengths:
            return []
        window, size = turn // self.pause % self.windows, self._starts[-1]
        begin, end = (size * w // self.windows for w in (window, window + 1))
        found, i = [], bisect_right(self._starts, begin) - 1
        while i < len(self._lengths) and self._starts[i] < end:
            start = self._starts[i]
            # What stands for the piece itself, behind the bytes, is in nobody's window.
            piece = Piece(i, max(begin - start, 0), min(end - start, self._lengths[i]))
            if piece.begin < piece.end:
                found.append(piece)
            i += 1
        return found
