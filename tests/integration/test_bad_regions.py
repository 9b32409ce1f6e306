"""A region that is damaged, foreign, in use or not restored: a typed error; nothing is lost."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import processes
import pytest
import torch
from loops import Loop, mlp, of_live, of_stored, steps_at
from torch import nn

import lightck
from lightck.region.native import crc32c

VERSION_AT, CRC_AT, COPY_AT = 8, 956, (0, 4096)  # of a superblock; a test compares with format.h


def adam_loop(width: int = 16) -> Loop:
    model = mlp(width, 2)
    return Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=width)


def attach(path: Path, loop: Loop, **settings: object) -> lightck.Handle:
    return lightck.attach(loop.model, list(loop.optimizers), path, **settings)  # type: ignore[arg-type]


def train(path: Path, loop: Loop, steps: int, **settings: object) -> None:
    with attach(path, loop, **settings) as handle:
        for _ in range(steps):
            loop.run(1)
            handle.wait()
        loop.note()


def restored(path: Path) -> tuple[lightck.RestoreInfo | None, Loop]:
    loop = adam_loop()
    info = lightck.restore(loop.model, list(loop.optimizers), path)
    if info is not None:
        loop.step = info.step
    return info, loop


@pytest.fixture
def elsewhere(run_dir: Path) -> tuple[Path, Loop]:
    """A run that another process made: snapshots of steps 2 and 3, and what they hold."""
    loop = adam_loop()

    def job() -> tuple[dict[int, dict[str, str]], int]:
        train(run_dir, loop, 3)
        return loop.seen, loop.step

    loop.seen, loop.step = processes.run(job)
    return run_dir, loop


def still_there(elsewhere: tuple[Path, Loop]) -> None:
    path, loop = elsewhere
    loop.check(path, [2, 3])
    info, again = restored(path)
    assert info is not None and info.step == 3 and info.fell_back == ()
    assert of_live(again.model, again.optimizers) == loop.seen[3]


def uses(loop_of: Callable[[], Loop] = adam_loop) -> list[Callable[[Path], object]]:
    def use_attach(path: Path) -> object:
        return attach(path, loop_of(), overwrite=True)

    def use_restore(path: Path) -> object:
        return lightck.restore(loop_of().model, None, path)

    return [use_attach, use_restore, lightck.load, lightck.snapshots]


use_it = pytest.mark.parametrize("use", uses(), ids=lambda f: f.__name__)


# ---- Not a region, or not a whole one -----------------------------------------------------------


def set_version(file: Path, version: int) -> None:
    """In both superblocks, with good checksums: as another release would have written it."""
    raw = bytearray(file.read_bytes()[:8192])
    for copy in COPY_AT:
        struct.pack_into("<I", raw, copy + VERSION_AT, version)
        struct.pack_into("<I", raw, copy + CRC_AT, crc32c(bytes(raw[copy : copy + CRC_AT])))
    with file.open("r+b") as region:
        region.write(raw)


@use_it
@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_format_version_is_named_with_the_one_this_release_reads(
    elsewhere: tuple[Path, Loop], use: Callable[[Path], object], version: int
) -> None:
    file = elsewhere[0] / "region-00000.lck"
    set_version(file, version)
    content = file.read_bytes()
    with pytest.raises(lightck.RegionFormatError, match=rf"version {version}\b.*\b1\b"):
        use(elsewhere[0])
    assert file.read_bytes() == content, "a region that nobody could read was changed"
    set_version(file, 1)
    still_there(elsewhere)


@use_it
@pytest.mark.parametrize("left", [0, 1, 4095, 4096, 8192, 200_000, -1])
def test_a_truncated_region_is_refused_with_its_sizes(
    elsewhere: tuple[Path, Loop], use: Callable[[Path], object], left: int
) -> None:
    file = elsewhere[0] / "region-00000.lck"
    content = file.read_bytes()
    length = len(content) - 1 if left < 0 else left
    os.truncate(file, length)
    with pytest.raises(lightck.RegionFormatError, match=rf"\b{length}\b") as caught:
        use(elsewhere[0])
    if length >= 8192:
        assert str(len(content)) in str(caught.value)
    assert file.stat().st_size == length
    file.write_bytes(content)
    still_there(elsewhere)


@use_it
@pytest.mark.parametrize("content", [b"\0" * 8192, b"PK\3\4" * 4096, b"\xff" * (1 << 21)])
def test_a_file_that_is_no_region_is_refused_and_left_alone(
    run_dir: Path, use: Callable[[Path], object], content: bytes
) -> None:
    run_dir.mkdir(0o700)
    file = run_dir / "region-00000.lck"
    file.write_bytes(content)
    with pytest.raises((lightck.RegionFormatError, lightck.CorruptSnapshotError)):
        use(run_dir)
    assert file.read_bytes() == content


def test_a_step_that_is_not_there_is_named_with_those_that_are(
    elsewhere: tuple[Path, Loop],
) -> None:
    loop = adam_loop()
    before = of_live(loop.model, loop.optimizers)
    with pytest.raises(lightck.NoSnapshotError, match=r"wanted: 7; steps there: \[2, 3\]"):
        lightck.restore(loop.model, list(loop.optimizers), elsewhere[0], step=7)
    with pytest.raises(lightck.NoSnapshotError, match=r"wanted: 7; steps there: \[2, 3\]"):
        lightck.load(elsewhere[0], 7)
    assert of_live(loop.model, loop.optimizers) == before


def test_nothing_at_all_is_none_and_never_an_error(run_dir: Path) -> None:
    loop = adam_loop()
    assert restored(run_dir)[0] is None
    run_dir.mkdir(0o700)
    assert restored(run_dir)[0] is None
    attach(run_dir, loop).detach()  # a region without a snapshot
    assert restored(run_dir)[0] is None
    assert lightck.snapshots(run_dir).num_rows == 0
    with pytest.raises(lightck.NoSnapshotError):
        lightck.load(run_dir)


# ---- Of another model ---------------------------------------------------------------------------


class Other(nn.Sequential):
    """As the first model, but one layer is wider, one is gone and one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(16, 16))
        self.add_module("1", nn.Linear(16, 24))
        self.add_module("head", nn.Linear(24, 2))


def test_differences_of_another_model_are_listed_and_nothing_is_changed(
    run_dir: Path,
) -> None:
    model = mlp(16, 3)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), width=16)
    train(run_dir, loop, 2)
    other = Other()
    before = of_live(other, [])
    with pytest.raises(lightck.RestoreMismatchError) as caught:
        lightck.restore(other, None, run_dir)
    error = caught.value
    assert set(error.missing) == {"model/head.weight", "model/head.bias"}
    assert set(error.unexpected) == {"model/2.weight", "model/2.bias"}
    assert error.different == {
        "model/1.weight": "saved float32[16, 16], live float32[24, 16]",
        "model/1.bias": "saved float32[16], live float32[24]",
    }
    for part in (*error.missing, *error.unexpected, *error.different.values(), "strict=False"):
        assert part in str(error)
    assert of_live(other, []) == before

    info = lightck.restore(other, None, run_dir, strict=False)
    assert info is not None and info.step == 2
    assert set(info.skipped) == {*error.missing, *error.unexpected, *error.different}
    after, seen = of_live(other, []), loop.seen[2]
    for name in ("model/0.weight", "model/0.bias"):
        assert after[name] == seen[name]
    for name in (*error.missing, *error.different):
        assert after[name] == before[name]
    loop.check(run_dir, [1, 2])


def test_another_dtype_is_a_difference(run_dir: Path) -> None:
    loop = adam_loop()
    train(run_dir, loop, 1)
    halved = mlp(16, 2).bfloat16()
    with pytest.raises(
        lightck.RestoreMismatchError, match=r"saved float32\[16, 16\], live bfloat16\[16, 16\]"
    ):
        lightck.restore(halved, None, run_dir)
    info = lightck.restore(halved, None, run_dir, strict=False)
    assert info is not None
    assert len(info.skipped) == 4


def test_an_optimizer_of_another_kind_or_over_other_parameters_is_a_difference(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    train(run_dir, loop, 2)
    model = mlp(16, 2)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.AdamW(model[0].parameters(), lr=0.1),
    ):
        with pytest.raises(lightck.RestoreMismatchError, match=type(optimizer).__name__) as caught:
            lightck.restore(model, optimizer, run_dir)
        assert len(caught.value.missing) == 1
        info = lightck.restore(model, optimizer, run_dir, strict=False)
        assert info is not None and len(info.skipped) == 1
        assert {k: v for k, v in loop.seen[2].items() if k.startswith("model/")} == of_live(
            model, []
        )


def test_extras_that_the_snapshot_lacks_are_a_difference_and_those_left_over_are_told(
    run_dir: Path,
) -> None:
    loop = adam_loop()
    train(run_dir, loop, 1, extras={"kept": {"a": 1}, "dropped": {"b": 2}})
    kept: dict[str, int] = {}
    with pytest.raises(lightck.RestoreMismatchError, match="extras/new"):
        lightck.restore(loop.model, None, run_dir, extras={"kept": kept, "new": {}})
    assert kept == {}
    info = lightck.restore(
        loop.model, None, run_dir, extras={"kept": kept, "new": {}}, strict=False
    )
    assert info is not None
    assert kept == {"a": 1}
    assert info.leftover == ("dropped",)
    assert set(info.skipped) == {"extras/new"}


# ---- Whose turn it is ---------------------------------------------------------------------------


def test_attach_without_restore_is_refused_and_overwrites_nothing(
    elsewhere: tuple[Path, Loop],
) -> None:
    path, _ = elsewhere
    content = (path / "region-00000.lck").read_bytes()
    with pytest.raises(lightck.UnrestoredError, match=r"snapshots of steps \[2, 3\]") as caught:
        attach(path, adam_loop())
    for hint in ("restore", "another path", "overwrite=True"):
        assert hint in str(caught.value)
    assert (path / "region-00000.lck").read_bytes() == content
    still_there(elsewhere)


def test_attach_after_restore_goes_on(elsewhere: tuple[Path, Loop]) -> None:
    path, loop = elsewhere
    info, again = restored(path)
    again.seen = loop.seen
    train(path, again, 1)
    assert again.step == 4
    again.check(path, [3, 4])


def test_overwrite_gives_them_up_and_starts_anew(elsewhere: tuple[Path, Loop]) -> None:
    path, _ = elsewhere
    loop = adam_loop()
    train(path, loop, 1, overwrite=True)
    loop.check(path, [1])
    assert lightck.snapshots(path)["state"].to_pylist().count("abandoned") == 1


def test_overwrite_after_restore_gives_nothing_up_that_was_restored(
    elsewhere: tuple[Path, Loop],
) -> None:
    """A script may always pass overwrite=True: a crash before its first snapshot loses nothing."""
    path, loop = elsewhere

    def restore_attach_and_die() -> None:
        _, again = restored(path)
        attach(path, again, overwrite=True)
        os._exit(0)

    with pytest.raises(AssertionError, match="without a word"):
        processes.run(restore_attach_and_die)
    info, again = restored(path)
    assert info is not None and info.step == 3
    assert of_live(again.model, again.optimizers) == loop.seen[3]


def test_a_restore_of_an_older_step_lets_go_of_the_newer_ones(
    elsewhere: tuple[Path, Loop],
) -> None:
    path, loop = elsewhere
    again = adam_loop()
    info = lightck.restore(again.model, list(again.optimizers), path, step=2)
    assert info is not None and info.step == 2
    again.step = 2
    assert of_live(again.model, again.optimizers) == loop.seen[2]
    attach(path, again).detach()
    assert restored(path)[0].step == 2  # type: ignore[union-attr]
    again.seen = {2: loop.seen[2]}
    with attach(path, again) as handle:
        again.run(1)
        again.note()
        handle.wait()
    again.check(path, [2, 3])


def test_a_region_in_use_is_refused_to_a_second_writer_and_open_to_readers(
    run_dir: Path,
) -> None:
    def job(parent: processes.Parent) -> None:
        loop = adam_loop()
        with attach(run_dir, loop) as handle:
            for _ in range(3):
                loop.run(1)
                handle.wait()
            parent.send(loop.seen)
            parent.pause()
            loop.run(1)
            loop.note()
        parent.send(loop.seen)

    child = processes.start(job)
    seen = child.receive()
    file = run_dir / "region-00000.lck"
    with pytest.raises(lightck.RegionBusyError, match=str(file)):
        attach(run_dir, adam_loop(), overwrite=True)
    info, again = restored(run_dir)
    assert info is not None and info.step == 2
    assert of_live(again.model, again.optimizers) == seen[2]
    with pytest.raises(lightck.RegionBusyError, match=str(file)):
        attach(run_dir, again)
    assert of_stored(run_dir, 1) == seen[1]
    child.let_go()
    seen = child.receive()
    child.receive()
    assert child.join() == 0
    assert steps_at(run_dir) == [3, 4]
    assert of_stored(run_dir, 4) == seen[4]


def test_a_second_handle_in_the_same_process_is_refused_too(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop):
        loop.run(2)
        with pytest.raises(lightck.RegionBusyError, match="region-00000.lck"):
            attach(run_dir, loop)
        loop.note()
    loop.check(run_dir, [1, 2])


def test_a_restart_is_not_blocked_by_a_worker_that_outlives_its_killed_trainer(
    run_dir: Path,
) -> None:
    def job(parent: processes.Parent) -> None:
        loop = adam_loop()
        handle = attach(run_dir, loop)
        for _ in range(3):
            loop.run(1)
            handle.wait()
        worker = processes.fork()
        if worker == 0:
            signal.pause()  # a data-loader worker
            os._exit(0)
        parent.send((worker, loop.seen))
        parent.pause()

    child = processes.start(job)
    worker, seen = child.receive()
    try:
        child.kill()
        assert child.join() == -signal.SIGKILL
        os.kill(worker, 0)  # it lives
        info, again = restored(run_dir)
        assert info is not None and info.step == 2
        assert of_live(again.model, again.optimizers) == seen[2]
        train(run_dir, again, 1)
        assert steps_at(run_dir) == [2, 3]
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_child_neither_writes_nor_closes(run_dir: Path) -> None:
    loop = adam_loop()
    with attach(run_dir, loop) as handle:
        loop.run(2)
        handle.wait()

        def job() -> tuple[list[int], str]:
            loop.run(3)
            said = ""
            try:
                handle.snapshot()
            except lightck.LightckError as error:
                said = str(error)
            handle.close()
            return steps_at(run_dir), said

        steps, said = processes.run(job)
        assert steps == [1]
        assert "forked" in said
        loop.run(1)
        loop.note()
    loop.check(run_dir, [2, 3])


LEAVES = """
import sys, torch, lightck
sys.path.insert(0, {tests!r})
from loops import Loop, mlp
model = mlp(16, 2)
loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=0.1), width=16)
handle = lightck.attach(model, list(loop.optimizers), {path!r})
loop.run(2)
handle.wait()
loop.forward().backward()  # opens snapshot 2, and then the program ends
print(*sorted(loop.seen[2].items()), sep="\\n")
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise KeyError('the user')", "del handle"])
def test_an_interpreter_that_exits_without_close_keeps_what_was_open(
    run_dir: Path, end: str
) -> None:
    script = LEAVES.format(tests=str(Path(__file__).parent), path=str(run_dir), end=end)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == {"sys.exit(3)": 3, "raise KeyError('the user')": 1}.get(end, 0), (
        done.stderr
    )
    assert ("KeyError: 'the user'" in done.stderr) == end.startswith("raise")
    assert done.stderr.count("Traceback") == end.startswith("raise")
    assert steps_at(run_dir) == [1, 2]
    stored = sorted(of_stored(run_dir, 2).items())
    assert "\n".join(map(str, stored)) == done.stdout.strip()


# ---- Settings and extras ------------------------------------------------------------------------


def test_unknown_settings_are_named_and_nothing_is_made(run_dir: Path) -> None:
    with pytest.raises(lightck.ConfigError, match=r"slot = 3.*did you mean slots"):
        attach(run_dir, adam_loop(), slot=3)
    file = run_dir.with_name("config.toml")
    file.write_text("thread = 3\n")
    with pytest.raises(lightck.ConfigError, match=rf"thread = 3.*{file.name}"):
        attach(run_dir, adam_loop(), config=file)
    assert not run_dir.exists()


class Sampler:
    """An extra whose state can be saved by pickle only."""

    def state_dict(self) -> dict[str, object]:
        return {"epoch": 1, "queue": [1, {"key": lambda x: x}]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError


def test_an_extra_that_could_not_be_restored_is_an_error_at_attach_with_its_path(
    run_dir: Path,
) -> None:
    with pytest.raises(lightck.StateError, match="extras/sampler/queue/1/key.*function") as caught:
        attach(run_dir, adam_loop(), extras={"sampler": Sampler()})
    assert caught.value.path == "extras/sampler/queue/1/key"
    with pytest.raises(lightck.StateError, match=r"extras\['file'\]"):
        attach(run_dir, adam_loop(), extras={"file": object()})
    loop = adam_loop()
    with attach(run_dir, loop, extras={"counters": {"tokens": 3}}):
        loop.run(1)
    assert steps_at(run_dir) == [1]


def test_an_extra_that_turns_unrestorable_costs_its_snapshot_and_not_the_older_one(
    run_dir: Path,
) -> None:
    counters: dict[str, object] = {"tokens": 0}
    loop, reports = adam_loop(), []
    handle = attach(run_dir, loop, extras={"counters": counters}, on_error=reports.append)
    loop.run(3)
    handle.wait()
    counters["hook"] = print
    loop.run(2)
    assert {type(e) for e in reports} == {lightck.StateError}
    assert "extras/counters/hook" in str(reports[0])
    assert of_stored(run_dir, 2) == loop.seen[2]
    del counters["hook"]
    loop.run(2)
    loop.note()
    with pytest.raises(lightck.StateError):
        handle.close()
    assert handle.stats().failed == len(reports)
    assert steps_at(run_dir)[-1] == 7
    assert of_stored(run_dir, 7) == loop.seen[7]


def test_a_leftover_of_a_process_that_died_while_making_a_region_is_removed(
    run_dir: Path,
) -> None:
    run_dir.mkdir(0o700)
    (run_dir / "region-00000.new").write_bytes(b"half a region")
    assert restored(run_dir)[0] is None
    loop = adam_loop()
    train(run_dir, loop, 1)
    assert [p.name for p in run_dir.iterdir()] == ["region-00000.lck"]
