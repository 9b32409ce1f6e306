"""CPU time and memory of all processes are found, and intervals follow from what snapshots cost."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.measures import accounting, training
from bench.measures.accounting import Cpu, Peak, Queued, descendants
from bench.statistics import Estimate

_SPIN = "import time\nwhile time.process_time() < {}: pass\nprint(flush=True)\ninput()"


def _spinning(seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _SPIN.format(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_cpu_time_of_processes_counts_while_they_run_and_once_they_have_ended() -> None:
    cpu = Cpu()
    before = cpu()
    with _spinning(0.5) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants()
        cpu.look()
        running = cpu() - before
        child.communicate(b"\n")
    ended = cpu() - before
    assert 0.5 <= running <= ended


def test_sleeping_costs_no_cpu_time() -> None:
    cpu = Cpu()
    before, begin = cpu(), time.perf_counter()
    time.sleep(0.5)
    assert cpu() - before < time.perf_counter() - begin


def test_anonymous_memory_counts_at_its_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "_shared_bytes", lambda folder: 0)  # others use it meanwhile

    def touched(bytes_: int) -> None:
        with mmap.mmap(-1, bytes_, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            for page in range(0, bytes_, mmap.PAGESIZE):
                memory[page] = 1
            time.sleep(0.2)  # it is looked at now and then

    big = 256 << 20
    with Peak(tmp_path) as before:
        touched(mmap.PAGESIZE)
    with Peak(tmp_path) as after:
        touched(big)
    assert after.bytes - before.bytes > big / 2


def test_shared_memory_counts_but_for_the_files_of_snapshots(
    region_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Used:
        f_blocks, f_bfree, f_frsize = 1000, 400, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Used)
    snapshots = region_dir / "run"
    snapshots.mkdir()
    (snapshots / "region").write_bytes(bytes(10 * 4096))
    assert accounting._shared_bytes(Path("/var")) == 600 * 4096, "another medium"
    assert accounting._shared_bytes(snapshots) == 590 * 4096, "it lies in shared memory itself"


@pytest.mark.parametrize(
    ("extra", "step", "percent", "least", "steps"),
    [
        ((0.1, 0.05, 0.2), (1.0, 0.5, 2.0), 5, 1, (2, 1, 8)),
        ((0.1, 0.05, 0.2), (1.0, 0.5, 2.0), 1, 1, (10, 3, 40)),
        ((0.1, 0.05, 0.2), (1.0, 0.5, 2.0), 1, 20, (20, 20, 40)),
        ((-0.1, -0.2, 0.0), (1.0, 1.0, 1.0), 5, 1, (1, 1, 1)),
        ((0.1, -math.inf, math.inf), (1.0, -math.inf, math.inf), 5, 1, (2, 1, math.inf)),
    ],
)
def test_snapshots_are_as_far_apart_as_they_must_be(
    extra: tuple[float, float, float],
    step: tuple[float, float, float],
    percent: int,
    least: int,
    steps: tuple[float, float, float],
) -> None:
    assert training._spaced(Estimate(*extra), Estimate(*step), percent, least) == steps


def test_waiting_is_no_time_in_the_queue_and_a_taken_processor_is() -> None:
    def by(others: int) -> tuple[float, float]:
        """Compute on one CPU beside so many others: seconds in its queue, and in all."""
        spinning = [_spinning(60.0) for _ in range(others)]
        queued = Queued()
        before, begin = queued(), time.perf_counter()
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        found = queued() - before, time.perf_counter() - begin
        for child in spinning:
            child.kill()
            child.communicate()
        return found

    queued = Queued()
    if math.isnan(queued()):
        pytest.skip("this kernel does not count it")
    before, begin = queued(), time.perf_counter()
    time.sleep(0.2)
    assert queued() - before < time.perf_counter() - begin - 0.1
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        waited, spent = by(others=2)
    finally:
        os.sched_setaffinity(0, allowed)
    # All of the time is either the thread's own or others'.
    assert waited == pytest.approx(spent - 0.3, abs=0.1 * spent)


def test_how_much_more_the_first_part_has_grown_is_told_of_three_readings() -> None:
    assert training._grown([1.0, 5.0, 6.0]) == 3.0


def test_without_a_second_clock_nothing_is_told_of_it() -> None:
    series = training.Series(extra_run=[1.0, math.nan])
    assert training._by_second_clock(series) == []
    series = training.Series(extra_run=[1.0, 1.0])
    (record,) = training._by_second_clock(series)
    assert (record.measure, record.unit, record.value) == ("extra_run", "s", 1.0)
