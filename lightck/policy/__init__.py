"""Decide by pure functions when a snapshot is due (`due`), and which ones a history keeps (`keep`).

Neither reads a clock: what they decide from is given to them.
"""

from lightck.policy.due import (
    AllOf,
    AnyOf,
    AtSteps,
    Combinable,
    EveryEpochs,
    EverySeconds,
    EverySteps,
    Hybrid,
    parse,
)
from lightck.policy.keep import Best, Every, Keep, Kept, Newest, Steps, Within

__all__ = [
    "AllOf",
    "AnyOf",
    "AtSteps",
    "Best",
    "Combinable",
    "Every",
    "EveryEpochs",
    "EverySeconds",
    "EverySteps",
    "Hybrid",
    "Keep",
    "Kept",
    "Newest",
    "Steps",
    "Within",
    "parse",
]
