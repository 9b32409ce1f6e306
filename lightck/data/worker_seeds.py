"""Makes the random numbers of a loader's workers a function of the batch.

A worker takes a batch's indices from its queue just before it makes the batch, and one batch at a
time: so what unpickling the indices does there happens between two batches.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


class SeedingIndex(int):
    """An index that arrives in a worker as a plain one, and seeds the worker's generators there."""

    seed: str

    def __new__(cls, index: int, seed: str) -> SeedingIndex:
        """Make one from an index and a seed text."""
        made = super().__new__(cls, index)
        made.seed = seed
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (int(self), self.seed)


@dataclass(eq=False)
class SeedingBatch:
    """A batch's indices, which arrive in a worker as they are and seed its generators there."""

    indices: Any
    seed: str

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self.indices, self.seed)


def arrive(indices: Any, seed: str) -> Any:
    """Seed the global generators of this worker, and return the indices."""
    held = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    torch.default_generator.manual_seed(int.from_bytes(held, "little"))
    np.random.seed(np.frombuffer(held, np.uint32))
    random.seed(held)
    return indices
