"""Measures steps with and without a snapshot beside them: what a snapshot costs besides its stall.

A copy in the background takes memory bandwidth and cores from the training, here or on another
rank, for which this one then waits in the allreduce. CheckFreq (FAST 2021, section 4.3) compares
the durations of iterations for that; the part that is measured exactly, the stall, is kept apart.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_STEPS = 31
_LEAST = 8
_SNAPSHOTS = 9
_NO_QUIET = 1 << 20  # steps: as if none had ever been quiet
_OVERHEAD_S = 300.0


class _Median:
    """The median of the last values."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._last) == _STEPS:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append(value)
        insort(self._sorted, value)

    @property
    def count(self) -> int:
        return len(self._last)

    @property
    def value(self) -> float:
        """Return the lower median; there is a value."""
        return self._sorted[(len(self._sorted) - 1) // 2]


class StepTimes:
    """Seconds of steps, apart for those beside which a snapshot was on its way.

    Attributes:
        step_s: median seconds of the last steps; None before the second.
        quiet_s: the same of those without a snapshot beside them; None while there was none.
        overhead: the share of the last five minutes that snapshots have cost.

    Used by the training thread, once per step; takes a few microseconds. Any thread may read the
    attributes.
    """

    def __init__(self) -> None:
        """Begin without a measurement."""
        self.step_s: float | None = None
        self.quiet_s: float | None = None
        self.overhead = 0.0
        self._age = self._ever_busy = 0
        self._all, self._quiet, self._slower = _Median(), _Median(), _Median()
        self._before: tuple[float, float, int, bool] | None = None
        """Time, stalled seconds, snapshots and whether one was on its way, when a step ended."""
        self._busy_steps = 0
        """Steps beside which a snapshot was on its way, since the last one was captured."""
        self._per_snapshot: deque[int] = deque(maxlen=_SNAPSHOTS)
        self._costs: deque[tuple[float, float]] = deque()
        """When each of the last snapshots was captured, and what it had cost."""
        self._spent_s = 0.0
        """The sum of these costs."""
        self._began_s: float | None = None

    def step_ended(
        self, now_s: float, stalled_s: float, captured: int, in_flight: bool
    ) -> float | None:
        """Note that a step has ended.

        Args:
            now_s: now, on a monotonic clock.
            stalled_s: seconds that the training thread has spent in lightck so far.
            captured: snapshots that were captured so far.
            in_flight: whether a snapshot is on its way.

        Returns:
            The step's seconds; None for the first.
        """
        before, self._before = self._before, (now_s, stalled_s, captured, in_flight)
        if before is None:
            self._began_s = now_s
            return None
        step_s, new = now_s - before[0], captured - before[2]
        net_s = max(step_s - (stalled_s - before[1]), 0.0)
        self._all.add(step_s)
        self.step_s = self._all.value
        if in_flight or before[3] or new:
            if self.quiet_s:
                # In quiet steps of that time: a machine that becomes slower slows down both.
                self._slower.add(net_s / self.quiet_s)
            self._busy_steps += 1
            self._age += 1
            self._ever_busy += 1
        else:
            self._quiet.add(net_s)
            self.quiet_s, self._age = self._quiet.value, 0
        if new:
            self._per_snapshot.append(self._busy_steps)
            self._busy_steps = 0
        return step_s

    @property
    def quiet_age(self) -> int:
        """Return the steps since a quiet one; very many until enough are known to compare with.

        A policy then leaves some snapshots out, also one that would take each step's from the
        first on: what they cost shows in no other way.
        """
        few = self._quiet.count < _LEAST <= self._ever_busy
        return _NO_QUIET if few else self._age

    def cost_s(self, stall_s: float | None) -> float | None:
        """Return what one snapshot adds to the training, in seconds; None until that is known.

        Args:
            stall_s: what the training thread spends in one.
        """
        return None if stall_s is None else stall_s + self.interference_s

    @property
    def interference_s(self) -> float:
        """Return by how much one snapshot makes the steps longer beside which its copy runs.

        It is 0 until there are enough steps of both kinds to compare.
        """
        if min(self._slower.count, self._quiet.count) < _LEAST or not self._per_snapshot:
            return 0.0
        steps = sum(self._per_snapshot) / len(self._per_snapshot)
        return steps * max(0.0, self._slower.value - 1.0) * self._quiet.value

    def spent(self, now_s: float, cost_s: float | None, snapshots: int) -> None:
        """Note how many snapshots were captured since the last step, and what each has cost.

        It is called behind `step_ended`.
        """
        if snapshots and cost_s is not None:
            self._costs.append((now_s, cost_s * snapshots))
            self._spent_s += cost_s * snapshots
        while self._costs and self._costs[0][0] < now_s - _OVERHEAD_S:
            self._spent_s -= self._costs.popleft()[1]
        if not self._costs:
            self._spent_s = 0.0  # and what rounding has left
        since_s = min(now_s - (self._began_s or now_s), _OVERHEAD_S)
        # A number for `stats()`, on any thread: it could not go through the costs meanwhile.
        self.overhead = self._spent_s / since_s if since_s > 0 else 0.0
