"""The rows of `lightck plan`: a policy that was played, beside what the formulas say."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightck.cli.plan_data import Failures, PlannedJob, of_world, until
from lightck.policy.formulas import Waste
from lightck.policy.simulation import Costs, PlayedRun, simulate
from lightck.types import Policy

FALL = 5.0
"""The logarithm of by how much the loss falls, for `quality`."""


@dataclass(frozen=True)
class Row:
    """A policy, played for a job of so many ranks."""

    ranks: int
    policy: str
    outcome: PlayedRun
    mtbf_s: float
    formula: float | None

    @property
    def interval_s(self) -> float | None:
        """Return the mean time from one snapshot to the next, restarts aside."""
        trained_s = self.outcome.horizon_s - self.outcome.down_s
        return trained_s / self.outcome.snapshots if self.outcome.snapshots else None

    def share(self, part: str) -> float:
        """Return a part of the time as a share: `stall_s`, ..."""
        return float(getattr(self.outcome, part) / self.outcome.horizon_s)

    @property
    def lost(self) -> tuple[float, float] | None:
        """Return the mean of what a failure loses, and what 95 % of them lose at most."""
        lost = sorted(self.outcome.lost_s)
        return (sum(lost) / len(lost), lost[math.ceil(0.95 * len(lost)) - 1]) if lost else None


def played(
    policy: Policy, job: PlannedJob, failures: Failures, ranks: int, days: float | None
) -> Row:
    """Play a policy for a job of so many ranks."""
    costs = of_world(job, ranks)
    horizon_s = failures.horizon_s(ranks, days)
    mtbf_s = failures.mtbf_s(ranks)
    costs = replace(costs, loss=lambda trained_s: math.exp(-FALL * trained_s / horizon_s))
    coming = until(failures.make(mtbf_s), horizon_s)
    outcome = simulate(policy, costs, coming, horizon_s, record=job.record)
    row = Row(ranks, str(policy), outcome, mtbf_s, None)
    if row.interval_s is None:
        return row
    return replace(row, formula=formula(costs, mtbf_s, row.interval_s, job.unsaved))


def waste_of(costs: Costs, mtbf_s: float, unsaved: float) -> Waste:
    """Return the formulas for a job of whose failures this share is not saved just in time."""
    jit = costs.jit
    return Waste(
        mtbf_s=mtbf_s,
        stall_s=costs.cost_s,
        restore_s=costs.restart_s,
        detect_s=jit.detect_s if jit else 0.0,
        jit_s=jit.save_s if jit else 0.0,
        jit_restore_s=costs.restart_s,
        step_s=costs.step_s / 2,
        unrecoverable=unsaved,
    )


def formula(costs: Costs, mtbf_s: float, every_s: float, unsaved: float) -> float | None:
    """Return the share of the time that is no training, to first order; None where it is no use."""
    waste = waste_of(costs, mtbf_s, unsaved)
    found = waste.hybrid(every_s) if costs.jit else waste.periodic(every_s)
    # What is in flight is lost, too. First order means that little is lost.
    found += waste.unrecoverable * costs.persist_s / mtbf_s
    return found if found < 0.5 else None
