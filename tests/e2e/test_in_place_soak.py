"""Random deaths, stops and cuts of ranks under `lightck run`: golden, and survivors keep nothing.

`LIGHTCK_TEST_SEED` repeats a run's choices; the moments are the machine's. `LIGHTCK_SOAK_KILLS`
says how many disturbances the long form makes.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from support.inplace.soak import Held, Soak, disturb, golden, soaking

WORLD = 3
RSS_KIB = 16 << 10
WARM = 5
"""Recoveries in which allocators and libraries settle."""


def settle(soak: Soak, rank: int) -> None:
    """Wait until the process of a rank holds no more than before its recoveries.

    An old link is gone once nothing refers to it, which may take a collection of Python's.
    """
    found = soak.held[soak.pids[rank][-1]]
    first = found[0]

    def holds() -> bool:
        soak.order(rank, "m")
        last = found[-1]
        return last.threads <= first.threads and last.descriptors <= first.descriptors

    soak.wait_for(f"{first} again, of {found[-1]}", holds)
    print(f"rank {rank}: {first} .. {found[-1]}")


def rising(found: list[Held]) -> float:
    """Return KiB by which the memory grows per recovery, as a line through the measurements."""
    recoveries = [each.recoveries for each in found]
    return float(np.polyfit(recoveries, [each.rss_kib for each in found], 1)[0])


def golden_after(soak: Soak, folder: Path, options: tuple[str, ...]) -> None:
    print(
        f"{soak.killed} lost, {soak.stopped} of them stopped; {soak.paused} pauses, "
        f"{soak.cut} cuts, {soak.last} steps, restarts: {soak.restarts}"
    )
    plain = golden(folder / "golden", soak.world, soak.last, options)
    assert soak.differences(plain) == []


@pytest.mark.timeout(300)
def test_ranks_killed_stopped_and_cut_at_random_moments_leave_no_trace(
    region_dir: Path, rng: np.random.Generator
) -> None:
    with soaking(region_dir / "run", WORLD, int(rng.integers(1 << 30)), ("slow",)) as soak:
        disturb(soak, 6)
        soak.finish()
    golden_after(soak, region_dir, ())


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [(), ("metric",)], ids=["plain", "metric"])
def test_a_survivor_of_many_recoveries_holds_what_it_held_before(
    region_dir: Path, rng: np.random.Generator, options: tuple[str, ...]
) -> None:
    times = int(os.environ.get("LIGHTCK_SOAK_KILLS", "100"))
    seed = int(rng.integers(1 << 30))
    print(f"seed {seed}")
    with soaking(region_dir / "run", WORLD, seed, ("slow", *options)) as soak:
        disturb(soak, times - times // 2)
        disturb(soak, times // 2, spared=0)
        for each in soak.held[soak.pids[0][-1]]:
            print(each)
        settle(soak, 0)
        soak.finish()
    golden_after(soak, region_dir, options)
    settled = [each for each in soak.held[soak.pids[0][-1]] if each.recoveries > WARM]
    sizes = [each.rss_kib for each in settled]
    print(f"RSS KiB: {sizes[0]} .. {sizes[-1]}, {rising(settled):.1f} per recovery")
    assert max(sizes) - min(sizes) <= RSS_KIB
    assert rising(settled) * len(settled) <= RSS_KIB / 4
