"""Decide when a snapshot is due, by pure functions of step, time, epoch and measured cost.

Any object with a method `due(moment: Moment) -> bool` is a policy. Those here combine with `|` and
`&`: `EverySteps(100) | EveryEpochs()`.
"""

from lightck.policy.hybrid import Hybrid, Waste
from lightck.policy.parsing import parse
from lightck.policy.policies import AllOf, AnyOf, AtSteps, EveryEpochs, EverySeconds, EverySteps

__all__ = [
    "AllOf",
    "AnyOf",
    "AtSteps",
    "EveryEpochs",
    "EverySeconds",
    "EverySteps",
    "Hybrid",
    "Waste",
    "parse",
]
