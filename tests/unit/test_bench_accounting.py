"""CPU time and memory of all processes are found, and intervals follow from what snapshots cost."""

from __future__ import annotations

import math
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.measures import training
from bench.measures.accounting import Cpu, Peak, descendants
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


def test_memory_at_its_peak_counts_and_what_lies_in_the_folder_does_not(tmp_path: Path) -> None:
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
    # Others may use shared memory meanwhile.
    assert after.bytes - before.bytes > big / 2


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
