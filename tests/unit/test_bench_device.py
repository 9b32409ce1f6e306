"""Benchmarks on a device measure intervals and parts; engines for it copy what they should."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import definition
from bench.definition import Method
from bench.engines import checkfreq_device, dcp_pinned
from bench.engines.base import Engine, Plan
from bench.errors import BenchError
from bench.gpu.parts import PARTS, TESTS, chosen, contenders_of, definition_of, files_of
from bench.measures import device_training
from bench.measures.device_training import Block
from bench.place import ROOT
from bench.work import Training, Work, copied, difference
from support import processes

_STEP = 0.1  # s
_NORMED = Work("resnet18-thin", "sgd")  # a forward changes BatchNorm's buffers


class Simulated:
    """A session with an engine that costs so much per snapshot, and whose clock is its own."""

    def __init__(self, cost: float, *, seconds: float, spills: bool = False, busy: int = 1) -> None:
        """`busy`: steps that a snapshot takes; one that is due within slips."""
        self.cost, self.busy, self.left, self.slips = cost, busy, seconds, 0
        self.job = SimpleNamespace(method=Method(block=8, least=3, most=6))
        self.spills = spills
        self.blocks: list[Block] = []

    def waits(self) -> bool:
        return not self.spills

    def alone(self, steps: int) -> Block:
        return self.block(steps, steps)

    def left_s(self) -> float:
        return self.left

    def slipped(self) -> int:
        return self.slips

    def block(self, steps: int, every: int) -> Block:
        due = -(-steps // every)
        taken = due if every >= self.busy else -(-due // self.busy)
        self.slips += due - taken
        without = steps * _STEP
        found = Block(due, steps, without + taken * self.cost, without)
        self.left -= found.carrying_s + found.without_s
        self.blocks.append(found)
        return found


def _found(session: Any) -> tuple[list[Block], int, int, str]:
    probe = session.block(2, 2)
    every, slipped = device_training._every_step(session, probe)
    _, interval, how = device_training._interval(session, probe, every, slipped)
    return every, slipped, interval, how


def test_every_step_is_found_affordable_by_measuring_it() -> None:
    every, slipped, interval, how = _found(Simulated(0.001, seconds=30))
    assert (interval, how, slipped) == (1, "measured", 0)
    assert every[0].overhead == pytest.approx(0.01)


def test_a_dearer_snapshot_is_measured_at_the_interval_that_it_allows() -> None:
    every, _, interval, how = _found(Simulated(0.0099, seconds=60))
    assert every[0].overhead == pytest.approx(0.099)
    assert (interval, how) == (5, "measured")


def test_where_there_is_no_time_to_measure_it_is_calculated() -> None:
    _, _, interval, how = _found(Simulated(0.099, seconds=4))
    assert interval == 50 and how.startswith("calculated from")


def test_a_snapshot_that_takes_seconds_is_not_taken_every_step() -> None:
    every, slipped, interval, how = _found(Simulated(3.0, seconds=6))
    assert (every, slipped) == ([], 0)
    assert interval == 1500 and how.startswith("calculated")


def test_slips_at_every_step_are_told_and_their_overhead_does_not_count() -> None:
    _, slipped, interval, how = _found(Simulated(0.001, seconds=60, spills=True, busy=4))
    assert slipped > 0
    assert interval >= 4, how


_WAIT_S = 60.0


def _restored(engine: Engine, kept: Any) -> str | None:
    """Return what differs between what was there and what comes back."""
    engine.finish()
    fresh = Training(_NORMED, seed=1)
    assert engine.restore(fresh) == 3
    return difference(kept, fresh.state())


def _begun(engine: Engine, folder: Path) -> tuple[Training, Any]:
    training = Training(_NORMED)
    training.steps(1)
    engine.attach(training, folder, Plan())
    kept = copied(training.state())
    engine.begin(3)
    return training, kept


def test_checkfreq_s_copy_is_of_its_step_however_late_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated, write = threading.Event(), checkfreq_device.write

    def late(*arguments: Any, **options: Any) -> None:
        assert updated.wait(_WAIT_S)
        write(*arguments, **options)

    monkeypatch.setattr(checkfreq_device, "write", late)
    engine = checkfreq_device.make()
    training, kept = _begun(engine, tmp_path)
    training.compute()
    engine.before_update()
    training.update()
    updated.set()
    assert _restored(engine, kept) is None


def test_dcp_s_copy_is_of_its_step_however_late_it_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, stage = threading.Event(), dcp_pinned.DefaultStager._stage

    def late(stager: Any, *arguments: Any, **options: Any) -> Any:
        assert computed.wait(_WAIT_S)
        return stage(stager, *arguments, **options)

    monkeypatch.setattr(dcp_pinned.DefaultStager, "_stage", late)

    def run() -> None:
        warnings.resetwarnings()  # pytest turns them into errors
        engine = dcp_pinned.make()
        training, kept = _begun(engine, tmp_path)
        training.compute()
        computed.set()
        engine.before_update()
        training.update()
        assert _restored(engine, kept) is None

    processes.run(run)  # a process group of its own


@pytest.mark.parametrize("part", [p for p in PARTS if p.group != TESTS], ids=lambda p: p.name)
def test_a_part_is_some_engines_of_a_definition_on_the_device(part: Any) -> None:
    whole = definition_of(part, device="cuda", small=False)
    assert whole.work.device == "cuda"
    found = contenders_of(part, whole)
    assert found and all(whole.work_of(each).device == "cuda" for each in found)
    toys = definition_of(part, device="cpu", small=True)
    assert [c.label for c in contenders_of(part, toys)] == [c.label for c in found]
    assert all(toys.work_of(each).device == "cpu" for each in toys.contenders)


def test_every_engine_of_the_definitions_belongs_to_one_part() -> None:
    for name in {part.group for part in PARTS} - {TESTS}:
        whole = definition.load(f"gpu/{name}")
        parts = [part for part in PARTS if part.group == name]
        labels = [each.label for part in parts for each in contenders_of(part, whole)]
        assert sorted(labels) == sorted(each.label for each in whole.contenders)


def test_every_file_of_tests_belongs_to_one_part() -> None:
    there = sorted(file.name for file in (ROOT / "tests" / "gpu").glob("test_*.py"))
    found = [name for part in chosen([TESTS]) for name in files_of(part)]
    assert sorted(found) == there
    assert [files_of(p) for p in chosen(["tests:faults"])] == [["test_gpu_faults.py"]]


def test_parts_are_asked_for_by_name_or_by_kind() -> None:
    assert chosen([]) == list(PARTS)
    assert [p.rest for p in chosen(["tests"])] == ["resume", "ordering", "faults", "others"]
    assert [p.name for p in chosen(["gpu-rate", "tests:faults"])] == ["tests:faults", "gpu-rate"]
    with pytest.raises(BenchError, match="no part 'gpu-rates'; there are tests:resume"):
        chosen(["gpu-rates"])


def test_a_gpu_is_for_the_kinds_that_time_it_rightly(tmp_path: Any) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(
        'about = "x"\nkind = "training"\n[work]\nmodel = "tiny"\ndevice = "cuda"\n'
        '[[engine]]\nengine = "none"\n'
    )
    with pytest.raises(BenchError, match="device = cuda: only device_rate"):
        definition.load(str(file))
