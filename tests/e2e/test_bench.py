"""Every benchmark definition runs, tiny, each engine in its own process, every result verified.

Processes are forked here, so that torch need not load thirty times; one test goes through the
command line and new processes.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import definition, engines, execute, launch, link, picture, record, report, runner
from bench.engines.lightck import Lightck
from bench.errors import BenchError, Unavailable
from bench.group import Place
from bench.measures.loop import Loop
from bench.record import Result
from bench.work import Training, Work, tensors
from support import processes

_ROOT = Path(__file__).parents[2]
_MAIN = {
    "training": "extra",
    "idle": "idle_hooks",
    "memory": "extra_dram",
    "trace": "trace_overhead",
    "jit": "jit",
    "busy": "stall",
    "recovery": "recovery",
    "restart": "restart_s",
    "policies": "ratio",
    "policies_real": "overhead",
    "ranks": "extra",
    "commit_ranks": "commit",
    "restore_ranks": "restore",
    "in_place": "pause_s",
}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Import once what every child would."""
    importlib.import_module("torch._dynamo")  # the first optimizer does
    for name, kind in engines.KINDS.items():
        if kind.module.startswith("bench.engines.") and not engines.missing(name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what peers still call is theirs
                importlib.import_module(kind.module)
    for measure in definition.KINDS:
        importlib.import_module(f"bench.measures.{measure}")


def forked(job: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Do what `launch.in_processes_of_their_own` does over loopback; torch is loaded already."""
    world = job["work"]["world"]
    with tempfile.TemporaryDirectory() as folder:

        def perform(rank: int) -> dict[str, Any]:
            warnings.resetwarnings()  # pytest turns them into errors; users of an engine do not
            torch.manual_seed(0)
            place = Place(rank, world, os.path.join(folder, "meeting"))
            return runner.perform({**job, "place": place.as_json()})

        ranks = [processes.start(lambda _, rank=rank: perform(rank)) for rank in range(world)]  # type: ignore[misc]
        try:
            return launch.merged({rank: child.receive() for rank, child in enumerate(ranks)})
        finally:
            for child in ranks:
                child.kill()
                child.join()


def _ran(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[definition.Definition, Result]:
    monkeypatch.setattr(execute.machine, "commit", lambda: "not asked for")
    tiny = definition.tiny(definition.load(name))
    return tiny, execute.run(tiny, "a test", forked, lambda text: None)


@pytest.mark.timeout(1800)  # two dozen engines, on a machine that may be loaded
@pytest.mark.parametrize("name", definition.names())
def test_a_definition_runs_and_every_engine_is_verified(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny, result = _ran(name, monkeypatch)
    for contender in tiny.contenders:
        if engines.missing(contender.engine):
            assert contender.label in result.about["absent"]
            continue
        if tiny.kind == "native":  # verifies every repetition against the sources' checksums
            assert result.of(contender.label, "write") is not None
            continue
        if contender.method.get("case") == "cost":  # trains without a fault
            assert result.of(contender.label, "cost_s") is not None
            continue
        if tiny.kind == "in_place" and contender.label in result.about["absent"]:
            continue  # torchft and NVRx are in environments of their own
        main = result.of(contender.label, _MAIN.get(tiny.kind, tiny.kind))
        assert main is not None, contender.label
        verified = "nothing to verify" if contender.engine == "none" else "equal bit for bit"
        if tiny.kind != "in_place" or contender.engine == "lightck":  # others' losses may differ
            assert verified in main.note
    record.write(result, tmp_path / "result.parquet")
    text = report.render([record.read(tmp_path / "result.parquet")], {})
    assert all(f"| {contender.label} |" in text for contender in tiny.contenders)
    assert all(target.row in text for target in tiny.targets)


def test_pairs_are_refused_for_an_engine_that_goes_on_in_later_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "unfair.toml"
    file.write_text(
        'about = "x"\nkind = "training"\nthreads = 1\n[work]\nmodel = "tiny"\n'
        '[[engine]]\nengine = "checkfreq"\n'
    )
    monkeypatch.setattr(execute.machine, "commit", lambda: "not asked for")
    with pytest.raises(BenchError, match="checkfreq: policy pairs .* goes on in later steps"):
        execute.run(definition.load(str(file)), "a test", forked, lambda text: None)


def test_checkfreq_chooses_its_own_interval_when_asked_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "profiled.toml"
    file.write_text(
        'about = "x"\nkind = "training"\nthreads = 1\n[work]\nmodel = "tiny"\n'
        '[method]\npolicy = "blocks"\nblock = 1\nleast = 2\nmost = 2\nsettle = 1\n'
        '[[engine]]\nengine = "checkfreq"\nsettings = { profiled = true }\n'
    )
    monkeypatch.setattr(execute.machine, "commit", lambda: "not asked for")
    result = execute.run(definition.load(str(file)), "a test", forked, lambda text: None)
    found = result.of("checkfreq", "extra")
    assert found is not None and "equal bit for bit" in found.note


@pytest.mark.parametrize("interleaved", [True, False])
def test_not_interleaved_means_that_everything_is_copied_before_the_forward(
    interleaved: bool, region_dir: Path
) -> None:
    def bytes_left() -> int:
        training = Training(Work("tiny", sequence=8))
        training.steps(1)
        engine = Lightck({"schedule": "backward"}, interleaved=interleaved)
        loop = Loop(training, engine)
        loop.attach(region_dir)
        loop.run(then=True)
        copied: list[int] = []
        first = training.plain.get_submodule("layers")
        first.register_forward_pre_hook(
            lambda module, inputs: copied.append(engine.handle.stats().bytes_copied)
        )
        loop.run(then=False)
        engine.finish()
        return sum(t.nbytes for t in tensors(training.state())) - copied[-1]

    assert (processes.run(bytes_left) > 0) is interleaved


def test_readme_s_picture_is_a_step_of_a_traced_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="SKIPPED: no matplotlib, nothing was drawn")
    drawn: list[list[str]] = []
    do = picture._do
    monkeypatch.setattr(picture, "_do", lambda how, where: drawn.append(how) or do(how, where))
    picture.draw(tmp_path / "docs" / "timeline.png", steps=9, model="tiny")
    assert (tmp_path / "docs" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    _, command = drawn
    first, last = command[command.index("--steps") + 1].split(":")
    assert first == last and 3 <= int(first) <= 9, "one step, after the first ones"


def test_the_command_runs_a_definition_in_processes_of_its_own(tmp_path: Path) -> None:
    if not (_ROOT / ".git").exists():
        pytest.skip("SKIPPED: no git checkout, and results need a commit")
    command = [sys.executable, "-m", "bench", "run", "native", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = record.read(tmp_path / "native.parquet")
    assert result.about["command"] == "python -m bench run native --tiny"
    assert result.about["tiny"] is True
    assert result.of("lightck", "write_ratio") is not None
    assert [file.name for file in tmp_path.iterdir()] == ["native.parquet"]


_SLOW = """
about = "x"
kind = "ranks"
threads = 1
[work]
model = "tiny"
sequence = 8
world = 2
link = 100
[method]
block = 2
warmup = 1
settle = 1
least = 2
most = 2
patient = true
[[engine]]
engine = "blocking"
"""


def _command(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "slow.toml").write_text(text)
    arguments = ["run", str(tmp_path / "slow.toml"), "--out", str(tmp_path / "out")]
    return [sys.executable, "-m", "bench", *arguments]


@pytest.fixture
def a_link() -> None:
    """Skips where no slow network can be made."""
    if not (_ROOT / ".git").exists():
        pytest.skip("SKIPPED: no git checkout, and results need a commit")
    try:
        with link.between(2, 100):
            pass
    except Unavailable as why:
        pytest.skip(f"SKIPPED: {why}")


def test_the_command_trains_two_ranks_over_a_slow_network(a_link: None, tmp_path: Path) -> None:
    done = subprocess.run(_command(tmp_path, _SLOW), cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = record.read(tmp_path / "out" / "slow.parquet").of("blocking", "extra")
    assert found is not None and found.note.endswith("restored and equal bit for bit on 2 ranks")


def test_where_no_slow_network_can_be_made_the_definition_is_skipped_visibly(
    tmp_path: Path,
) -> None:
    if not (_ROOT / ".git").exists():
        pytest.skip("SKIPPED: no git checkout, and results need a commit")
    command = _command(tmp_path, _SLOW)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "git").symlink_to("/usr/bin/git")
    environment = {**os.environ, "PATH": str(tools)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "SKIPPED: slow: a link of 100 Mbit/s needs ip, tc, unshare, nsenter" in done.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_run_that_was_killed(a_link: None, tmp_path: Path) -> None:
    endless = _SLOW.replace("most = 2", "most = 1_000_000\nseconds = 1000")
    endless = endless.replace("least = 2", "least = 1_000_000")
    run = subprocess.Popen(
        _command(tmp_path, endless),
        cwd=_ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    _wait_for(lambda: len(_mentioning(tmp_path)) == 5, "the run, its two ranks and two keepers")
    run.send_signal(signal.SIGKILL)
    run.wait()
    _wait_for(lambda: not _mentioning(tmp_path), "no process left")


def _wait_for(state: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 100
    while not state():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _mentioning(folder: Path) -> list[int]:
    """Processes that have a folder's name in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # gone, or another user's
            continue
    return found
