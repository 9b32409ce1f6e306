"""Published formulas of how often to save and of what it wastes, as their authors give them.

They are for comparison (`lightck plan`, the benchmarks) and for checks of the policies. F1 to F9
are the numbers that the project's survey of prior systems gives them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


def young(cost: float, mtbf: float) -> float:
    """Return the interval of least waste to first order: sqrt(2 C M).

    F1: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Return the interval of least waste to higher order; `mtbf` where a save takes twice as long.

    F2: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    FGCS 22 (2006); the intervals that are published there agree to their digits.
    """
    if cost >= 2 * mtbf:
        return mtbf
    x = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - cost


def availability(save: float, failure: float, recovery: float) -> float:
    """Return the interval, saving included, at which the job is available for most of the time.

    F3: arXiv 2410.18124: Ts + sqrt(2 (Tf + Tr) Ts + Ts^2), Tf the mean time between failures.
    """
    return save + math.sqrt(2 * (failure + recovery) * save + save * save)


def checkfreq(
    step: float,
    update: float,
    copy: float,
    write: float,
    budget: float,
    gpu_copy: float | None = None,
) -> int:
    """Return the steps from one snapshot to the next by CheckFreq's Algorithm 1.

    F5: Mohan, Phanishayee, Chidambaram, CheckFreq: frequent, fine-grained DNN checkpointing, FAST
    2021. The system that goes with the paper then adds 2 whenever the overhead that it measures is
    above the budget, and never takes them back.

    Args:
        step: seconds of a step.
        update: the part of it in which weights are updated, beside which nothing can be copied.
        copy: seconds of a copy of the state to the host.
        write: seconds until that is on the medium.
        budget: share of the time that saving may cost.
        gpu_copy: seconds of a copy in the device's memory; None: it has no room for one.
    """
    stall = max(0.0, copy - (step - update))
    if gpu_copy is not None and gpu_copy <= stall:
        stall = gpu_copy
    steps = max((copy + write - stall) / step, math.ceil(stall / (budget * step)))
    return max(1, math.ceil(steps))


class CociPlan(NamedTuple):
    """The saves that COCI plans: loss between two of them, loss at the start, and their times."""

    quantum: float
    level: float
    slots: tuple[float, ...]


def coci(
    slope: float, offset: float, stall: float, rate: float, now: float = 0.0, done: int = 0
) -> CociPlan:
    """Return the times at which COCI saves, for a loss of exp(slope t + offset), slope below 0.

    F8: as in src/COCI_Iterator.py of wangzc-HPC/COCI, the code of FGCS 2025, doi
    10.1016/j.future.2024.107597; times are minutes there. It adds a time to a loss, and so its plan
    changes with the unit of time; in hours, minutes and seconds alike it wastes more than `young`,
    whether lost work is priced by its time or by its loss. It is here to be compared with.

    Args:
        slope: of the loss's logarithm over time.
        offset: that logarithm at time 0.
        stall: time that a save takes.
        rate: failures per unit of time.
        now: the time since the start.
        done: number of saves so far.
    """
    quantum = (1 - math.exp(slope * stall)) * (1 / (2 * rate) - 1 / (2 * slope))
    level = math.exp(slope * (now - done * stall) + offset)
    left = (level - i * quantum for i in range(1, math.floor(level / quantum) + 1))
    shift = done * stall - offset / slope
    return CociPlan(quantum, level, tuple(math.log(each) / slope + shift for each in left if each))


def pccheck(write: float, concurrent: int, slowdown: float, step: float) -> float:
    """Return the least steps between saves of which several are written at a time.

    F9: PCcheck (ASPLOS 2025), Tw / (N q t), from slides by others: Tw seconds of a write at worst,
    N writes at a time, q the share by which they may slow the training, t seconds of a step.
    """
    return write / (concurrent * slowdown * step)


@dataclass(frozen=True, kw_only=True)
class Waste:
    """The work that failures and snapshots waste, as a share of each rank's time.

    F7, first-order formulas, for intervals that are short against `mtbf_s`; L is 1 / `mtbf_s`:

        periodic(T)  o/T + L (T/2 + r)
        jit          s + L (d + j + rj + m)
        hybrid(T)    s + o/T + q L (T/2 + r) + (1 - q) L (d + j + rj + m)

    The first is least, sqrt(2 o L) + L r, at Young's interval T* = sqrt(2 o / L). Just-in-time
    snapshots leave a share q of the failures to periodic ones, which is least at T* / sqrt(q).
    Derived for lightck: the model is that of Gupta et al., Just-In-Time Checkpointing (EuroSys
    2024), whose own formulas could not be read.

    Attributes:
        mtbf_s: mean time between failures of the whole job.
        stall_s: o, what a periodic snapshot costs.
        restore_s: r, from a failure to training again, from a periodic snapshot.
        detect_s: d, until a failure is noticed.
        jit_s: j, of a just-in-time snapshot.
        jit_restore_s: rj, from there to training again.
        step_s: m, the minibatch that is repeated.
        armed: s, share of the time that being ready for a just-in-time snapshot costs.
        unrecoverable: q, share of the failures that leave none.
    """

    mtbf_s: float
    stall_s: float
    restore_s: float = 0.0
    detect_s: float = 0.0
    jit_s: float = 0.0
    jit_restore_s: float = 0.0
    step_s: float = 0.0
    armed: float = 0.0
    unrecoverable: float = 0.0

    @property
    def interval_s(self) -> float:
        """The periodic interval of least waste."""
        return young(self.stall_s, self.mtbf_s)

    @property
    def hybrid_interval_s(self) -> float:
        """The interval of least waste beside just-in-time snapshots."""
        return self.interval_s / math.sqrt(self.unrecoverable)

    def periodic(self, every_s: float | None = None) -> float:
        """Return the waste of periodic snapshots alone; None: at their best interval."""
        every_s = every_s or self.interval_s
        return self.stall_s / every_s + (every_s / 2 + self.restore_s) / self.mtbf_s

    def jit(self) -> float:
        """Return the waste of just-in-time snapshots alone, did they save every failure."""
        return self.armed + self._recovered_s / self.mtbf_s

    def hybrid(self, every_s: float | None = None) -> float:
        """Return the waste of both together; None: at their best interval."""
        every_s = every_s or self.hybrid_interval_s
        q, rate = self.unrecoverable, 1 / self.mtbf_s
        periodic = self.stall_s / every_s + q * rate * (every_s / 2 + self.restore_s)
        return self.armed + periodic + (1 - q) * rate * self._recovered_s

    @property
    def _recovered_s(self) -> float:
        return self.detect_s + self.jit_s + self.jit_restore_s + self.step_s
