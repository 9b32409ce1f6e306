"""Decide when a snapshot is due, by pure functions of step, time, epoch and measured cost.

Any object with a method `due(moment: Moment) -> bool` is a policy. Those here combine with `|` and
`&`: `EverySteps(100) | EveryEpochs()`.
"""

from lightck.policy.combined import AllOf, AnyOf
from lightck.policy.hybrid import Hybrid
from lightck.policy.parsing import parse
from lightck.policy.policies import AtSteps, EveryEpochs, EverySeconds, EverySteps
from lightck.policy.waste import Waste

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
