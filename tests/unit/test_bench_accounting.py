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
