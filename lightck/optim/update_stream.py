"""How an optimizer asks for the place that its update writes a snapshot to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightck.region.native_pool import NativeSnapshot


@dataclass(frozen=True)
class UpdateStream:
    """Place for one update's bytes: a batch of copies that nobody else makes."""

    snapshot: NativeSnapshot
    batch: int
    copies: npt.NDArray[np.uint32]
    """For each row, the number in the batch of each of its tensors' copies, in `COLUMNS` columns;
    NOT_STREAMED."""
    ended: Callable[[bool], None]
    """To be called behind the update: whether the bytes are there."""


class OpenStream(Protocol):
    """Opens the place for one update's bytes."""

    def __call__(
        self, rows: Sequence[tuple[torch.Tensor, ...]], pointers: npt.NDArray[np.uint64]
    ) -> UpdateStream | None:
        """Return the place, or None where there is none: the update is then made in place only.

        Args:
            rows: each parameter and the tensors of its state that the update writes.
            pointers: their addresses, row by row.
        """
