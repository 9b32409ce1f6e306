"""A region may be written after a restore, by one at a time, or after a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightck
from support import processes
from support.loops import (
    Loop,
    adam_loop,
    attach,
    of_live,
    of_stored,
    restored,
    steps_at,
    still_there,
    train,
)


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
    refusal = f"{file}.* its owner is process {child.pid}$"
    with pytest.raises(lightck.RegionBusyError, match=refusal):
        attach(run_dir, adam_loop(), overwrite=True)
    info, again = restored(run_dir)
    assert info is not None and info.step == 2
    assert of_live(again.model, again.optimizers) == seen[2]
    with pytest.raises(lightck.RegionBusyError, match=refusal):
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
        refusal = rf"region-00000\.lck.* its owner is process {os.getpid()} \(this one\)$"
        with pytest.raises(lightck.RegionBusyError, match=refusal):
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
        if processes.fork() == 0:  # a data-loader worker; it has dropped what a fork drops
            parent.send((os.getpid(), loop.seen))
            signal.pause()
            os._exit(0)
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
from support.loops import Loop, mlp
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
    script = LEAVES.format(path=str(run_dir), end=end)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == {"sys.exit(3)": 3, "raise KeyError('the user')": 1}.get(end, 0), (
        done.stderr
    )
    assert ("KeyError: 'the user'" in done.stderr) == end.startswith("raise")
    assert done.stderr.count("Traceback") == end.startswith("raise")
    assert steps_at(run_dir) == [1, 2]
    stored = sorted(of_stored(run_dir, 2).items())
    assert "\n".join(map(str, stored)) == done.stdout.strip()


def test_attach_refuses_to_drop_what_another_process_added_since_the_restore(
    run_dir: Path,
) -> None:
    def job(restore_first: bool) -> int:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if restore_first:
            assert lightck.restore(model, optimizer, run_dir) is not None
        with lightck.attach(model, optimizer, run_dir, slots=4) as handle:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return handle.step

    assert processes.run(lambda: job(False)) == 1
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    info = lightck.restore(model, optimizer, run_dir)
    assert info is not None and info.step == 1
    assert processes.run(lambda: job(True)) == 2
    with pytest.raises(lightck.UnrestoredError, match="2"):
        lightck.attach(model, optimizer, run_dir)
    assert lightck.load(run_dir)["step"] == 2
