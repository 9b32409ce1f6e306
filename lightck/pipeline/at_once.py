"""Measure up to which size a state is copied at once, by the training thread at forward start.

For a small state waking workers takes longer than the copy: it is copied before the opening of its
snapshot returns, and no worker, release or fence is involved.
"""

from __future__ import annotations

import time

from lightck.pipeline.placement import dram_rate
from lightck.region.native_pool import NativePool

WAKES = 12
"""A snapshot through the window costs the training as much as so many wakes of a worker take:
releases, the fence, its audit and the bandwidth that workers take away. Measured on two cores of
an EPYC, 1 to 32 MB in 96 tensors: at once is cheaper up to 8 MB, the window from 16 MB on, and this
puts the limit at 8 to 21 MB."""
MOST_BYTES = 64 << 20
"""Larger states are never copied at once, and nothing is measured for them."""
_SAMPLES = 3
_SAMPLE_BYTES = 1 << 20
_PAUSE_S = 2e-4
"""The time after which a worker without work sleeps again."""
_LATE_S = 2e-3
"""Workers that take longer to wake count as this late: others have the CPUs."""


def at_once_bytes(pool: NativePool, state_bytes: int) -> int:
    """Measure the bytes up to which a state is copied at once; 0 for a state that is too large.

    Takes a millisecond or two. For the training thread.
    """
    if state_bytes > MOST_BYTES:
        return 0
    wakes = []
    for _ in range(_SAMPLES):
        time.sleep(_PAUSE_S)
        wakes.append(pool.wake_time(_LATE_S))
    return int(WAKES * min(wakes) * dram_rate(_SAMPLE_BYTES))
