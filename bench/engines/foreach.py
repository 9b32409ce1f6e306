"""Copy the state to other memory while training waits, as torch copies lists of tensors.

It is what a copy costs at least that is made of nothing but copies: nothing is checked, stored, or
there for another process.
"""

from __future__ import annotations

from pathlib import Path

import torch

from bench.engines.base import AtOnce, Plan, single_rank
from bench.work import Training, tensors


class ForEach(AtOnce):
    """One `torch._foreach_copy_` per snapshot, into tensors that were made at attach."""

    def attach(self, training: Training, folder: Path, plan: Plan) -> None:
        """See `Engine`."""
        single_rank("foreach", training)
        super().attach(training, folder, plan)
        self._live = [tensor.detach() for tensor in tensors(training.state())]
        self._copies = [tensor.clone() for tensor in self._live]
        self._step = 0

    def _save(self, step: int) -> None:
        torch._foreach_copy_(self._copies, self._live)
        self._step = step

    def restore(self, training: Training) -> int:
        """See `Engine`."""
        training.need_optimizer_state()
        live = [tensor.detach() for tensor in tensors(training.state())]
        torch._foreach_copy_(live, self._copies)
        return self._step

    def written(self) -> int:
        """See `Engine`."""
        return sum(copy.nbytes for copy in self._copies)


def make() -> ForEach:
    """Make the engine; see `bench.engines.make`."""
    return ForEach()
