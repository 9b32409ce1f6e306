"""`make gpu-check` runs in all its parts, with toys on a CPU, and says what it could not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import machine, record
from bench.errors import BenchError
from bench.gpu import measuring, results
from bench.gpu.__main__ import _BUDGET_S
from bench.gpu.check import Check
from bench.gpu.parts import PARTS, TESTS, Part, contenders_of, definition_of, seconds_of
from support import processes

_ROOT = Path(__file__).parents[2]
_MEASURED = [part for part in PARTS if part.group != TESTS]
# Toys of the same form as others that are here.
_ALIKE = ("gpu-models:gpt2-medium", "gpu-models:bert-large", "gpu-models:alexnet")
_DIFFERENT = [
    pytest.param(
        part,
        marks=[pytest.mark.soak] if part.group == "gpu-models" and "gpt2" not in part.name else [],
        id=part.name,
    )
    for part in _MEASURED
    if part.name not in _ALIKE
]


@pytest.mark.timeout(300)  # some of the engines are slow, even with toys
@pytest.mark.parametrize("part", _DIFFERENT)
def test_every_engine_of_a_part_is_measured_and_verified(part: Part, tmp_path: Path) -> None:
    whole = definition_of(part, device="cpu", small=True)

    def measured() -> None:
        warnings.resetwarnings()  # pytest turns them into errors
        measuring.measure(part, whole, tmp_path / "outcome.json", 5.0)

    processes.run(measured)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert not outcome["failed"]
    about = {"commit": "a commit", "machine": results.machine_of("cpu"), "tiny": True}
    results.add(tmp_path, whole, outcome, {}, about)
    (result,) = results.found_in(tmp_path)
    for contender in contenders_of(part, whole):
        notes = [r.note for r in result.records if r.engine == contender.label]
        assert any("equal bit for bit" in note for note in notes), contender.label
    text = results.tables([result])
    assert all(f"| {c.label} |" in text for c in contenders_of(part, whole))
    assert "numbers mean nothing" in text and "another engine is better" in text


def _make(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "gpu-check", f"PYTHON={sys.executable}", "VENV=/nowhere", *words]
    return subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, "OUT": str(tmp_path / "out"), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: Path) -> None:
    done = _make(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SKIPPED: gpu-check: no CUDA device" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, testing_library: Path) -> None:
    words = ["GPU_DEVICE=cpu", "GPU_PARTS=gpu-restore tests:others"]
    library = {"LIGHTCK_NATIVE": str(testing_library)}
    first = _make(tmp_path, *words, "GPU_BUDGET=9", **library)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "SKIPPED  gpu-restore" in first.stdout, first.stdout
    assert "GPU_PARTS='gpu-restore' runs it" in first.stdout
    assert "| tests:others | SKIPPED |" in (tmp_path / "out" / "report.md").read_text()
    second = _make(tmp_path, *words, "GPU_BUDGET=1000", **library)
    assert second.returncode == 0, second.stdout + second.stderr
    third = _make(tmp_path, *words, "GPU_BUDGET=1000", **library)
    assert third.returncode == 0, third.stdout
    assert "kept     gpu-restore" in third.stdout, third.stdout
    out = tmp_path / "out"
    names = {file.name for file in out.iterdir()}
    assert names == {"check.json", "report.md", "gpu-restore.parquet"}
    report = (out / "report.md").read_text()
    assert "| gpu-restore | kept |" in report
    assert "| lightck |" in report and "| torch.save |" in report


def _commands() -> Iterator[list[str]]:
    """Yield the words of every process's command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # gone
            continue


def _check(tmp_path: Path, seconds: float = 100.0) -> Check:
    return Check("cpu", tmp_path, time.monotonic() + seconds, commit="a commit")


def test_a_part_that_hangs_is_stopped_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, testing_library: Path
) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: True)  # `make test` has no transformers
    monkeypatch.setattr(machine, "versions", lambda names: {})
    monkeypatch.setenv("LIGHTCK_NATIVE", str(testing_library))
    hanging = tmp_path / "hanging.py"
    asleep = f"sleep 1{os.getpid()}"
    deaf = f"trap '' TERM; exec {asleep}"  # to be asked to end, as what is stuck in a driver is
    hanging.write_text(f"import subprocess\nsubprocess.run(['sh', '-c', {deaf!r}])\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {hanging}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    parts = [Part("tests:resume", 0, 1), Part("gpu-rate", 0, 1), Part("gpu-fence", 1000, 1)]
    check = _check(tmp_path / "out")
    assert check.run(parts) == 1
    states = {name: (each.state, each.why) for name, each in check.outcomes.items()}
    state, why = states["tests:resume"]
    assert state == "failed" and why.startswith("stopped after 1 s")
    assert (
        states["gpu-rate"][0] == "failed" and "direct: stopped after 1 s" in states["gpu-rate"][1]
    )
    assert states["gpu-fence"][0] == "SKIPPED" and "it needs 1000" in states["gpu-fence"][1]
    assert "tests:resume" in (tmp_path / "out" / "tests.txt").read_text()
    running = [" ".join(words) for words in _commands()]
    assert not [each for each in running if asleep in each or str(hanging) in each]


def test_every_part_is_begun_within_the_eight_minutes_though_each_takes_all_it_may() -> None:
    left, took = _BUDGET_S["cuda"], {}
    for i, part in enumerate(PARTS):
        took[part.name] = seconds = seconds_of(part, PARTS[i + 1 :], left)
        assert part.least_s <= seconds <= part.most_s, took
        left -= seconds
    assert _BUDGET_S["cuda"] < 480 and left >= 0


def test_where_time_is_short_the_first_parts_have_theirs() -> None:
    first, second = Part("first", 10, 50), Part("second", 20, 50)
    assert seconds_of(first, [second], 45) == 25
    assert seconds_of(first, [second], 29) == 29
    assert seconds_of(first, [second], 200) == 50
    assert seconds_of(first, [], 9) == 0


def test_a_missing_package_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed", lambda package: package != "cffi")
    with pytest.raises(BenchError, match="no cffi: docs/gpu-check.md says how"):
        _check(tmp_path).run([])


def test_the_native_part_is_built_with_gcc_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.gpu import build

    monkeypatch.delenv("LIGHTCK_NATIVE", raising=False)
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    made = build.library()
    assert made.parent == tmp_path and build.library() == made
    code = "from lightck.region import _ffi; print(_ffi.library().lck_abi_version())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        env={**os.environ, "LIGHTCK_NATIVE": str(made)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_toy_s_results_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = record.read(_ROOT / "tests" / "data" / "bench" / "sample.parquet")
    about = {**sample.about, "tiny": True}
    record.write(record.Result(about, sample.records), tmp_path / "gpu-rate.parquet")
    monkeypatch.setattr(results, "STORED", tmp_path / "stored")
    with pytest.raises(BenchError, match="made with toys"):
        results.take(tmp_path)
    assert not (tmp_path / "stored").exists()


def test_results_of_other_sources_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = record.read(_ROOT / "tests" / "data" / "bench" / "sample.parquet")
    about = {**sample.about, "tiny": False, "commit": "tree-0123456789abcdef"}
    record.write(record.Result(about, sample.records), tmp_path / "gpu-rate.parquet")
    monkeypatch.setattr(results, "STORED", tmp_path / "stored")
    with pytest.raises(BenchError, match="measured with tree-0123456789abcdef, here is tree-"):
        results.take(tmp_path)
    assert not (tmp_path / "stored").exists()


def test_the_page_shows_what_is_stored() -> None:
    page = results.PAGE.read_text()
    assert results.shown(page) == page, "run `python -m bench.gpu take FOLDER`"
