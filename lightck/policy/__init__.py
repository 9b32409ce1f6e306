"""Decide by pure functions when a snapshot is due, and which ones a history keeps (`keep`).

Any object with a method `due(moment: Moment) -> bool` is a policy. Those here combine with `|` and
`&`: `EverySteps(100) | EveryEpochs()`. None reads a clock: what they decide from is given to them.
"""

from lightck.policy.auto import Auto
from lightck.policy.best import OnBest
from lightck.policy.budget import Budget
from lightck.policy.combination import AllOf, AnyOf, Combinable
from lightck.policy.due import AtSteps, EveryEpochs, EverySeconds, EverySteps, Hybrid
from lightck.policy.keep import Best, Every, Keep, Kept, Newest, Steps, Within
from lightck.policy.quality import Quality
from lightck.policy.words import parse

__all__ = [
    "AllOf",
    "AnyOf",
    "AtSteps",
    "Auto",
    "Best",
    "Budget",
    "Combinable",
    "Every",
    "EveryEpochs",
    "EverySeconds",
    "EverySteps",
    "Hybrid",
    "Keep",
    "Kept",
    "Newest",
    "OnBest",
    "Quality",
    "Steps",
    "Within",
    "parse",
]
