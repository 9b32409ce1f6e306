"""The machine's own limits, not injected ones: full file systems, file sizes, memory of a group."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightck
from support import faults, processes
from support.loops import Loop, adam_loop, attach, mlp, of_live, restored, steps_at, train

MEMORY = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


def skip(why: str) -> None:
    """Skip, and say why also where nobody asks pytest for reasons."""
    print(f"SKIPPED: {why}")
    pytest.skip(why)


def ran(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def mounted(*options: str) -> Iterator[Path]:
    """A file system of 24 MiB; a visible skip where mounting is not allowed."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        where = Path(folder, "mounted")
        where.mkdir()
        source = "none"
        if "ext4" in options:
            source = f"{folder}/image"
            Path(source).write_bytes(b"")
            os.truncate(source, 24 * MIB)
            if not ran("mkfs.ext4", "-q", "-m", "0", source):
                skip("no mkfs.ext4")
        if not ran("mount", *options, source, str(where)):
            skip(f"mount {' '.join(options)}: not allowed here")
        try:
            where.chmod(0o700)
            yield where
        finally:
            assert ran("umount", str(where))


MOUNTS = {
    "ext4": ("-o", "loop", "-t", "ext4"),
    "tmpfs": ("-o", "size=24m", "-t", "tmpfs"),
}


def fill(file: Path) -> None:
    """Take every byte that is left."""
    with file.open("wb", buffering=0) as out, pytest.raises(OSError, match="No space left"):
        while True:
            out.write(bytes(1 << 16))


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_full_file_system_is_told_at_attach_and_leaves_nothing(kind: str) -> None:
    with mounted(*MOUNTS[kind]) as where:
        fill(where / "filler")
        loop = adam_loop()
        with pytest.raises(lightck.RegionFullError, match=r"\d+ bytes needed, \d+ free"):
            attach(where / "run", loop)
        assert not list((where / "run").iterdir())
        (where / "filler").unlink()
        train(where / "run", loop, 2)
        assert steps_at(where / "run") == [1, 2]


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_file_system_that_fills_up_stops_growth_and_no_commit(kind: str) -> None:
    with mounted(*MOUNTS[kind]) as where:
        path, loop = where / "run", adam_loop()
        handle = attach(path, loop)
        loop.run(2)
        handle.wait()
        size = (path / "region-00000.lck").stat().st_size
        fill(where / "filler")
        for _ in range(3):  # what is allocated is there
            loop.run(1)
            handle.wait()
        assert handle.stats().failed == 0 and handle.last_committed_step == 4
        wide = torch.nn.Sequential(torch.nn.Linear(16, 8_000), torch.nn.Linear(8_000, 16))
        loop.model.extend(wide)
        loop.optimizers[0].add_param_group({"params": wide.parameters()})
        with pytest.warns(RuntimeWarning, match=r"\d+ bytes needed, \d+ free"):
            loop.run(1)
            handle.wait()
        assert (path / "region-00000.lck").stat().st_size == size
        (where / "filler").unlink()
        loop.run(1)
        loop.note()
        with pytest.raises(lightck.RegionFullError):
            handle.close()  # of the growth that failed; the last step is saved all the same
        assert steps_at(path)[-1] == loop.step
        loop.check(path, steps_at(path))


# ---- Sizes of files -----------------------------------------------------------------------------


@pytest.mark.parametrize("handler", ["default", "the user's"])
@pytest.mark.parametrize("told", [True, False])
def test_a_file_size_limit_is_an_error_and_sends_nobody_a_signal(
    run_dir: Path, disk_dir: Path, handler: str, told: bool
) -> None:
    """`told` False: the limit is not known beforehand, the kernel itself refuses."""

    def job() -> tuple[list[str], int]:
        calls: list[int] = []
        signal.signal(
            signal.SIGXFSZ,
            signal.SIG_DFL if handler == "default" else lambda number, _: calls.append(number),
        )
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        texts = []
        for path in (run_dir, disk_dir):
            if not told:
                faults.arm(faults.LIMIT)
            try:
                attach(path, adam_loop())
            except lightck.RegionFullError as error:
                texts.append(str(error))
            assert not list(path.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        train(run_dir, adam_loop(), 2)
        return texts, len(calls)

    texts, calls = processes.run(job)
    assert len(texts) == 2 and all("bytes needed" in text for text in texts)
    assert all(("RLIMIT_FSIZE" if told else "File too large") in text for text in texts)
    assert calls == 0
    assert steps_at(run_dir) == [1, 2]


# ---- Memory of a control group ------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group (v1) of its own; a visible skip where it cannot be made."""
    where = MEMORY / f"lightck-test-{os.getpid()}"
    try:
        where.mkdir()
    except OSError as error:
        skip(f"{where}: {error.strerror}: no memory control groups (v1, as root) here")
    yield where
    for _ in range(100):  # the killed are still being taken apart
        with contextlib.suppress(OSError):
            where.rmdir()
            return
        time.sleep(0.05)
    raise AssertionError(f"{where} cannot be removed")


def join(group: Path, limit: int) -> None:
    """Be its only member."""
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        if (group / name).exists():
            (group / name).write_text(str(limit))
    (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.parametrize("medium", ["tmpfs", "file"])
def test_a_trainer_that_the_oom_killer_took_in_a_commit_goes_on_from_the_one_before(
    run_dir: Path, disk_dir: Path, group: Path, medium: str
) -> None:
    path = run_dir if medium == "tmpfs" else disk_dir

    def doomed(parent: processes.Parent) -> Any:
        loop = adam_loop()
        handle = attach(path, loop)
        loop.run(3)
        handle.wait()
        parent.send((handle.last_committed_step, loop.seen))
        faults.delay(faults.COMMIT, 3600)
        threading.Thread(target=hoard_all, daemon=True).start()
        loop.run(1)  # its commit begins, and will not end: here, or on the commit thread
        parent.pause()

    def hoard_all() -> None:
        time.sleep(0.5)
        join(group, 128 * MIB)
        hoard = []
        while True:
            hoard.append(b"\xff" * MIB)

    child = processes.start(doomed)
    committed, seen = child.receive()
    assert child.join() == -signal.SIGKILL
    assert "oom_kill 1" in (group / "memory.oom_control").read_text()
    info, again = restored(path)
    assert info is not None and info.step == committed == 2 and info.fell_back == ()
    assert of_live(again.model, again.optimizers) == seen[2]
    with attach(path, again) as handle:
        again.run(2)
        handle.wait()
        again.note()
    again.check(path, steps_at(path))


def test_a_region_beyond_the_groups_memory_is_refused_before_it_is_taken(
    run_dir: Path, group: Path
) -> None:
    def job() -> str:
        join(group, 64 * MIB)
        model = mlp(512, 2)  # 6 MiB with its optimizer
        loop = Loop(model, torch.optim.AdamW(model.parameters()), width=512)
        with pytest.raises(lightck.RegionFullError) as caught:
            attach(run_dir, loop, slots=16)
        assert not list(run_dir.iterdir())
        with attach(run_dir, loop):
            loop.run(2)
        return str(caught.value)

    text = processes.run(job)
    needed, free = (int(word) for word in text.split() if word.isdigit() and len(word) > 6)
    assert needed > 64 * MIB > free
    assert steps_at(run_dir)
