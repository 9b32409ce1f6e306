from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from lightck.region.native_pool import NativePool


@pytest.fixture
def cpus() -> Iterator[set[int]]:
    """The CPUs of this process, given back afterwards."""
    allowed = os.sched_getaffinity(0)
    yield allowed
    os.sched_setaffinity(0, allowed)


def test_no_number_of_threads_means_one_for_each_cpu_and_at_most_four(cpus: set[int]) -> None:
    with closing(NativePool(0, 4096, idle=True)) as pool:
        assert pool.threads == min(4, len(cpus))
    os.sched_setaffinity(0, {min(cpus)})
    with closing(NativePool(0, 4096, idle=True)) as pool:
        assert pool.threads == 1


def test_a_number_of_threads_holds_whatever_the_cpus(cpus: set[int]) -> None:
    os.sched_setaffinity(0, {min(cpus)})
    with closing(NativePool(3, 4096, idle=True)) as pool:
        assert pool.threads == 3


def test_idle_workers_leave_the_priority_and_the_cpus_of_others_alone(cpus: set[int]) -> None:
    def scheduled() -> dict[int, tuple[int, set[int]]]:
        found = {}
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                found[thread] = os.sched_getscheduler(thread), os.sched_getaffinity(thread)
        return found

    before = scheduled()  # with idle threads of another pool, where a test before left one open
    with closing(NativePool(2, 4096, idle=True)):
        during = scheduled()
    after = scheduled()
    assert before[os.getpid()] == (os.SCHED_OTHER, cpus)
    for thread in before.keys() & during.keys() & after.keys():
        assert before[thread] == during[thread] == after[thread]
